"""Parts of operators that a device measured: kept for what it was asked, and what cannot be is refused."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from stageloom.planner.store.parts import Handover, handover_of, part_samples_of
from stageloom.planner.store.profiles import answer_reasons, open_requests, request_profile
from stageloom.planner.store.store import Store
from stageloom.shared.errors import InputError
from stageloom.shared.ids import Digest
from stageloom.shared.messages.telemetry import PartProfileResult, PartTiming, ProfileResult
from stageloom.shared.partition import Axis
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.measured_splits import PartSample
from tests.store.helpers import NANO, add_model, enrol
from tests.store.test_machines import CLASS, FACTS, Sender, refusals

ONNX = ExecutorOptions()
OPENVINO = ExecutorOptions(name="openvino")
TIMINGS = (PartTiming(0, Axis.CHANNELS, 2, 40.0, 1.0, 5), PartTiming(0, Axis.CHANNELS, 4, 70.0, 1.0, 5))


class Asked:
    """A device that was asked for parts of a model on openvino."""

    def __init__(self, store: Store, folder: Path) -> None:
        enrol(store)
        self.store, self.digest, self.send = store, add_model(store, folder), Sender(store)
        self.send(FACTS)
        (self.number,), self.desired = store.write(
            request_profile, NANO, ["relu"], executor=OPENVINO, parts=9
        )

    def told(self, **changes: Any) -> PartProfileResult:
        told = PartProfileResult(self.number, self.digest, CLASS, TIMINGS, 131.5, 4.5e9)
        return msgspec.structs.replace(told, **changes)

    def kept(self, executor: ExecutorOptions = OPENVINO) -> tuple[PartSample, ...]:
        return self.store.read(part_samples_of, CLASS, self.digest, executor)


def test_parts_are_kept_under_the_executor_they_were_asked_on_and_newer_ones_count(
    store: Store, tmp_path: Path
) -> None:
    """1. A request names parts. 2. Two rows of them come, then the operators. 3. Later ones replace them."""
    asked = Asked(store, tmp_path)
    assert [one.parts for one in asked.desired.profiles] == [9]
    asked.send(asked.told(), asked.told(timings=TIMINGS[:1], handover_us=None, copy_bytes_per_s=None))
    assert asked.kept() == (
        PartSample(0, Axis.CHANNELS, 2, 40e-6),
        PartSample(0, Axis.CHANNELS, 4, 70e-6),
    )
    assert store.read(handover_of, CLASS, OPENVINO) == Handover(131.5e-6, 4.5e9)
    assert asked.kept(ONNX) == () and store.read(handover_of, CLASS, ONNX) is None
    assert store.read(open_requests, [asked.number]) == [asked.number], "the operators answer"
    asked.send(asked.told(timings=(PartTiming(0, Axis.CHANNELS, 2, 30.0, 1.0, 5),), handover_us=90.0))
    assert [one.seconds for one in asked.kept()] == [30e-6, 70e-6]
    assert store.read(handover_of, CLASS, OPENVINO) == Handover(90e-6, 4.5e9)


def test_why_parts_are_missing_stays_though_the_operators_were_measured(store: Store, tmp_path: Path) -> None:
    asked = Asked(store, tmp_path)
    asked.send(asked.told(timings=(), handover_us=None, reason="two resources need 2 cores"))
    asked.send(ProfileResult(asked.number, asked.digest, 1, CLASS, (), True))
    assert store.read(answer_reasons, [asked.number]) == {asked.number: "two resources need 2 cores"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"request": 77}, "request 77 was not made of this device"),
        ({"artifact": Digest("f" * 64)}, "is about another artifact"),
        ({"environment": "another class"}, "it measured in 'another class'"),
        ({"timings": (PartTiming(4, Axis.ROWS, 2, 1.0, 0.0, 5),)}, "has 4 operators"),
        ({"timings": (PartTiming(0, Axis.ROWS, 2, -1.0, 0.0, 5),)}, "a time of -1 us"),
        ({"handover_us": 0.0}, "a hand-over of 0 us"),
        ({"handover_us": 2e6}, "a hand-over of 2e+06 us"),
        ({"copy_bytes_per_s": 0.0}, "copies of 0 bytes per second"),
    ],
)
def test_parts_that_cannot_be_are_refused_and_an_event_says_so(
    store: Store, tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    asked = Asked(store, tmp_path)
    asked.send(asked.told(**changes))
    assert asked.kept() == () and store.read(handover_of, CLASS, OPENVINO) is None
    assert why in refusals(store)[0]


def test_parts_nobody_asked_for_are_refused(store: Store, tmp_path: Path) -> None:
    asked = Asked(store, tmp_path)
    (plain,), desired = store.write(request_profile, NANO, ["relu"], executor=OPENVINO)
    assert [one.parts for one in desired.profiles] == [9, UNSET]
    asked.send(asked.told(request=plain))
    assert asked.kept() == () and "asked for no parts" in refusals(store)[0]


def test_a_device_cannot_fill_the_table_with_extents(store: Store, tmp_path: Path) -> None:
    asked = Asked(store, tmp_path)
    for first in range(0, 1024, 64):
        extents = range(first + 1, first + 65)
        asked.send(asked.told(timings=tuple(PartTiming(0, Axis.ROWS, x, 1.0, 0.0, 5) for x in extents)))
    assert 4 * 3 * 32 <= len(asked.kept()) <= 4 * 3 * 32 + 64
    assert "more parts of artifact" in refusals(store)[0]


def test_an_agent_that_tells_nothing_of_its_machine_is_too_old_to_be_asked_for_parts(
    store: Store, tmp_path: Path
) -> None:
    enrol(store)
    add_model(store, tmp_path)
    with pytest.raises(InputError, match="too old to measure parts"):
        store.write(request_profile, NANO, ["relu"], parts=9)
