"""Measures every operator of a model alone, on real intermediate tensors, for the planner's costs.

Operators take turns, as in service: an operator that runs again at once finds its weights and inputs in the
cache, and seems faster than it will ever be. A window of operators is loaded at a time, so that a model's
weights are not there twice.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from stageloom.edge_agent.executor.base import NOT_TIMED, OperatorTime, TimingRequest, one_line
from stageloom.edge_agent.executor.onnx.cache import SessionKey, ValuesSession
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.timing import IdleTime, read_for_the_last_time, seeded_values, summary
from stageloom.shared.artifact import Artifact
from stageloom.shared.errors import ExecutorError

_log = logging.getLogger(__name__)

Opener: TypeAlias = Callable[[SessionKey, ModelParts], ValuesSession]

WINDOW_BYTES: Final = 64 << 20
"""Weights that are loaded at a time, or one operator's where that has more: beyond most last-level caches."""


def time_operators(
    artifact: Artifact, request: TimingRequest, idle: Callable[[], bool], open_session: Opener
) -> tuple[OperatorTime, ...]:
    """Time per operator, each run as a session of its own; NOT_TIMED where the time was up.

    Nor is an operator timed that refuses its inputs: a model may ask for values that only its users know.

    Operators run in the model's order on what the ones before them made, so that value-dependent kernels see
    plausible data. Tensors are dropped after their last reader. It asks for an idle moment
    before every run, and keeps no run during which a task came. [num_operators]

    Raises:
        ExecutorError: an operator cannot be loaded alone.
    """
    runs = operator_runs(artifact, request, idle, open_session)
    return tuple(summary(taken) if taken else NOT_TIMED for taken in runs)


def operator_runs(
    artifact: Artifact, request: TimingRequest, idle: Callable[[], bool], open_session: Opener
) -> list[list[float]]:
    """Seconds of every run behind `time_operators`, which says more. [num_operators][...]

    Raises:
        ExecutorError: an operator cannot be loaded alone.
    """
    moments = IdleTime(idle, own_s=request.limit_s, wall_s=request.wall_s)
    timing = _Timing(artifact, request, moments, open_session)
    weights = [operator.weight_bytes for operator in artifact.graph.operators]
    return [taken for window in windows(weights) for taken in timing.window(window)]


def windows(weights: Sequence[int], limit_bytes: int = WINDOW_BYTES) -> Iterator[range]:
    """Runs of sessions, in order, of at most so many bytes of weights each, or of one session.

    `weights`: bytes per session.
    """
    first, held = 0, 0
    for place, own in enumerate(weights):
        if place > first and held + own > limit_bytes:
            yield range(first, place)
            first, held = place, 0
        held += own
    yield range(first, len(weights))


class _Timing:
    """A model on its way through its operators, window by window."""

    def __init__(
        self, artifact: Artifact, request: TimingRequest, moments: IdleTime, open_session: Opener
    ) -> None:
        self._artifact = artifact
        self._request = request
        self._moments = moments
        self._open_session = open_session
        self._source = ModelParts(artifact)
        self._values = seeded_values(artifact.graph, artifact.graph.inputs, request.batch)
        self._refusing: set[int] = set()

    def window(self, ops: range) -> list[list[float]]:
        """Seconds per operator and run; fewer runs, or none, where the time was up. [len(ops)][...]

        Raises:
            ExecutorError: as `time_operators`.
        """
        taken_s: list[list[float]] = [[] for _ in ops]
        sessions: dict[int, ValuesSession] = {}
        before = self._values
        while any(
            len(taken) < self._request.repeats and op not in self._refusing
            for op, taken in zip(ops, taken_s, strict=True)
        ):
            warm = len(sessions) == len(ops)  # the first round makes the sessions, and counts for nothing
            self._values = dict(before)
            for op, taken in zip(ops, taken_s, strict=True):
                if not self._moments.wait():
                    return taken_s
                with self._moments.spend():
                    took_s = self._run(op, sessions)
                if took_s is not None and warm and self._moments.undisturbed:
                    taken.append(took_s)
        return taken_s

    def _run(self, op: int, sessions: dict[int, ValuesSession]) -> float | None:
        """Seconds of one run, what it reads for the last time dropped; None where the operator refuses it."""
        graph = self._artifact.graph
        if op not in sessions:
            sessions[op] = self._session(op)
        began_s = time.perf_counter()
        took_s = None
        try:
            sessions[op].run(self._values)
            took_s = time.perf_counter() - began_s
        except Exception as error:  # a backend's: their exceptions share no base class
            _log.info("operator %d of %r is not timed: %s", op, graph.name, one_line(error))
            self._refusing.add(op)
            self._values.update(seeded_values(graph, graph.operators[op].outputs, self._request.batch))
        for tensor in read_for_the_last_time(graph, op, self._values):
            del self._values[tensor]
        return took_s

    def _session(self, op: int) -> ValuesSession:
        key = SessionKey(self._artifact.digest, (op,), self._request.batch, self._request.intra_op_threads)
        try:
            return self._open_session(key, self._source)
        except ExecutorError:
            raise
        except Exception as error:  # a backend's: their exceptions share no base class
            name = self._artifact.graph.name
            raise ExecutorError(f"operator {op} of {name!r} cannot run alone: {one_line(error)}") from error
