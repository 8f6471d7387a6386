"""Versions of a model: counted from 1, never twice; found by number, shown where they run, kept in use."""

from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import pytest

from stageloom.planner.dispatch.ports import ReportRecord
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.devices import revoke_device
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.models import (
    model_detail,
    model_infos,
    model_references,
    named_models,
    newest_models,
)
from stageloom.planner.store.plans import add_plan, plan_info
from stageloom.planner.store.profiles import request_profile, request_stage_profile
from stageloom.planner.store.store import Store
from stageloom.shared.errors import InputError
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Report
from tests.store.helpers import NANO, add_model, enrol, small_plan


def versions(store: Store, names: Sequence[str]) -> list[tuple[str, int, Digest]]:
    return [(one.model, one.version, one.digest) for one in store.read(named_models, list(names))]


def desire(store: Store, plan: str, model: str) -> None:
    """A plan of that model's newest version, pushed to the device."""
    store.write(add_plan, plan, small_plan(store, model), "sequential")
    store.write(push, Push(device=NANO, plan=plan, decided_by="operator"))


def report_running(store: Store, revision: int, plan: str) -> None:
    running = Report(revision=revision, active=store.read(plan_info, plan).digest)
    LinkStore(store).record_reports([ReportRecord(NANO, 7, running)])


def test_another_file_under_a_name_is_the_next_version_and_the_same_file_stays_what_it_is(
    store: Store, tmp_path: Path
) -> None:
    first, second = add_model(store, tmp_path), add_model(store, tmp_path, operators=8)
    assert versions(store, ["relu", "relu@1", "relu@2"]) == [
        ("relu", 2, second),
        ("relu", 1, first),
        ("relu", 2, second),
    ]
    assert add_model(store, tmp_path) == first
    again = store.add_model("relu", tmp_path / "relu.artifact", first)
    assert (again.version, again.added, again.newest) == (1, False, False)
    assert store.read(newest_models, 9) == ["relu"]
    assert store.read(model_references) == {first: "relu@1", second: "relu"}


def test_a_number_is_not_given_twice_though_its_version_or_all_were_removed(
    store: Store, tmp_path: Path
) -> None:
    first = add_model(store, tmp_path)
    add_model(store, tmp_path, operators=8)
    store.remove_model("relu@2")
    assert versions(store, ["relu"]) == [("relu", 1, first)]
    third = add_model(store, tmp_path, operators=8)
    assert versions(store, ["relu"]) == [("relu", 3, third)]
    store.remove_model("relu")
    assert LinkStore(store).artifact(first) is None and store.read(model_infos) == []
    with pytest.raises(InputError, match="no model 'relu'"):
        store.remove_model("relu")
    assert add_model(store, tmp_path) == first
    assert versions(store, ["relu"]) == [("relu", 4, first)]


