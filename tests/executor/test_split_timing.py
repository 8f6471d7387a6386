"""Times of parts of operators: which extents are sampled, and when measuring stops."""

import itertools
from functools import partial
from weakref import WeakSet

import pytest

from stageloom.edge_agent.executor.onnx import split_timing
from stageloom.edge_agent.executor.onnx.cache import SessionKey, weight_bytes
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.onnx.split_timing import PartTimingRequest, sampled_extents
from stageloom.edge_agent.executor.slot_store import Values
from stageloom.edge_agent.executor.timing import IdleTime
from stageloom.shared.importer.splittable import SplitReader
from stageloom.shared.operator_parts import SplitAxis
from stageloom.shared.partition import Axis
from tests.executor.models import artifact_of


@pytest.mark.parametrize(
    ("extent", "quantum", "points", "extents"),
    [
        (64, 1, 8, (8, 16, 24, 32, 40, 48, 56, 64)),
        (64, 16, 8, (16, 32, 48, 64)),
        (3, 1, 10, (1, 2, 3)),
        (28, 1, 10, (3, 6, 8, 11, 14, 17, 20, 22, 25, 28)),
        (2, 1, 1, (2,)),
    ],
)
def test_extents_are_multiples_of_the_quantum_up_to_the_whole(
    extent: int, quantum: int, points: int, extents: tuple[int, ...]
) -> None:
    assert sampled_extents(SplitAxis(Axis.CHANNELS, 1, extent, quantum), points) == extents


def test_every_axis_of_every_operator_that_may_be_split_is_timed() -> None:
    artifact, executor = artifact_of("squeezenet"), OnnxExecutor()
    reader = SplitReader(artifact)
    found = executor.time_parts(artifact, PartTimingRequest(ops=(1, 2, 5), points=4, repeats=2), lambda: True)
    wanted = {
        (op, axis.axis, extent)
        for op in (1, 2, 5)
        for axis in reader.axes(op)
        for extent in sampled_extents(axis, 4)
    }
    assert {(one.op, one.axis, one.extent) for one in found} == wanted
    assert all(one.time.median_us > 0 and one.time.runs == 2 for one in found)
    executor.close()


class Opened:
    """A session that computes nothing."""

    def run(self, values: Values) -> None:
        pass


@pytest.mark.parametrize(("held_sessions", "most"), [(0.5, 1), (2.5, 2), (100, 4)])
def test_the_parts_of_an_axis_that_are_loaded_at_once_have_bounded_weights(
    monkeypatch: pytest.MonkeyPatch, held_sessions: float, most: int
) -> None:
    """All parts of rows have the operator's weights, and one of them is always loaded."""
    artifact, live, seen = artifact_of("squeezenet"), WeakSet[Opened](), []
    own = weight_bytes(SessionKey(artifact.digest, (0,), 1, 1), artifact.graph)
    monkeypatch.setattr(split_timing, "HELD_BYTES", int(held_sessions * own), raising=False)

    def opened(key: SessionKey, source: ModelParts) -> Opened:
        live.add(session := Opened())
        seen.append(len(live))
        return session

    request = PartTimingRequest(ops=(0,), points=4, repeats=2)
    found = split_timing.time_parts(artifact, request, lambda: True, opened)
    rows = [one for one in found if one.axis is Axis.ROWS]
    assert len(rows) == 4 and {one.time.runs for one in rows} == {2}
    assert max(seen[-4:]) == most


def test_parts_are_timed_only_while_idle_and_for_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a millisecond whenever it is read: twice for a run, and when it waits."""
    ticks = itertools.count()

    def clock() -> float:
        return next(ticks) * 1e-3

    moments = partial(IdleTime, clock=clock, sleep=lambda seconds: None)
    monkeypatch.setattr(split_timing, "IdleTime", moments)
    artifact, executor = artifact_of("squeezenet"), OnnxExecutor()
    assert executor.time_parts(artifact, PartTimingRequest(wall_s=0.02), lambda: False) == ()
    reader = SplitReader(artifact)
    wholes = {(op, one.axis): one.extent for op in range(6) for one in reader.axes(op)}
    for limit_s in (0.3, 0.31, 0.32, 0.33, 0.34):  # it ends at another extent of an axis each time
        some = executor.time_parts(artifact, PartTimingRequest(limit_s=limit_s), lambda: True)
        assert 0 < len({one.op for one in some}) < len(artifact.graph.operators)
        timed: dict[tuple[int, Axis], int] = {}
        for one in some:
            timed[one.op, one.axis] = max(one.extent, timed.get((one.op, one.axis), 0))
        assert timed.items() <= wholes.items(), "an axis counts that was timed up to the whole"
    executor.close()
