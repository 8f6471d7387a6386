"""Models and their files, plans, what is desired, the history."""

from pathlib import Path

import pytest

from stageloom.planner.costs.records import found_schedules
from stageloom.planner.store.costs import keep_schedules
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.devices import revoke_device
from stageloom.planner.store.generations import generation_history
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.models import Blobs, model_infos
from stageloom.planner.store.plans import add_plan, plan_info, plan_infos
from stageloom.planner.store.store import Store
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import DecodeError, InputError, StorageError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Autonomy
from stageloom.shared.plan import decode_plan
from stageloom.shared.search.compose import ModelChoice, compose
from tests.store.helpers import NANO, add_model, enrol, kept_schedule, small_plan


def test_a_model_is_copied_in_and_read_back(store: Store, tmp_path: Path) -> None:
    digest = add_model(store, tmp_path, operators=6)
    (tmp_path / "relu.artifact").unlink()
    info = store.read(model_infos)[0]
    assert (info.model, info.digest, info.operators, info.base_cuts, info.opaque) == ("relu", digest, 6, 1, 0)
    artifact = store.load_artifact(digest)
    assert (len(artifact.graph.operators), artifact.onnx_bytes()) == (6, b"relu")
    file = LinkStore(store).artifact(digest)
    assert file is not None and file.size_bytes == info.size_bytes
    assert LinkStore(store).artifact(Digest("0" * 64)) is None


def test_an_artifact_under_two_names_stays_until_both_are_gone(store: Store, tmp_path: Path) -> None:
    digest = add_model(store, tmp_path)
    store.add_model("again", tmp_path / "relu.artifact", digest)
    store.remove_model("relu")
    assert LinkStore(store).artifact(digest) is not None
    store.remove_model("again")
    assert LinkStore(store).artifact(digest) is None


def test_a_file_of_another_digest_is_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs")
    source = tmp_path / "file"
    source.write_bytes(b"contents")
    with pytest.raises(DecodeError, match="does not have the digest"):
        blobs.put_file(source, Digest("ab" * 32))
    assert [path for path in blobs.root.rglob("*") if path.is_file()] == []
    digest = digest_bytes([b"contents"])
    assert blobs.put_file(source, digest) == 8 and blobs.has(digest)


def test_what_an_interrupted_copy_left_is_swept(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / ".incoming-x").write_bytes(b"half")
    assert (blobs.sweep(), blobs.sweep()) == (1, 0)


def test_a_copy_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs")
    (tmp_path / "blobs").write_bytes(b"a file where the directory should be")
    source = tmp_path / "file"
    source.write_bytes(b"contents")
    with pytest.raises(StorageError, match="free space or fix the permissions"):
        blobs.put_file(source, digest_bytes([b"contents"]))


def test_what_is_desired_holds_the_plan_and_what_it_needs(store: Store, tmp_path: Path) -> None:
    digest = add_model(store, tmp_path)
    enrol(store)
    plan = small_plan(store)
    info = store.write(add_plan, "first", plan, "sequential")
    assert (
        info == store.write(add_plan, "first", plan, "sequential") == store.read(plan_info, plan.digest[:8])
    )
    assert info.text_bytes == len(info.text.encode()) and info.wire_bytes == len(info.wire)
    assert LinkStore(store).fleet()[0].desired is None
    desired = store.write(
        push, Push(device=NANO, plan="first", decided_by="operator", autonomy=Autonomy.PROVEN)
    )
    assert (desired.epoch, desired.generation, desired.autonomy) == (1, 1, Autonomy.PROVEN)
    assert decode_plan(desired.plan, desired.plan_digest) == plan
    need = desired.artifacts[0]
    assert (need.model, need.digest, need.size_bytes) == (
        "relu",
        digest,
        store.read(model_infos)[0].size_bytes,
    )
    assert LinkStore(store).fleet()[0].desired == desired
    assert (
        store.write(push, Push(device=NANO, plan="first", decided_by="operator")).autonomy is Autonomy.PROVEN
    )


