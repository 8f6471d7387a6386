"""Profile requests in the engine process, one after another on a thread of their own: operators, and stages.

To measure the stages of a plan, each combined block runs alone, all members active, beside what serves. An
instance has to get to a block before that block can run. The combined blocks take turns in order, so most
find instances that the ones before left at their border; others run the blocks before, one by one, and only
the run with all members counts. Rounds over all combined blocks wanted, so that a time limit leaves fewer
runs of each rather than none of the last ones; the first round warms up. Runs during which a task came are
left out.

What a stage's time is: see `stageloom.shared.stage_times`. Stages of one group that follow each other may
run as one item, and then have one time together.
"""

import itertools
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from stageloom.edge_agent.executor.base import (
    DeviceRunner,
    Executor,
    OperatorTime,
    StepFeeds,
    StepResult,
    StepRunner,
    TimingRequest,
    one_line,
)
from stageloom.edge_agent.executor.executors import Executors, make_executor
from stageloom.edge_agent.executor.timing import Idleness, IdleTime, seeded_values, summary
from stageloom.edge_agent.worker import messages
from stageloom.edge_agent.worker.messages import Report
from stageloom.edge_agent.worker.part_profile import (
    as_samples,
    copy_rate,
    core_pair,
    handover_plan,
    handover_s,
    timed_parts,
    told,
)
from stageloom.edge_agent.worker.pinning import pinned
from stageloom.edge_agent.worker.resources import ArtifactTable, budget
from stageloom.edge_agent.worker.runtime import EngineRuntime
from stageloom.shared.artifact import Artifact
from stageloom.shared.bitmask import mask_of
from stageloom.shared.bound import BoundCombined, BoundModel, BoundPlan, bind
from stageloom.shared.digest import digest_bytes
from stageloom.shared.engine.steps import InstanceId, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.errors import BackendUnavailable, ExecutorError, StageloomError
from stageloom.shared.ids import Digest, StepId, TaskId
from stageloom.shared.launch_list import LaunchList
from stageloom.shared.plan import MAX_LANES, MAX_PLAN_BYTES, ExecutorOptions, Member, decode_plan
from stageloom.shared.schedule import Schedule, StageSchedule
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.measured_splits import PartSample
from stageloom.shared.stage_times import stage_spans

if TYPE_CHECKING:
    import numpy


_MOST_RUNS: Final = 250
"""Of a combined block, however short it is: it is traced, which takes longer than the shortest ones."""

_FIRST: Final = 1 << 48
"""Keys, steps and instances from here on are ours; the engine counts its own from 0."""

_numbers = itertools.count(_FIRST)


@dataclass(slots=True)
class StageSamples:
    """What was measured of one combined block, in seconds."""

    step_s: list[float] = field(default_factory=list)
    stage_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    stages: dict[int, int] = field(default_factory=dict)
    """Per first stage how many ran as one, where that is more than 1."""


def profile_stages(
    bound: BoundPlan,
    artifacts: Mapping[Digest, Artifact],
    executor: StepRunner,
    moments: IdleTime,
    repeats: int,
    wanted: Sequence[int] = (),
    serving: EngineRuntime | None = None,
    *,
    cores: tuple[int, ...] = (),
    at_least_s: float = 0.0,
    before_freeing: Callable[[], None] = lambda: None,
) -> list[StageSamples]:
    """Times of the combined blocks wanted, of all if none is named. [num_combined]

    `repeats` of each, and further ones until their steps took `at_least_s` together: nine steps of a
    millisecond tell what the machine did in that moment. Fewer where the time was up. The plan is loaded for
    it and freed again. `serving`: the engine that has the
    executor, where one has; then steps go between its own. `cores`: what the calling thread keeps to while it
    runs a step; empty: any. `before_freeing` is called once no moment is asked for any more.

    Raises:
        ExecutorError: the plan has no such combined block or cannot be loaded, or a step fails.
    """
    times = [StageSamples() for _ in bound.combined]
    chosen = sorted(set(wanted)) if wanted else range(len(times))
    if chosen[-1] >= len(times):
        raise ExecutorError(f"the plan has no combined block {chosen[-1]}")
    if not moments.wait():
        return times
    key = PlanKey(next(_numbers))
    profile = _Profile(key, bound, executor, serving, moments, cores)
    try:
        with moments.spend(), _refusing():
            executor.load(key, bound, artifacts)
        profile.rounds(chosen, times, repeats, at_least_s)
    finally:
        before_freeing()
        profile.close()
        executor.unload(key)
    return times