def test_a_file_that_is_added_while_the_last_version_of_it_is_removed_stays(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A model is added whose file is there. 2. Before the database knows of it, the other model with that
    file goes."""
    digest = add_model(store, tmp_path)
    remover, put_file = Thread(target=store.remove_model, args=["relu"]), store.blobs.put_file

    def put(source: Path, digest: Digest) -> int:
        size_bytes = put_file(source, digest)
        remover.start()
        remover.join(0.2)  # it waits, or has ended by then
        return size_bytes

    monkeypatch.setattr(store.blobs, "put_file", put)
    store.add_model("other", tmp_path / "relu.artifact", digest)
    remover.join()
    assert versions(store, ["other"]) == [("other", 1, digest)] and store.blobs.has(digest)


def test_a_version_that_is_not_there_is_refused_with_those_that_are(store: Store, tmp_path: Path) -> None:
    add_model(store, tmp_path)
    for name, reason in (
        ("relu@2", "model 'relu' has no version 2, only 1"),
        ("other@1", "no model 'other'"),
        ("relu@0", "names no version"),
    ):
        with pytest.raises(InputError, match=reason):
            store.read(named_models, [name])
        with pytest.raises(InputError, match=reason):
            store.remove_model(name)


def test_versions_page_by_name_and_number(store: Store, tmp_path: Path) -> None:
    for operators in (4, 6, 8):
        add_model(store, tmp_path, "b", operators)
    for name in ("c", "a"):
        add_model(store, tmp_path, name)

    def after(text: str) -> list[str]:
        return [f"{one.model}@{one.version}" for one in store.read(model_infos, after=text, limit=2)]

    assert after("") == ["a@1", "b@1"] and after("b@1") == ["b@2", "b@3"]
    assert after("b@3") == ["c@1"] == after("b")


def test_a_version_in_use_stays_and_the_others_may_go(store: Store, tmp_path: Path) -> None:
    """1. Version 1 is desired and runs. 2. Version 2 is desired while 1 still runs: neither may go. 3. Once 2
    runs, 1 may. 4. A revoked device holds nothing up."""
    enrol(store)
    add_model(store, tmp_path)
    desire(store, "first", "relu")
    report_running(store, 1, "first")
    add_model(store, tmp_path, operators=8)
    with pytest.raises(InputError, match="'relu@1' is part of what nano should run"):
        store.remove_model("relu@1")
    desire(store, "second", "relu")
    with pytest.raises(InputError, match="'relu@1' is part of what nano runs"):
        store.remove_model("relu@1")
    for name in ("relu", "relu@2"):
        with pytest.raises(InputError, match="part of what nano should run"):
            store.remove_model(name)
    detail = store.read(model_detail, "relu@1")
    assert (detail.plans, detail.desired_on, detail.running_on) == (("first",), (), (NANO,))
    detail = store.read(model_detail, "relu")
    assert (detail.info.version, detail.plans) == (2, ("second",))
    assert (detail.desired_on, detail.running_on) == ((NANO,), ())
    report_running(store, 2, "second")
    with pytest.raises(InputError, match="'relu@1' is in plan first, which could no longer be pushed"):
        store.remove_model("relu@1")
    store.remove_model("relu@1", force=True)
    store.write(revoke_device, NANO)
    with pytest.raises(InputError, match="'relu' is in plan second"):
        store.remove_model("relu")
    store.remove_model("relu", force=True)
    assert store.read(model_infos) == []


def test_force_forgets_what_a_device_should_run_and_the_same_file_brings_it_back(
    store: Store, tmp_path: Path
) -> None:
    enrol(store)
    digest = add_model(store, tmp_path)
    desire(store, "first", "relu")
    store.remove_model("relu", force=True)
    assert LinkStore(store).artifact(digest) is None
    with pytest.raises(InputError, match="which was removed; add the model again"):
        store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
    assert add_model(store, tmp_path) == digest
    assert store.write(push, Push(device=NANO, plan="first", decided_by="operator")).generation == 2


def test_a_version_that_a_device_was_asked_to_measure_stays_until_it_answered(
    store: Store, tmp_path: Path
) -> None:
    """Once for the model's operators, once for the stages of a plan of it."""
    enrol(store)
    add_model(store, tmp_path)
    store.write(request_profile, NANO, ["relu"], batch=1, budget_s=1.0)
    with pytest.raises(InputError, match="'relu' is to be measured on nano, which has not answered"):
        store.remove_model("relu")
    add_model(store, tmp_path, "other", operators=8)
    store.write(add_plan, "stages", small_plan(store, "other"), "sequential")
    with pytest.raises(InputError, match="'other' is in plan stages"):
        store.remove_model("other")
    store.write(request_stage_profile, NANO, "stages", budget_s=1.0)
    with pytest.raises(InputError, match="'other@1' is to be measured on nano"):
        store.remove_model("other@1")
    store.remove_model("relu", force=True)


def test_a_plan_keeps_a_version_only_while_no_other_name_keeps_its_file(store: Store, tmp_path: Path) -> None:
    """And of many plans the first few are named."""
    digest = add_model(store, tmp_path)
    store.add_model("again", tmp_path / "relu.artifact", digest)
    for name in "abcde":
        store.write(add_plan, name, small_plan(store, "relu"), "sequential")
    store.remove_model("again")
    with pytest.raises(InputError, match="'relu' is in plan a, b, c and 2 more, which"):
        store.remove_model("relu")


def test_a_device_is_told_which_version_each_artifact_is(store: Store, tmp_path: Path) -> None:
    """The same artifact is version 1 of one model and version 2 of another."""
    enrol(store)
    add_model(store, tmp_path)
    digest = add_model(store, tmp_path, operators=8)
    store.add_model("other", tmp_path / "relu.artifact", digest)
    for name, version in (("relu", 2), ("other", 1)):
        store.write(add_plan, name, small_plan(store, name), "sequential")
        desired = store.write(push, Push(device=NANO, plan=name, decided_by="operator"))
        assert [(need.model, need.digest, need.version) for need in desired.artifacts] == [
            (name, digest, version)
        ]
