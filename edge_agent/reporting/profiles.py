"""Profile requests on their way through the engine process: asked, asked again after a restart, answered.

A request that the engine process worked on as it ended, twice, is answered without times: what it wants
measured is likely to be what ends it, and a device must not crash for a measurement. So are the others of its
kind, of the same models on the same executors. What only waited is asked again.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

from msgspec import UNSET
from msgspec.structs import replace

from stageloom.edge_agent.executor.base import TimingRequest
from stageloom.edge_agent.lifecycle import events as link
from stageloom.edge_agent.replan.drift import DriftWatch
from stageloom.edge_agent.reporting.telemetry import part_rows, profile_rows, stage_rows
from stageloom.edge_agent.way_measuring import OWN_REQUESTS
from stageloom.edge_agent.worker.client import memory_file
from stageloom.edge_agent.worker.messages import (
    Command,
    OperatorTimes,
    PartsTimed,
    Profile,
    ProfileStages,
    StageTimes,
    WholeTime,
)
from stageloom.shared.errors import PlanError
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import ProfileRequest, StageProfileRequest
from stageloom.shared.messages.telemetry import ExecutorTime, RowData
from stageloom.shared.plan import decode_plan
from stageloom.shared.text import bounded

ENDED_TWICE: Final = "the engine process ended twice as it measured the same models on the same executors"
_STAGE_REPEATS: Final = 5
_STAGES_AT_LEAST_S: Final = 0.15  # of steps, together
_LIVES: Final = 2
_OWN_WALL_S: Final = 20.0
"""For one of the agent's own measurements, or twice its work: what a planner asks for waits behind it."""

Request: TypeAlias = ProfileRequest | StageProfileRequest