class _Profile:
    """Runs combined blocks of one loaded plan."""

    def __init__(
        self,
        key: PlanKey,
        bound: BoundPlan,
        executor: StepRunner,
        serving: EngineRuntime | None,
        moments: IdleTime,
        cores: tuple[int, ...],
    ) -> None:
        self._key = key
        self._bound = bound
        self._executor = executor
        self._serving = serving
        self._owner = serving or executor  # steps and drops go through it
        self._moments = moments
        self._cores = cores
        self._inputs = [_seeded_inputs(model) for model in bound.models]
        self._items = [bound.launches(index, block.full_mask) for index, block in enumerate(bound.combined)]
        self._waiting: dict[Member, InstanceId] = {}  # instances that are before a block

    def rounds(
        self, chosen: Sequence[int], times: Sequence[StageSamples], repeats: int, at_least_s: float
    ) -> None:
        """Run the combined blocks in turns; the first round warms up and does not count."""
        taken_s = 0.0
        for round_ in range(max(repeats, _MOST_RUNS) + 1):
            if round_ > repeats and taken_s >= at_least_s:
                return
            for index in chosen:
                result = self.sample(index)
                if result is None:
                    return
                if round_:
                    self.note(index, result, times[index])
                    taken_s += result.ended_s - result.started_s

    def sample(self, index: int) -> StepResult | None:
        """One run of a combined block that nothing disturbed; None when the time was up."""
        members = self._bound.combined[index].members
        while True:
            # The deepest first: an instance that follows on the same replica needs the slots behind it.
            if not all(self._fetch(member) for member in sorted(members, key=lambda m: -m.block)):
                return None
            result = self._step(index, members, traced=True)
            if result is None or self._moments.undisturbed:
                return result

    def note(self, index: int, result: StepResult, times: StageSamples) -> None:
        items = self._items[index]
        spans = stage_spans(items, [(g.item, g.started_s, g.ended_s) for g in result.groups])
        if spans is None:
            raise ExecutorError("a traced step lacks the times of some groups")
        times.step_s.append(result.ended_s - result.started_s)
        for stage, (began_s, ended_s) in spans.items():
            times.stage_s[stage].append(ended_s - began_s)
        times.stages = joined(items, self._bound.combined[index].plan.schedule)

    def close(self) -> None:
        """Let go of every instance."""
        self._drop(list(self._waiting))

    def _fetch(self, member: Member) -> bool:
        """Have an instance before the member's block, from as near as one is; False when the time was up."""
        way = [Member(member.model, member.replica, block) for block in range(member.block + 1)]
        start = max((at for at, place in enumerate(way) if place in self._waiting), default=0)
        self._waiting.setdefault(way[start], InstanceId(next(_numbers)))
        return all(self._step(self._bound.home[place][0], [place]) is not None for place in way[start:-1])

    def _step(self, index: int, members: Sequence[Member], *, traced: bool = False) -> StepResult | None:
        """Run the members whose instances wait; they wait before the blocks behind, in whoever's place."""
        after = [Member(m.model, m.replica, m.block + 1) for m in members]
        self._drop([member for member in after if member in self._waiting and member not in members])
        held = {member: self._waiting.pop(member) for member in members}
        self._waiting.update({member: held[before] for before, member in zip(members, after, strict=True)})
        result = self._run(index, held, traced=traced)
        if result is None:
            self._drop(after)
        self._drop([m for m in after if m.block == self._bound.models[m.model].plan.num_blocks])
        return result

    def _drop(self, members: Sequence[Member]) -> None:
        """Let go of the instances that wait there."""
        for member in members:
            instance = self._waiting.pop(member, None)
            if instance is not None:
                self._owner.drop(instance)

    def _run(self, index: int, held: Mapping[Member, InstanceId], *, traced: bool) -> StepResult | None:
        if not self._moments.wait():
            return None
        combined = self._bound.combined[index]
        active = [member for member in combined.members if member in held]
        mask = mask_of(at for at, member in enumerate(combined.members) if member in held)
        buckets = tuple(self._batch(member) for member in active)
        program = ProgramKey(self._key, index, mask, buckets)
        step = Step(
            id=StepId(next(_numbers)),
            lane=MAX_LANES,  # the one behind all that plans have
            program=program,
            members=self._members(combined, active, held),
            after=(),
        )
        feeds = {
            held[member]: [self._inputs[member.model]] * self._batch(member)
            for member in active
            if member.block == 0
        }
        with self._moments.spend():
            # Not on the cores: helpers and sessions that this makes may serve later, and would keep to them.
            self._executor.prepare(program)
            with pinned(self._cores):
                return self._run_prepared(step, feeds, traced=traced)

    def _run_prepared(self, step: Step, feeds: StepFeeds, *, traced: bool) -> StepResult:
        if not traced:
            self._owner.issue(step, feeds)
            return self._executor.wait(step.id)
        self._set_tracing(True)
        try:
            self._owner.issue(step, feeds)
            return self._executor.wait(step.id)
        finally:
            self._set_tracing(False)

    def _set_tracing(self, on: bool) -> None:
        if self._serving is None:
            self._executor.tracing = on
        else:
            self._serving.set_tracing(on)

    def _members(
        self, combined: BoundCombined, active: Sequence[Member], held: Mapping[Member, InstanceId]
    ) -> tuple[StepMember, ...]:
        return tuple(
            StepMember(
                position=combined.members.index(member),
                member=member,
                instance=held[member],
                tasks=(TaskId(0),) * self._batch(member),
                last=member.block + 1 == self._bound.models[member.model].plan.num_blocks,
                staged=Member(member.model, member.replica, member.block + 1) in active,
            )
            for member in sorted(active, key=lambda m: -m.block)
        )

    def _batch(self, member: Member) -> int:
        return self._bound.models[member.model].buckets[-1]