def test_pushing_refuses_what_cannot_be(store: Store, tmp_path: Path) -> None:
    enrol(store)
    add_model(store, tmp_path)
    with pytest.raises(InputError, match="no plan 'first'"):
        store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
    store.write(add_plan, "first", small_plan(store), "sequential")
    with pytest.raises(InputError, match="no device 'ghost'"):
        store.write(push, Push(device=DeviceId("ghost"), plan="first", decided_by="operator"))
    store.write(revoke_device, NANO)
    with pytest.raises(InputError, match="revoked; enrol it again"):
        store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
    add_model(store, tmp_path, "other", operators=8)
    with pytest.raises(InputError, match="another plan 'first'"):
        store.write(add_plan, "first", small_plan(store, "other"), "sequential")


def test_what_is_desired_is_read_behind_what_is_being_committed(store: Store, tmp_path: Path) -> None:
    enrol(store)
    add_model(store, tmp_path)
    store.write(add_plan, "first", small_plan(store), "sequential")
    link = LinkStore(store)
    assert link.desired(NANO) is None
    pushed = store.submit(push, Push(device=NANO, plan="first", decided_by="operator"))
    assert link.desired(NANO) == pushed.result(0.0)


def test_the_history_pages_from_the_newest_on(store: Store, tmp_path: Path) -> None:
    enrol(store)
    enrol(store, DeviceId("other"), 2)
    add_model(store, tmp_path)
    store.write(add_plan, "first", small_plan(store), "sequential")
    for _ in range(5):
        store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
        store.write(push, Push(device=DeviceId("other"), plan="first", decided_by="operator"))
    seen, before = [], 0
    while True:
        entries, before = store.read(generation_history, NANO, before=before, limit=2)
        seen += [entry.generation for entry in entries]
        if not before:
            break
    assert seen == [5, 4, 3, 2, 1]
    assert len(store.read(generation_history, None)[0]) == 10
    with pytest.raises(InputError, match="no device"):
        store.read(generation_history, DeviceId("ghost"))


def test_models_and_plans_page_by_name(store: Store, tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        add_model(store, tmp_path, name)
        store.write(add_plan, name, small_plan(store, name), "sequential")
    assert [info.model for info in store.read(model_infos, after="a", limit=1)] == ["b"]
    assert [info.plan for info in store.read(plan_infos, after="a")] == ["b", "c"]


def test_a_missing_artifact_file_is_said(tmp_path: Path, store: Store) -> None:
    store.blobs.path(add_model(store, tmp_path)).unlink()
    with pytest.raises(InputError, match="missing; add the model again"):
        store.load_artifact(store.read(model_infos)[0].digest)


def test_a_plan_whose_model_was_removed_cannot_be_pushed(store: Store, tmp_path: Path) -> None:
    """Else the device would wait for an artifact that nobody has."""
    add_model(store, tmp_path)
    enrol(store)
    store.write(add_plan, "first", small_plan(store), "sequential")
    store.remove_model("relu", force=True)
    with pytest.raises(InputError, match=r"model 'relu', which was removed; add the model again"):
        store.write(push, Push(device=NANO, plan="first", decided_by="operator"))
    assert store.read(generation_history, NANO) == ([], 0)
    add_model(store, tmp_path)
    assert store.write(push, Push(device=NANO, plan="first", decided_by="operator")).generation == 1


def test_schedules_are_shared_by_what_they_compute_not_by_names(store: Store, tmp_path: Path) -> None:
    digest = add_model(store, tmp_path)
    graph = store.graph(digest)
    both = compose(
        [
            ModelChoice(name="one", artifact=digest, graph=graph, partition="base", replicas=2),
            ModelChoice(name="two", artifact=digest, graph=graph, partition="base"),
        ]
    )
    found = found_schedules(both, {digest: graph})
    assert list(found.values()) == ["0/1", "0/1"]  # two different blocks, six members
    assert len({combined_block for combined_block, _ in found}) == 2
    store.write(keep_schedules, "cpu", "sequential", found)
    store.write(keep_schedules, "cpu", "sequential", found)
    for (combined_block, batch), stage_string in found.items():
        assert batch == 1
        assert kept_schedule(store, "cpu", 1, combined_block, "sequential") == stage_string
        assert kept_schedule(store, "gpu", 1, combined_block, "sequential") is None
        assert kept_schedule(store, "cpu", 2, combined_block, "sequential") is None
