"""What devices tell of their cores and executors, and what models take there."""

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from stageloom.planner.dispatch.ports import TelemetryWrite
from stageloom.planner.store import machines
from stageloom.planner.store.costs import operator_costs
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.events import newest_events
from stageloom.planner.store.link import LinkStore
from stageloom.planner.store.machines import Machine, machine_of, whole_times
from stageloom.planner.store.plans import add_plan
from stageloom.planner.store.profiles import asked_executors, request_profile
from stageloom.planner.store.store import Store
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import (
    CoreRange,
    ExecutorFact,
    ExecutorTime,
    MachineFacts,
    OperatorTiming,
    ProfileResult,
    RowData,
)
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.compose import ModelChoice, compose
from tests.store.helpers import NANO, add_model, enrol, row

CLASS = "cpu-2-core"
FACTS = MachineFacts(
    (CoreRange(0, 1), CoreRange(4, 4)),
    (ExecutorFact("onnx"), ExecutorFact("openvino"), ExecutorFact("torch_cuda", "there is no GPU")),
    1,
)
ONNX, OPENVINO = ExecutorOptions(name="onnx"), ExecutorOptions(name="openvino")


class Sender:
    """A device's telemetry, numbered."""

    def __init__(self, store: Store, device: DeviceId = NANO) -> None:
        self._store, self._device, self._next = store, device, 0

    def __call__(self, *rows: RowData) -> None:
        for data in rows:
            write = TelemetryWrite(self._device, (row(self._next, data),), ())
            self._next += 1
            LinkStore(self._store).append_telemetry([write])


def refusals(store: Store) -> list[str]:
    return [text for _, _, code, text in store.read(newest_events) if code == "measurement_refused"]


def test_the_newest_facts_of_a_machine_count_and_an_older_agent_has_none(store: Store) -> None:
    enrol(store)
    assert store.read(machine_of, NANO) is None
    send = Sender(store)
    send(MachineFacts((CoreRange(0, 7),), (ExecutorFact("onnx"),), 4), FACTS)
    found = store.read(machine_of, NANO)
    assert found == Machine((0, 1, 4), {"onnx": "", "openvino": "", "torch_cuda": "there is no GPU"}, 1)
    assert found.executors == ("onnx", "openvino")


def test_what_no_request_can_name_is_left_out_of_a_machine(store: Store) -> None:
    enrol(store)
    odd = (ExecutorFact("an executor"), ExecutorFact(""), ExecutorFact("x" * 65), ExecutorFact("onnx"))
    Sender(store)(MachineFacts((CoreRange(0, 1_000_000), CoreRange(5, 2)), odd, 1_000_000))
    assert store.read(machine_of, NANO) == Machine(tuple(range(1024)), {"onnx": ""}, 256)


def test_the_newest_time_of_a_model_on_an_executor_counts_while_the_machine_is_the_same(
    store: Store, tmp_path: Path
) -> None:
    enrol(store)
    digest = add_model(store, tmp_path)
    send = Sender(store)
    send(
        FACTS,
        ExecutorTime(digest, "onnx", 1, 1, CLASS, 900.0, 9),
        ExecutorTime(digest, "onnx", 1, 1, CLASS, 800.0, 9),
        ExecutorTime(digest, "onnx", 2, 1, CLASS, 500.0, 9),
        ExecutorTime(digest, "openvino", 1, 1, CLASS, None, 0, "an operator is unknown to it"),
    )
    on_openvino = {(OPENVINO, 1): math.inf}
    assert store.read(whole_times, NANO, [digest]) == {
        digest: {(ONNX, 1): 0.0008, (replace(ONNX, intra_op_threads=2), 1): 0.0005, **on_openvino}
    }
    for threads in (1, 2):
        send(ExecutorTime(digest, "onnx", threads, 1, "another power mode", 100.0, 9))
    assert store.read(whole_times, NANO, [digest]) == {digest: on_openvino}