def joined(items: LaunchList, schedule: Schedule) -> dict[int, int]:
    """Per stage with which a joint item begins how many stages are in it, with all members active."""
    if not isinstance(schedule, StageSchedule):
        return {}
    begins = sorted({item.stage for item in items})
    ends = [*begins[1:], len(schedule.stages)]
    return {begin: end - begin for begin, end in zip(begins, ends, strict=True) if end > begin + 1}


def _seeded_inputs(model: BoundModel) -> "Mapping[str, numpy.ndarray]":
    """One task's inputs of the graph's types."""
    graph = model.graph
    return {graph.tensors[t].name: array for t, array in seeded_values(graph, graph.inputs, 1).items()}


log = logging.getLogger(__name__)

_POLL_S: Final = 0.05
_WHOLE_RUNS: Final = 9
_WHOLE_SHARE: Final = 0.25
_OPERATORS_SHARE: Final = 0.75
"""Of a request's time: what running the whole model may take, and its operators."""

_WHOLE_BESIDE_PARTS: Final = 0.15
_OPERATORS_BESIDE_PARTS: Final = 0.3
_PARTS_SHARE: Final = 0.35
_HANDOVER_SHARE: Final = 0.2
"""Of the time of a request for parts, too."""

_PARTS_PER_REPORT: Final = 1024  # of at most 40 bytes each

_TOO_BUSY = "some were not timed: the time limit came first, or the device was too busy"


class _CannotRunError(ExecutorError):
    """The executor cannot run the plan, now or later."""


@contextmanager
def _refusing() -> Iterator[None]:
    """Whoever makes or loads inside refuses the plan for good by an error, unless that may pass."""
    try:
        yield
    except BackendUnavailable:
        raise
    except ExecutorError as error:
        raise _CannotRunError(error.cause, remedy=error.remedy) from error


