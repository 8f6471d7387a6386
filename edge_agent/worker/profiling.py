"""Profile requests inside the engine process: one after another, on a thread of their own."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import NoReturn

from stageloom.edge_agent.executor.base import OperatorTime, StepRunner, TimingRequest
from stageloom.edge_agent.executor.executors import Executors, make_executor
from stageloom.edge_agent.executor.timing import IdleTime
from stageloom.edge_agent.worker import messages
from stageloom.edge_agent.worker.artifacts import ArtifactTable
from stageloom.edge_agent.worker.driver import EngineDriver
from stageloom.edge_agent.worker.memory import budget
from stageloom.edge_agent.worker.messages import Report
from stageloom.edge_agent.worker.stage_profile import Alone, Beside, BlockTimes, profile_stages
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import ExecutorError, StageloomError
from stageloom.shared.ids import Digest
from stageloom.shared.plan import decode_plan

log = logging.getLogger(__name__)

_TOO_BUSY = "some were not timed: the time limit came first, or the device was too busy"


class Profiler:
    """Two requests at once would time each other, so they queue."""

    def __init__(
        self,
        report: Callable[[Report], None],
        driver: Callable[[], EngineDriver | None],
        executors: Executors,
        artifacts: ArtifactTable,
        idle: Callable[[], bool],
        memory_bytes: int,
    ) -> None:
        """`executors`: the driver's. `idle`: nothing is served. `memory_bytes` is for all plans together; 0:
        what there is."""
        self._report = report
        self._driver = driver
        self._executors = executors
        self._artifacts = artifacts
        self._idle = idle
        self._memory_bytes = memory_bytes
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def start(self) -> None:
        """From now on requests are worked on."""
        threading.Thread(target=self._work, name="profile", daemon=True).start()

    def operators(self, request: messages.Profile) -> None:
        """Answered by OperatorTimes."""
        self._jobs.put(partial(self._time_operators, request))

    def stages(self, request: messages.ProfileStages, wire: bytes) -> None:
        """Answered by StageTimes."""
        self._jobs.put(partial(self._time_stages, request, wire))

    def _work(self) -> NoReturn:
        while True:
            self._jobs.get()()

    # Operators

    def _time_operators(self, request: messages.Profile) -> None:
        digest = Digest(request.artifact)
        timed: tuple[OperatorTime, ...] = ()
        reason = ""
        user = ("profile", request.request)
        try:
            artifact = self._artifacts.use(user, digest, {digest: request.path})
            timing = TimingRequest(
                batch=request.batch,
                intra_op_threads=request.intra_op_threads,
                repeats=request.repeats,
                limit_s=request.limit_s,
                wall_s=request.wall_s,
            )
            executor = make_executor(request.executor)
            try:
                timed = executor.time_operators(artifact, timing, self._idle)
            finally:
                executor.close()
            if not all(one.runs for one in timed):
                reason = _TOO_BUSY
        except Exception as error:  # there are no times, and the engine goes on
            reason = _one_line(error)
        self._artifacts.release(user)
        times = tuple((one.median_us, one.spread_us, one.runs) for one in timed)
        for first in range(0, max(1, len(times)), messages.MAX_TIMES):
            part = times[first : first + messages.MAX_TIMES]
            self._report(
                messages.OperatorTimes(
                    request.request, digest, request.batch, part, reason, first, len(times)
                )
            )

    # Stages

    def _time_stages(self, request: messages.ProfileStages, wire: bytes) -> None:
        digest = digest_bytes([wire])
        times: list[BlockTimes] = []
        user = ("stages", request.request)
        try:
            plan = decode_plan(wire)
            artifacts = {
                model.artifact: self._artifacts.use(user, model.artifact, request.artifacts)
                for model in plan.models
            }
            bound = bind(plan, {one: artifact.graph for one, artifact in artifacts.items()})
            moments = IdleTime(self._idle, own_s=request.limit_s, wall_s=request.wall_s)
            with self._executor(bound) as (executor, beside):
                times = profile_stages(
                    bound, artifacts, executor, beside, moments, request.repeats, request.combined_blocks
                )
            reason = moments.reason
        except Exception as error:  # there are no times, and the engine goes on
            reason = _one_line(error)
        self._artifacts.release(user)
        for report in stage_reports(request.request, digest, times, reason):
            self._report(report)

    @contextmanager
    def _executor(self, bound: BoundPlan) -> Iterator[tuple[StepRunner, Beside]]:
        """The executor that serves, whose weights the plan may share; else one of its own."""
        name = bound.plan.executor.name
        driver = self._driver()
        shares = driver is not None and self._executors.runs(name)
        executor: StepRunner = self._executors if shares else make_executor(name)
        needed_bytes = executor.stated_bytes(bound)
        room_bytes = budget(self._memory_bytes, executor.held_bytes).room_bytes
        try:
            if needed_bytes > room_bytes:
                reason = f"it needs {needed_bytes} bytes beside what is loaded, {room_bytes} are left"
                raise ExecutorError(f"the plan is not profiled: {reason}")
            if driver is not None and shares:
                yield executor, driver
            else:
                yield executor, Alone(executor)
        finally:
            if not shares:
                executor.close()


def stage_reports(
    request: int, plan: Digest, times: list[BlockTimes], reason: str
) -> list[messages.StageTimes]:
    """The answer in parts; combined blocks without a run are left out, the last part ends it."""
    parts: list[tuple[int, tuple[tuple[int, float, float, int, int], ...], float]] = []
    for combined, block in enumerate(times):
        if not block.step_s:
            continue
        stages = tuple(
            _stage(stage, block.summary(taken), block.stages.get(stage, 1))
            for stage, taken in sorted(block.stage_s.items())
        )
        step_us = block.summary(block.step_s).median_us
        parts += [
            (combined, stages[first : first + messages.MAX_TIMES], step_us)
            for first in range(0, max(1, len(stages)), messages.MAX_TIMES)
        ]
    if not parts:
        return [messages.StageTimes(request, plan, 0, (), 0.0, True, reason or _TOO_BUSY)]
    last = len(parts) - 1
    return [
        messages.StageTimes(request, plan, combined, stages, step_us, at == last, reason)
        for at, (combined, stages, step_us) in enumerate(parts)
    ]


def _stage(stage: int, time: OperatorTime, stages: int) -> tuple[int, float, float, int, int]:
    return stage, time.median_us, time.spread_us, time.runs, stages


def _one_line(error: Exception) -> str:
    if isinstance(error, StageloomError | ValueError | OSError):
        return str(error)
    log.error("a profile request failed", exc_info=error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