class ProfileQueue:
    """Requests that are not answered yet, in the order in which they came."""

    def __init__(
        self,
        send: Callable[[Command, Sequence[int]], bool],
        path_of: Callable[[Digest], Path],
        record: Callable[[Sequence[RowData]], None],
        tell: Callable[[link.Event], None],
        *,
        environment: Callable[[], str],
        clocks: Callable[[], Sequence[RowData]],
        executor: str,
        intra_op_threads: int,
        wall_s: float,
    ) -> None:
        """`send`: to the engine process. `environment`: what measurements of now are filed under. `clocks`:
        rows that stand beside them."""
        self.drift = DriftWatch()
        self.on_steps: Callable[[int, Mapping[int, float], str, bool], None] | None = None
        """Told of each stage profile that ended: its number, microseconds by combined block, why not, and
        whether it cannot be: the executor refused the plan, or the engine process ended twice at it."""

        self._send = send
        self._path_of = path_of
        self._record = record
        self._tell = tell
        self._environment = environment
        self._clocks = clocks
        self._executor = executor
        self._intra_op_threads = intra_op_threads
        self._wall_s = wall_s
        self._open: dict[int, Request] = {}
        self._deaths = Counter[int]()  # engine processes that ended as they worked on the request
        self._at_work = 0  # the request that the engine process works on; 0: none
        self._void = Counter[int]()  # orders of requests that gave way and are still answered
        self._step_us: dict[int, dict[int, float]] = {}
        self._engine_up = False

    def needed(self) -> set[Digest]:
        """Artifacts that open requests name."""
        return {digest for request in self._open.values() for digest in _artifacts(request)}

    def wanted(self, request: Request) -> None:
        """A request; one that is open already changes nothing. Another one of its number gives way to it: a
        planner whose database was restored gives numbers again."""
        number = request.request
        if self._open.get(number) == request:
            return
        if self._open.pop(number, None) is not None:
            self._deaths.pop(number, None)
            self._void[number] += self._engine_up
        self._open[number] = request
        if self._engine_up:
            self._ask(request)

    def engine_ready(self) -> None:
        """A fresh engine process knows of nothing."""
        self._engine_up = True
        for request in self._open.values():
            self._ask(request)

    def working_on(self, request: int) -> None:
        """The engine process works on this request now; 0: on none, or it waits for a moment to."""
        self._at_work = request

    def engine_exited(self, *, blameless: bool = False) -> bool:
        """Whatever it was asked is lost. Returns whether a request is to blame; `blameless`: none is."""
        number, self._at_work = self._at_work, 0
        request = None if blameless else self._request_of(number)
        self._engine_up = False
        self._void.clear()
        if request is None:
            return False
        self._deaths[number] += 1
        if self._deaths[number] >= _LIVES:
            way = self._way(request)
            for one in [one for one in self._open.values() if self._way(one) == way]:
                self._give_up(one, cannot=replace(one, request=number) == request)
        return True

    def whole_time(self, time: WholeTime) -> None:
        """What the model of a request takes as a whole; its operators' times end the request."""
        request = self._request_of(time.request)
        if isinstance(request, ProfileRequest):
            executor, threads = self._under(request)
            row = ExecutorTime(
                Digest(request.artifact.digest),
                executor,
                threads,
                request.batch,
                bounded(self._environment(), 128),
                time.time_us,
                time.runs,
                bounded(time.reason),
            )
            self._record([row])

    def parts_timed(self, parts: PartsTimed) -> None:
        """Parts of the operators of a request, whose operators' times end it."""
        request = self._request_of(parts.request)
        if isinstance(request, ProfileRequest):
            self._record(part_rows(parts, Digest(request.artifact.digest), self._environment()))

    def operator_times(self, times: OperatorTimes) -> None:
        """The engine's answer, or part of it."""
        last = times.first + len(times.times) >= times.operators
        if self._request_of(times.request, last=last) is not None:
            self._record(profile_rows(times, self._environment()))
            if last:
                self._record(self._clocks())
                self._answered(times.request)

    def stage_times(self, times: StageTimes) -> None:
        """The engine's answer, or part of it."""
        request = self._request_of(times.request, last=times.last)
        if not isinstance(request, StageProfileRequest):
            return
        own = times.request >= OWN_REQUESTS
        if not own:
            self._record(stage_rows(times, request.plan_digest, self._environment()))
        step_us = self._step_us.setdefault(times.request, {})
        if times.times:
            step_us[times.combined] = times.step_us
        if times.last:
            if not own:
                self._record(self._clocks())
                try:
                    self.drift.profiled(request.plan_digest, decode_plan(request.plan).lanes, step_us)
                except PlanError:
                    pass  # the answer says so
            self._answered(times.request)
            if self.on_steps is not None:
                self.on_steps(times.request, step_us, times.reason, times.refused)

    def _request_of(self, number: int, *, last: bool = False) -> Request | None:
        """The open request that the engine answers; None where it gave way. `last`: the answer ends here."""
        if not self._void[number]:
            return self._open.get(number)
        self._void[number] -= last
        return None

    def _ask(self, request: Request) -> None:
        if isinstance(request, StageProfileRequest):
            self._step_us.pop(request.request, None)
            paths = {str(digest): str(self._path_of(digest)) for digest in _artifacts(request)}
            command = ProfileStages(
                request.request,
                paths,
                _STAGE_REPEATS,
                request.budget_s,
                min(self._wall_s, max(_OWN_WALL_S, 2.0 * request.budget_s))
                if request.request >= OWN_REQUESTS
                else self._wall_s,
                request.combined_blocks,
                _STAGES_AT_LEAST_S,
            )
            with memory_file(request.plan) as fd:
                self._send(command, [fd])
            return
        digest = request.artifact.digest
        executor, threads = self._under(request)
        self._send(
            Profile(
                request=request.request,
                artifact=digest,
                path=str(self._path_of(digest)),
                executor=executor,
                timing=TimingRequest(
                    batch=request.batch,
                    intra_op_threads=threads,
                    limit_s=request.budget_s,
                    wall_s=self._wall_s,
                ),
                parts=0 if request.parts is UNSET else request.parts,
            ),
            (),
        )

    def _under(self, request: ProfileRequest) -> tuple[str, int]:
        """The executor and threads that a request names, else those that the agent is set to."""
        return (
            self._executor if request.executor is UNSET else request.executor,
            self._intra_op_threads if request.intra_op_threads is UNSET else request.intra_op_threads,
        )

    def _way(self, request: Request) -> tuple[type, set[Digest], set[str]]:
        """What is measured, of which models, on which executors: with more threads it may end as badly."""
        executors = set[str]()
        if isinstance(request, ProfileRequest):
            executors = {self._under(request)[0]}
        else:
            with suppress(PlanError):  # the answer says so
                executors = {options.name for options in decode_plan(request.plan).executors}
        return type(request), _artifacts(request), executors

    def _give_up(self, request: Request, *, cannot: bool) -> None:
        number, reason = request.request, ENDED_TWICE
        if isinstance(request, StageProfileRequest):
            ended = StageTimes(number, request.plan_digest, 0, (), 0.0, True, reason)
            if number < OWN_REQUESTS:
                self._record(stage_rows(ended, request.plan_digest, self._environment()))
            if self.on_steps is not None:
                self.on_steps(number, {}, reason, cannot)
        else:
            nothing = OperatorTimes(number, request.artifact.digest, request.batch, (), reason)
            self._record(profile_rows(nothing, self._environment()))
        self._answered(number)

    def _answered(self, number: int) -> None:
        del self._open[number]
        self._deaths.pop(number, None)
        self._step_us.pop(number, None)
        if number < OWN_REQUESTS:  # the agent's own are nobody else's business
            self._tell(link.ProfileAnswered(number))


def _artifacts(request: Request) -> set[Digest]:
    if isinstance(request, StageProfileRequest):
        return {need.digest for need in request.artifacts}
    return {request.artifact.digest}