class Profiler:
    """Two requests at once would time each other, so they queue."""

    def __init__(
        self,
        report: Callable[[Report], None],
        driver: Callable[[], EngineRuntime | None],
        executors: Executors,
        artifacts: ArtifactTable,
        idle: Callable[[], bool],
        memory_bytes: int,
        *,
        tries_plan: Callable[[], bool] = lambda: False,
        on_lost: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """`executors`: the driver's. `idle`: nothing is served. `memory_bytes` is for all plans together; 0:
        what there is. `tries_plan`: one is loaded or compared; work waits, so that a crash is the plan's.
        `on_lost` is told of a failure after which the device is lost to this process."""
        self._report = report
        self._driver = driver
        self._executors = executors
        self._artifacts = artifacts
        self._is_idle = idle
        self._tries_plan = tries_plan
        self._on_lost = on_lost
        arrived = idle.arrived if isinstance(idle, Idleness) else lambda: 0
        self._idle = Idleness(self._looks_idle, arrived)
        self._memory_bytes = memory_bytes
        self._request = 0  # that has its turn; 0: none
        self._told = 0  # the one that work was last told of
        self._jobs: SimpleQueue[tuple[int, Callable[[], None]]] = SimpleQueue()
        self.handlers: messages.Handlers = {
            messages.Profile: self._order_operators,
            messages.ProfileStages: self._order_stages,
        }

    def start(self) -> None:
        """From now on requests are worked on."""
        threading.Thread(target=self._work, name="profile", daemon=True).start()

    def _order_operators(self, command: messages.Profile, fds: list[int]) -> None:
        self._jobs.put((command.request, lambda: self._time_operators(command)))

    def _order_stages(self, command: messages.ProfileStages, fds: list[int]) -> None:
        wire = read_plan(fds)
        self._jobs.put((command.request, lambda: self._time_stages(command, wire)))

    def _work(self) -> NoReturn:
        while True:
            self._work_on(*self._jobs.get())

    def _work_on(self, request: int, job: Callable[[], None]) -> None:
        self._request = request
        self._go_on()  # packages that it imports may end the process, too
        job()
        self._request = 0
        self._tell(0)

    def _looks_idle(self) -> bool:
        """As `idle`; work goes on where it says so, and waits where it does not."""
        idle = self._is_idle() and not self._tries_plan()
        self._tell(self._request if idle else 0)
        return idle

    def _go_on(self) -> None:
        """Before work that asks for no moment: it may run beside tasks, but beside no plan that is tried."""
        while self._tries_plan():
            self._tell(0)
            time.sleep(_POLL_S)
        self._tell(self._request)

    def _tell(self, request: int) -> None:
        """Say what is worked on, where that is another request than before."""
        if request != self._told:
            self._told = request
            self._report(messages.Profiling(request))

    @contextmanager
    def _asking(self, executor: StepRunner) -> Iterator[None]:
        """After a failure inside ask whether its device is lost, which is this request's doing."""
        try:
            yield
        except Exception as error:
            if isinstance(executor, DeviceRunner) and executor.lost():
                self._tell(self._request)
                self._on_lost(one_line(error))
            raise

    # Operators

    def _time_operators(self, request: messages.Profile) -> None:
        digest = Digest(request.artifact)
        timed: tuple[OperatorTime, ...] = ()
        reason = ""
        user = ("profile", request.request)
        try:
            artifact = self._artifacts.use(user, digest, {digest: request.path})
            whole = self._whole(request, artifact)
            if isinstance(whole, messages.WholeTime):
                self._report(whole)
            else:
                reason = f"the model as a whole is not timed: {whole}"
            self._go_on()
            executor = make_executor(request.executor)
            try:
                share = _OPERATORS_BESIDE_PARTS if request.parts else _OPERATORS_SHARE
                with self._asking(executor):
                    timed = executor.time_operators(artifact, _share(request.timing, share), self._idle)
                if request.parts:
                    self._time_parts(request, artifact, executor, timed)
            finally:
                self._go_on()
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
                    request.request, digest, request.timing.batch, part, reason, first, len(times)
                )
            )

    def _time_parts(
        self,
        request: messages.Profile,
        artifact: Artifact,
        executor: Executor,
        alone: Sequence[OperatorTime],
    ) -> None:
        """Report parts of operators, and what it takes to hand over and to copy."""
        asked = request.timing
        reports: list[messages.PartsTimed] = []
        self._go_on()
        try:
            with self._asking(executor):
                timed = timed_parts(
                    executor, artifact, alone, _share(asked, _PARTS_SHARE), request.parts, self._idle
                )
            handover_s, reason = self._handover(request, artifact, as_samples(timed))
            times = told(timed)
            for first in range(0, max(1, len(times)), _PARTS_PER_REPORT):
                part = times[first : first + _PARTS_PER_REPORT]
                reports.append(
                    messages.PartsTimed(
                        request.request,
                        part,
                        None if first or handover_s is None else handover_s * 1e6,
                        None if first else copy_rate(),
                        reason,
                    )
                )
        except Exception as error:  # there are no parts, and the operators are told
            reports = [messages.PartsTimed(request.request, (), reason=_one_line(error))]
        for report in reports:
            self._report(report)

    def _handover(
        self, request: messages.Profile, artifact: Artifact, parts: Sequence[PartSample]
    ) -> tuple[float | None, str]:
        """Seconds of a hand-over to a resource of the same executor; or None, and why."""
        asked = request.timing
        if not parts:
            return None, "no part was timed: no operator may be split, or the time was too short"
        self._go_on()
        cores = core_pair(asked.intra_op_threads)
        if cores is None:
            return None, f"two resources need {2 * asked.intra_op_threads} cores"
        options = ExecutorOptions(name=request.executor, intra_op_threads=asked.intra_op_threads)
        try:
            wanted = handover_plan(artifact, parts, options, cores)
            if wanted is None:
                return None, "no operator has two halves"
            bound = bind(wanted.plan, {artifact.digest: artifact.graph})
            own_s = _HANDOVER_SHARE * asked.limit_s
            moments = IdleTime(self._idle, own_s=own_s, wall_s=asked.wall_s)
            with self._executor(bound) as (executor, serving):
                (found,) = profile_stages(
                    bound,
                    {artifact.digest: artifact},
                    executor,
                    moments,
                    _WHOLE_RUNS,
                    serving=serving,
                    cores=cores[0],
                    before_freeing=self._go_on,
                )
        except Exception as error:  # parts are told without it
            return None, f"hand-overs are not measured: {_one_line(error)}"
        schedule = wanted.plan.combined[0].schedule
        assert isinstance(schedule, StageSchedule), "split plans have stages"
        seconds = handover_s(schedule, found, wanted)
        return seconds, "" if seconds is not None else f"hand-overs are not measured: {_TOO_BUSY}"

    def _whole(self, request: messages.Profile, artifact: Artifact) -> messages.WholeTime | str:
        """One run of the model in a session over all of it, as a plan that does not cut it has it.

        Or why there is none: the time was up, or it failed for a cause that may pass.
        """
        asked = request.timing
        share = _WHOLE_BESIDE_PARTS if request.parts else _WHOLE_SHARE
        moments = IdleTime(self._idle, own_s=share * asked.limit_s, wall_s=asked.wall_s)
        try:
            choice = ModelChoice(
                name="model", artifact=artifact.digest, graph=artifact.graph, batch=asked.batch
            )
            options = ExecutorOptions(name=request.executor, intra_op_threads=asked.intra_op_threads)
            bound = bind(compose([choice], executor=options), {artifact.digest: artifact.graph})
            with self._executor(bound) as (executor, serving):
                (found,) = profile_stages(
                    bound,
                    {artifact.digest: artifact},
                    executor,
                    moments,
                    _WHOLE_RUNS,
                    serving=serving,
                    before_freeing=self._go_on,
                )
        except _CannotRunError as error:
            return messages.WholeTime(request.request, None, 0, str(error))
        except Exception as error:  # there is no time, and the engine goes on
            return _one_line(error)
        if not found.step_s:
            if moments.too_busy:
                return f"{moments.reason}; ask when fewer tasks come, or raise profile_wall_s"
            return f"{moments.reason}; {share:.0%} of the budget is for it, ask with a larger one"
        return messages.WholeTime(request.request, summary(found.step_s).median_us, len(found.step_s))

    # Stages

    def _time_stages(self, request: messages.ProfileStages, wire: bytes) -> None:
        digest = digest_bytes([wire])
        times: list[StageSamples] = []
        refused = False
        user = ("stages", request.request)
        try:
            plan = decode_plan(wire)
            artifacts = {
                model.artifact: self._artifacts.use(user, model.artifact, request.artifacts)
                for model in plan.models
            }
            bound = bind(plan, {one: artifact.graph for one, artifact in artifacts.items()})
            moments = IdleTime(self._idle, own_s=request.limit_s, wall_s=request.wall_s)
            with self._executor(bound) as (executor, serving):
                times = profile_stages(
                    bound,
                    artifacts,
                    executor,
                    moments,
                    request.repeats,
                    request.combined_blocks,
                    serving,
                    at_least_s=request.at_least_s,
                    before_freeing=self._go_on,
                )
            reason = moments.reason
        except Exception as error:  # there are no times, and the engine goes on
            reason = _one_line(error)
            refused = isinstance(error, _CannotRunError)
        self._artifacts.release(user)
        for report in stage_reports(request.request, digest, times, reason, refused=refused):
            self._report(report)

    @contextmanager
    def _executor(self, bound: BoundPlan) -> Iterator[tuple[StepRunner, EngineRuntime | None]]:
        """The executors that serve, whose weights the plan may share, if they run all of it; else its own."""
        driver = self._driver()
        shares = driver is not None and all(map(self._executors.runs, bound.executor_names))
        executors = self._executors if shares else Executors(make_executor)
        try:
            with _refusing():
                needed_bytes = executors.stated_bytes(bound)
            held_bytes = self._executors.held_bytes + (0 if shares else executors.held_bytes)
            room_bytes = budget(self._memory_bytes, held_bytes).room_bytes
            if needed_bytes > room_bytes:
                reason = f"it needs {needed_bytes} bytes beside what is loaded, {room_bytes} are left"
                raise BackendUnavailable(f"the plan is not profiled: {reason}")
            with self._asking(executors):
                yield executors, driver if shares else None
        finally:
            if not shares:
                executors.close()