def test_where_a_device_has_told_a_lot_the_time_that_was_measured_longest_ago_gives_way(
    store: Store, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "MOST_TIMES", 3)
    enrol(store)
    digest = add_model(store, tmp_path)
    send = Sender(store)
    send(FACTS)
    for threads in (1, 2, 3, 1, 4):  # that of one thread was measured again
        clock.advance(1.0)
        send(ExecutorTime(digest, "onnx", threads, 1, CLASS, 900.0, 9))
    assert {way.intra_op_threads for way, _ in store.read(whole_times, NANO, [digest])[digest]} == {1, 3, 4}
    assert not refusals(store)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"artifact": "f" * 64}, "an artifact ffffffffffff that is not here"),
        ({"executor": "fastest"}, "an executor 'fastest' that it did not tell of"),
        ({"time_us": -1.0}, "outside 0.001 to"),
        ({"time_us": 1e14}, "outside 0.001 to"),
    ],
)
def test_a_time_that_cannot_be_is_refused_and_an_event_says_so(
    store: Store, tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    enrol(store)
    digest = add_model(store, tmp_path)
    usual = ExecutorTime(digest, "onnx", 1, 1, CLASS, 5.0, 9)
    told = msgspec.structs.replace(usual, **changes)
    Sender(store)(FACTS, told)
    assert store.read(whole_times, NANO, [digest]) == {}
    assert why in refusals(store)[0]


def test_operators_measured_on_one_executor_are_not_costs_of_another(store: Store, tmp_path: Path) -> None:
    """1. openvino is profiled, then onnx. 2. Each has its own times. 3. A third has none."""
    enrol(store)
    digest = add_model(store, tmp_path)
    send = Sender(store)
    send(FACTS)
    for name, median_us in (("openvino", 7.0), ("onnx", 3.0)):
        numbers, desired = store.write(request_profile, NANO, ["relu"], executor=ExecutorOptions(name=name))
        assert [(one.executor, one.intra_op_threads) for one in desired.profiles] == [(name, 1)]
        assert store.read(asked_executors, numbers) == {numbers[0]: ExecutorOptions(name=name)}
        timings = tuple(OperatorTiming(op, median_us, 0.1, 5) for op in range(4))
        send(ProfileResult(numbers[0], digest, 1, CLASS, timings, True))
    assert store.read(operator_costs, CLASS, digest, 1, OPENVINO)[0].median_us == 7.0
    assert store.read(operator_costs, CLASS, digest, 1, ExecutorOptions())[0].median_us == 3.0
    assert store.read(operator_costs, CLASS, digest, 1, ExecutorOptions(intra_op_threads=2)) == {}


def test_what_an_agent_measured_that_tells_no_executors_serves_all_until_one_is_measured(
    store: Store, tmp_path: Path
) -> None:
    enrol(store)
    digest = add_model(store, tmp_path)
    send = Sender(store)
    (before,), _ = store.write(request_profile, NANO, ["relu"])
    send(ProfileResult(before, digest, 1, CLASS, (OperatorTiming(0, 9.0, 0.1, 5),), True))
    assert store.read(operator_costs, CLASS, digest, 1, OPENVINO)[0].median_us == 9.0
    send(FACTS)
    (named,), _ = store.write(request_profile, NANO, ["relu"], executor=OPENVINO)
    send(ProfileResult(named, digest, 1, CLASS, (OperatorTiming(1, 2.0, 0.1, 5),), True))
    assert set(store.read(operator_costs, CLASS, digest, 1, OPENVINO)) == {1}
    assert set(store.read(operator_costs, CLASS, digest, 1, ExecutorOptions())) == {0}


def test_a_profile_without_an_executor_is_of_what_runs_the_model_there(store: Store, tmp_path: Path) -> None:
    enrol(store)
    digest = add_model(store, tmp_path)
    add_model(store, tmp_path, "other", 2)
    Sender(store)(FACTS)
    graph = store.load_artifact(digest).graph
    plan = compose([ModelChoice(name="relu", artifact=digest, graph=graph)], executor=OPENVINO)
    store.write(add_plan, "fast", plan, "sequential")
    store.write(push, Push(device=NANO, plan="fast", decided_by="operator"))
    _, desired = store.write(request_profile, NANO, ["relu", "other"])
    assert [one.executor for one in desired.profiles] == ["openvino", "onnx"]


def test_an_executor_that_a_device_cannot_use_is_refused_with_its_reason(
    store: Store, tmp_path: Path
) -> None:
    enrol(store)
    add_model(store, tmp_path)
    cuda = ExecutorOptions(name="torch_cuda")
    with pytest.raises(InputError, match="has not told which executors it has"):
        store.write(request_profile, NANO, ["relu"], executor=cuda)
    Sender(store)(FACTS)
    with pytest.raises(InputError, match="cannot use the executor torch_cuda: there is no GPU; choose"):
        store.write(request_profile, NANO, ["relu"], executor=cuda)
    with pytest.raises(InputError, match="its version does not know it"):
        store.write(request_profile, NANO, ["relu"], executor=ExecutorOptions(name="onnx_cuda"))
