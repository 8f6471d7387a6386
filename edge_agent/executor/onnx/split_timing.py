"""Measures how long a part of an operator takes, by axis and extent: the samples that EOP fits patterns to.

Xu et al. 2022, section 3.2, step 1, with extents on the quantum of the axis in place of ratios. A part is
timed as its session runs it in a plan: with the slice of its input, sliced weights and the padding of the
first half. The parts of one axis take turns, so that each finds the caches as another has left them; as many
take turns as may be loaded together.
"""

import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from msgspec import Struct

from stageloom.edge_agent.executor.base import OperatorTime, one_line
from stageloom.edge_agent.executor.onnx.cache import SessionKey, ValuesSession, weight_bytes
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.onnx.timing import WINDOW_BYTES, windows
from stageloom.edge_agent.executor.slot_store import Values
from stageloom.edge_agent.executor.timing import IdleTime, seeded_values, summary
from stageloom.edge_agent.worker.pinning import pinned
from stageloom.shared.artifact import Artifact
from stageloom.shared.errors import ExecutorError
from stageloom.shared.importer.splittable import SplitReader
from stageloom.shared.operator_parts import SplitAxis
from stageloom.shared.partition import Axis
from stageloom.shared.search.measured_splits import granule_of

_log = logging.getLogger(__name__)

Opener: TypeAlias = Callable[[SessionKey, ModelParts], ValuesSession]

HELD_BYTES: Final = 4 * WINDOW_BYTES
"""Weights of the parts of one axis that are loaded at a time, or one part's where that has more.

Well above what caches hold: a part that is left without another to take turns with seldom fits there.
"""


class PartTimingRequest(Struct, frozen=True, kw_only=True):
    """Which parts to time and for how long; `cores` are those of the resource that it is for."""

    ops: tuple[int, ...] = ()  # empty: all
    points: int = 10  # extents per axis, the whole one included
    repeats: int = 5
    limit_s: float = 20.0  # of work
    wall_s: float = 600.0  # with the pauses in which the device serves
    intra_op_threads: int = 1
    cores: tuple[int, ...] = ()


class PartTime(NamedTuple):
    """The time of [0, extent) of an operator's output along an axis."""

    op: int
    axis: Axis
    extent: int
    time: OperatorTime


def sampled_extents(axis: SplitAxis, points: int) -> tuple[int, ...]:
    """Up to `points` extents where boundaries may be, evenly from the first to the whole one, ascending."""
    granule = granule_of(axis)
    most = axis.extent // granule
    chosen = {max(1, round(number * most / points)) * granule for number in range(1, points + 1)}
    return tuple(sorted(chosen | {axis.extent}))


def time_parts(
    artifact: Artifact, request: PartTimingRequest, idle: Callable[[], bool], open_session: Opener
) -> tuple[PartTime, ...]:
    """Times of parts of every operator that may be split, on this thread.

    What the time was too short for is left out, and so are parts that do not run on seeded values: of an axis
    that is in it the whole extent is, which says what the others are parts of. It asks for an idle moment
    before every run, and keeps no run during which a task came.

    Raises:
        ExecutorError: a part cannot be loaded, or the process may not use a core.
    """
    moments = IdleTime(idle, own_s=request.limit_s, wall_s=request.wall_s)
    reader, source = SplitReader(artifact), ModelParts(artifact)
    found: list[PartTime] = []
    with pinned(request.cores):
        for op in request.ops or range(len(artifact.graph.operators)):
            for axis in reader.axes(op):
                found += _axis_times(op, axis, request, moments, source, open_session)
                if moments.reason:
                    return tuple(found)
    return tuple(found)


def _axis_times(
    op: int,
    axis: SplitAxis,
    request: PartTimingRequest,
    moments: IdleTime,
    source: ModelParts,
    open_session: Opener,
) -> list[PartTime]:
    graph = source.artifact.graph
    inputs = seeded_values(graph, graph.operators[op].inputs, 1)
    taken_s: dict[int, list[float]] = {extent: [] for extent in sampled_extents(axis, request.points)}
    keys = {extent: _key(op, axis, extent, request, source) for extent in taken_s}
    extents = tuple(keys)
    for window in windows([weight_bytes(key, graph) for key in keys.values()], HELD_BYTES):
        sessions: dict[int, ValuesSession] = {}  # those of the window before are let go
        for number in range(request.repeats + 1):  # the first makes the sessions, and counts for nothing
            for extent in extents[window.start : window.stop]:
                if not moments.wait():
                    break
                with moments.spend():
                    if not number:
                        sessions[extent] = _session(keys[extent], source, open_session)
                    took_s = _run_s(sessions[extent], dict(inputs), graph.name, op)
                if took_s is None:
                    return []
                if number and moments.undisturbed:
                    taken_s[extent].append(took_s)
    if not taken_s[axis.extent]:
        return []
    return [PartTime(op, axis.axis, extent, summary(taken)) for extent, taken in taken_s.items() if taken]


def _key(op: int, axis: SplitAxis, extent: int, request: PartTimingRequest, source: ModelParts) -> SessionKey:
    half = None if extent == axis.extent else (axis.dim, extent, False)
    return SessionKey(source.artifact.digest, (op,), 1, request.intra_op_threads, half=half)


def _session(key: SessionKey, source: ModelParts, open_session: Opener) -> ValuesSession:
    try:
        return open_session(key, source)
    except ExecutorError:
        raise
    except Exception as error:  # a backend's: their exceptions share no base class
        name, (op,) = source.artifact.graph.name, key.ops
        raise ExecutorError(f"a part of operator {op} of {name!r} cannot run: {one_line(error)}") from error


def _run_s(session: ValuesSession, values: Values, model: str, op: int) -> float | None:
    began_s = time.perf_counter()
    try:
        session.run(values)
    except Exception as error:  # a backend's: their exceptions share no base class
        _log.info("parts of operator %d of %r are not timed: %s", op, model, one_line(error))
        return None
    return time.perf_counter() - began_s