def read_plan(fds: list[int]) -> bytes:
    """A plan's canonical bytes, from the memory file that came with a command."""
    return os.pread(fds[0], MAX_PLAN_BYTES + 1, 0) if fds else b""


def stage_reports(
    request: int, plan: Digest, times: list[StageSamples], reason: str, *, refused: bool = False
) -> list[messages.StageTimes]:
    """The answer in parts; combined blocks without a run are left out, the last part ends it."""
    parts: list[tuple[int, tuple[tuple[int, float, float, int, int], ...], float]] = []
    for combined, block in enumerate(times):
        if not block.step_s:
            continue
        stages = tuple(
            _stage(stage, summary(taken), block.stages.get(stage, 1))
            for stage, taken in sorted(block.stage_s.items())
        )
        step_us = summary(block.step_s).median_us
        parts += [
            (combined, stages[first : first + messages.MAX_TIMES], step_us)
            for first in range(0, max(1, len(stages)), messages.MAX_TIMES)
        ]
    if not parts:
        return [messages.StageTimes(request, plan, 0, (), 0.0, True, reason or _TOO_BUSY, refused)]
    last = len(parts) - 1
    return [
        messages.StageTimes(request, plan, combined, stages, step_us, at == last, reason)
        for at, (combined, stages, step_us) in enumerate(parts)
    ]


def _stage(stage: int, time: OperatorTime, stages: int) -> tuple[int, float, float, int, int]:
    return stage, time.median_us, time.spread_us, time.runs, stages


def _share(timing: TimingRequest, share: float) -> TimingRequest:
    """With a part of the time."""
    return msgspec.structs.replace(timing, limit_s=share * timing.limit_s)


def _one_line(error: Exception) -> str:
    if isinstance(error, StageloomError | ValueError | OSError):
        return str(error)
    log.error("a profile request failed", exc_info=error)
    return one_line(error)
