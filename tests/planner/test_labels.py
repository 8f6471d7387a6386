"""Labels of devices: what may be one, how they are given and taken away, and what they select."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageloom.planner.labels import LabelChanges, parse_changes, parse_selection
from stageloom.planner.schema.device import MOST_LABELS
from stageloom.planner.store.devices import device_infos, revoke_device
from stageloom.planner.store.labels import change_labels, labels_of, selected_devices
from stageloom.planner.store.store import Store
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from tests.planner.processes import ok, stageloom
from tests.store.helpers import enrol
from tests.store.migrated import new_store

A, B, C = DeviceId("a"), DeviceId("b"), DeviceId("c")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = new_store(tmp_path)
    for number, device in enumerate((A, B, C), 1):
        enrol(made, device, number)
    yield made
    made.close()


def test_words_give_labels_and_take_them_away() -> None:
    assert parse_changes(["site=a", "tier=b-", "old-"]) == LabelChanges({"site": "a", "tier": "b-"}, ("old",))


@pytest.mark.parametrize(
    "words",
    [["site"], ["=a"], ["site="], ["sítio=a"], ["site=a b"], ["-"], ["x" * 65 + "=a"], ["site=" + "x" * 65]],
)
def test_what_is_no_label_is_refused_with_what_is_allowed(words: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        parse_changes(words)
    assert "site=a" in str(refused.value) or "letters, digits, '.', '_' and '-'" in str(refused.value)


@pytest.mark.parametrize("words", [["site=a", "site=b"], ["site=a", "site-"], ["site-", "site=a"]])
def test_a_label_is_named_once(words: list[str]) -> None:
    with pytest.raises(InputError, match="name it once"):
        parse_changes(words)


def test_a_selection_asks_for_one_value_of_each_label() -> None:
    assert parse_selection(["site=a", "tier=b", "site=a"]) == {"site": "a", "tier": "b"}
    with pytest.raises(InputError, match="two values"):
        parse_selection(["site=a", "site=b"])


def test_labels_are_kept_and_changed_by_name(store: Store) -> None:
    assert store.write(change_labels, A, LabelChanges({"site": "a", "tier": "b"}, ())) == {
        "site": "a",
        "tier": "b",
    }
    assert store.write(change_labels, A, LabelChanges({"site": "c"}, ("tier", "none"))) == {"site": "c"}
    assert store.read(labels_of, [A, B]) == {"a": {"site": "c"}}
    assert {info.device: info.labels for info in store.read(device_infos)} == {
        "a": {"site": "c"},
        "b": {},
        "c": {},
    }


def test_a_device_has_a_bounded_number_of_labels(store: Store) -> None:
    many = {f"l{number}": "x" for number in range(MOST_LABELS)}
    store.write(change_labels, A, LabelChanges(many, ()))
    with pytest.raises(InputError, match="33 labels"):
        store.write(change_labels, A, LabelChanges({"more": "x"}, ()))
    assert store.read(labels_of, [A]) == {"a": many}


def test_a_selection_takes_devices_that_have_all_its_labels(store: Store) -> None:
    store.write(change_labels, A, LabelChanges({"site": "a", "tier": "b"}, ()))
    store.write(change_labels, B, LabelChanges({"site": "a"}, ()))
    store.write(change_labels, C, LabelChanges({"site": "a"}, ()))
    store.write(revoke_device, C)
    assert store.read(selected_devices, {"site": "a"}) == [A, B]
    assert store.read(selected_devices, {"site": "a", "tier": "b"}) == [A]
    assert store.read(selected_devices, {"site": "b"}) == []
    assert store.read(selected_devices, {}) == [A, B]
    assert [info.device for info in store.read(device_infos, labels={"site": "a"})] == [A, B, C]


def test_the_list_of_devices_is_filtered_by_label_without_a_planner(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    store = new_store(tmp_path / "home")
    enrol(store, A, 1)
    enrol(store, B, 2)
    store.write(change_labels, B, LabelChanges({"site": "a"}, ()))
    store.close()
    listed = json.loads(ok(tmp_path / "home", "device", "list", "--label", "site=a", "--json"))
    assert [(one["device"], one["labels"]) for one in listed] == [("b", {"site": "a"})]
    assert ok(tmp_path / "home", "device", "label", "b") == "site=a\n"
    wrong = stageloom(tmp_path / "home", "device", "list", "--label", "site")
    assert (wrong.returncode, "NAME=VALUE" in wrong.stderr) == (2, True)
