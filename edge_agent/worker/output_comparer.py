"""Runs two versions of a model on inputs of real tasks in the engine process, and compares their outputs.

Both plans are loaded once more under keys of their own, which takes no weights, so that instances of real
tasks are never in the way. An input is copied when its task comes, one of each model at a time. Both versions
run on it on a thread of their own, one step after the other, in a moment without tasks if one comes within a
second: a step then delays a task by its own time at most, less than the drains of a trial do. Between two
inputs it rests, so that the device is busy with it for a tenth of the time at most.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, NoReturn

from stageloom.edge_agent.executor.base import StepRunner, one_line
from stageloom.edge_agent.executor.executors import Executors
from stageloom.edge_agent.worker import messages
from stageloom.edge_agent.worker.messages import CompareOutputs, OutputsCompared, Report
from stageloom.edge_agent.worker.resources import ArtifactTable, budget
from stageloom.edge_agent.worker.runtime import EngineRuntime
from stageloom.edge_agent.worker.tasks import EngineTask
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import InstanceId, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.errors import ExecutorError, StageloomError
from stageloom.shared.ids import Digest, StepId, TaskId
from stageloom.shared.output_comparison import OutputComparison
from stageloom.shared.plan import MAX_LANES, Member
from stageloom.shared.text import counted

if TYPE_CHECKING:
    import numpy

log = logging.getLogger(__name__)

_numbers = itertools.count(1 << 52)
"""Keys, steps and instances of comparisons; the engine counts from 0, the profiler from 1 << 48."""

_POLL_S: Final = 0.002
_LOOK_S: Final = 0.25
_REST: Final = 9.0
"""Times what one input took, in both versions, nothing is run before the next."""

_PATIENCE_S: Final = 1.0
"""A moment without tasks is waited for so long at most, per input."""


class InputSampler:
    """Copies the inputs of tasks that come, one of each wanted model at a time."""

    def __init__(self, models: Iterable[str]) -> None:
        self._wanted = set(models)
        self._taken: SimpleQueue[tuple[str, Mapping[str, numpy.ndarray]]] = SimpleQueue()

    def offer(self, task: EngineTask) -> None:
        """A task has come; on the thread that takes it in, before any step of it."""
        for model in task.models:
            if model in self._wanted:
                self._wanted.discard(model)
                self._taken.put((model, {name: row.copy() for name, row in task.inputs(model).items()}))

    def want(self, model: str) -> None:
        """One more of this model."""
        self._wanted.add(model)

    def next(self, timeout_s: float) -> "tuple[str, Mapping[str, numpy.ndarray]] | None":
        """A model and the inputs of one task of it; None if none came in time."""
        try:
            return self._taken.get(timeout=timeout_s)
        except Empty:
            return None


class OutputComparer:
    """One comparison at a time; a newer order ends the one before."""

    def __init__(
        self,
        report: Callable[[Report], None],
        driver: Callable[[], EngineRuntime | None],
        executors: Executors,
        artifacts: ArtifactTable,
        idle: Callable[[], bool],
        memory_bytes: int,
        *,
        on_lost: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """As `Profiler`."""
        self._report = report
        self._driver = driver
        self._executors = executors
        self._artifacts = artifacts
        self._idle = idle
        self._memory_bytes = memory_bytes
        self._on_lost = on_lost
        self._newest = 0
        self._open = set[int]()
        self._orders: SimpleQueue[CompareOutputs] = SimpleQueue()
        self.handlers: messages.Handlers = {CompareOutputs: self._order}

    def start(self) -> None:
        """From now on orders are carried out."""
        threading.Thread(target=self._work, name="compare", daemon=True).start()

    def _order(self, command: CompareOutputs, fds: list[int]) -> None:
        self._newest = command.number
        self._open.add(command.number)
        self._orders.put(command)

    @property
    def busy(self) -> bool:
        """An order is not answered yet."""
        return bool(self._open)

    def _work(self) -> NoReturn:
        while True:
            self._carry_out(self._orders.get())

    def _carry_out(self, order: CompareOutputs) -> None:
        """Whatever goes wrong is reported, and what runs goes on."""
        user = ("compare", order.number)
        try:
            answer = self._compare(order, user)
        except _CandidateFailed as error:
            self._ask_device(error)
            reason = f"the new version fails on inputs of real tasks: {error}"
            answer = OutputsCompared(order.number, None, reason, True)
        except Exception as error:  # nothing is known of the outputs
            self._ask_device(error)
            if not isinstance(error, StageloomError | ValueError | OSError):
                log.error("a comparison of outputs failed", exc_info=error)
            answer = OutputsCompared(order.number, None, f"not compared: {one_line(error)}")
        self._artifacts.release(user)
        self._report(answer)
        self._open.discard(order.number)

    def _ask_device(self, error: Exception) -> None:
        """After a failure, before its answer: on a lost device all that follows would fail, too."""
        if self._executors.lost():
            self._on_lost(one_line(error))

    def _compare(self, order: CompareOutputs, user: tuple[str, int]) -> OutputsCompared:
        driver = self._driver()
        if driver is None:
            raise ExecutorError("no plan is loaded")
        bounds = _plans(order, driver)
        artifacts = {
            digest: self._artifacts.use(user, digest, {})
            for digest in {model.plan.artifact for bound in bounds for model in bound.models}
        }
        needed_bytes = sum(self._executors.stated_bytes(bound) for bound in bounds)
        room_bytes = budget(self._memory_bytes, self._executors.held_bytes).room_bytes
        if needed_bytes > room_bytes:
            raise ExecutorError(f"it needs {needed_bytes} bytes beside both plans, {room_bytes} are left")
        versions: list[_Version] = []
        sampler = InputSampler(order.models)
        try:
            for bound in bounds:
                version = _Version(bound, artifacts, self._executors, driver)
                versions.append(version)  # one by one: the first is closed where the second fails
            driver.sampler = sampler
            return self._answer(order, driver, sampler, versions)
        finally:
            driver.sampler = None
            for version in versions:
                version.close()

    def _answer(
        self,
        order: CompareOutputs,
        driver: EngineRuntime,
        sampler: InputSampler,
        versions: "list[_Version]",
    ) -> OutputsCompared:
        comparison, failures = OutputComparison(order.tolerance), list[str]()
        ends_s = time.monotonic() + order.limit_s
        missing, rests_until_s = set(order.models), 0.0
        while missing and self._newest == order.number and time.monotonic() < ends_s:
            _plans(order, driver)
            if (left_s := min(rests_until_s, ends_s) - time.monotonic()) > 0.0:
                time.sleep(min(left_s, _LOOK_S))  # no longer: a newer order may come
                continue
            sample = sampler.next(min(_LOOK_S, max(ends_s - time.monotonic(), 0.0)))
            if sample is None:
                continue
            model, inputs = sample
            self._await_pause(ends_s)
            began_s = time.monotonic()
            try:
                comparison.take(model, *_outputs(versions, model, inputs))
            except ExecutorError as error:  # an input that is no good says nothing of the new version
                self._ask_device(error)
                failures.append(one_line(error))
            ended_s = time.monotonic()
            rests_until_s = ended_s + _REST * (ended_s - began_s)
            if comparison.inputs_of(model) < order.inputs:
                sampler.want(model)
            else:
                missing.discard(model)
        return _found(order, comparison, failures)

    def _await_pause(self, ends_s: float) -> None:
        until_s = min(time.monotonic() + _PATIENCE_S, ends_s)
        while not self._idle() and time.monotonic() < until_s:
            time.sleep(_POLL_S)


def _found(order: CompareOutputs, comparison: OutputComparison, failures: list[str]) -> OutputsCompared:
    """The answer; `failures` of the version that runs, each on an input that was left out."""
    left_out = ""
    if failures:
        count = counted(len(failures), "input")
        left_out = f"{count} left out, on which the version that runs fails: {failures[-1]}"
    unseen = sorted(model for model in order.models if not comparison.inputs_of(model))
    verdict = comparison.verdict()
    if unseen and verdict.agrees:
        reason = (
            f"no task of {', '.join(unseen)} came within {order.limit_s:g} s whose outputs could be "
            "compared; push when tasks come, or without --compare-outputs"
        )
        return OutputsCompared(order.number, None, "; ".join(filter(None, (reason, left_out))))
    return OutputsCompared(order.number, verdict, left_out)


def _plans(order: CompareOutputs, driver: EngineRuntime) -> list[BoundPlan]:
    """The control and the candidate.

    Raises:
        ExecutorError: one was given up. What a comparison of it holds may be what another plan needs.
    """
    plans = [driver.plan(PlanKey(key)) for key in (order.control, order.candidate)]
    bounds = [bound for bound in plans if bound is not None]
    if len(bounds) != len(plans):
        raise ExecutorError("one of the two plans is not loaded any more")
    return bounds


def _outputs(
    versions: "Sequence[_Version]", model: str, inputs: "Mapping[str, numpy.ndarray]"
) -> "tuple[Mapping[str, numpy.ndarray], Mapping[str, numpy.ndarray]]":
    """Of the version that runs and of the new one.

    Raises:
        ExecutorError: the version that runs fails on this input.
        _CandidateFailed: the new one alone does.
    """
    old, new = versions
    before = old.run(model, inputs)
    try:
        return before, new.run(model, inputs)
    except ExecutorError as error:
        raise _CandidateFailed(str(error)) from error


class _CandidateFailed(Exception):
    """A step of the new version failed."""


class _Version:
    """One plan, loaded once more, whose models run on one input at a time."""

    def __init__(
        self,
        bound: BoundPlan,
        artifacts: Mapping[Digest, Artifact],
        executor: StepRunner,
        driver: EngineRuntime,
    ) -> None:
        self._bound = bound
        self._executor = executor
        self._driver = driver
        self._key = PlanKey(next(_numbers))
        executor.load(self._key, bound, artifacts)

    def run(self, model: str, inputs: "Mapping[str, numpy.ndarray]") -> "Mapping[str, numpy.ndarray]":
        """The outputs of one task, block by block.

        Raises:
            ExecutorError: a step fails.
        """
        number = self._bound.model_index[model]
        instance = InstanceId(next(_numbers))
        blocks = self._bound.models[number].plan.num_blocks
        try:
            for block in range(blocks):
                feeds = {} if block else {instance: [inputs]}
                step = self._step(Member(number, 0, block), instance, last=block + 1 == blocks)
                self._executor.prepare(step.program)
                self._driver.issue(step, feeds)
                result = self._executor.wait(step.id)
            return {name: row.copy() for name, row in result.outputs[instance][0].items()}
        finally:
            self._driver.drop(instance)

    def _step(self, member: Member, instance: InstanceId, *, last: bool) -> Step:
        index = self._bound.home[member][0]
        position = self._bound.combined[index].members.index(member)
        bucket = self._bound.models[member.model].buckets[0]
        return Step(
            id=StepId(next(_numbers)),
            lane=MAX_LANES,  # the one behind all that plans have
            program=ProgramKey(self._key, index, 1 << position, (bucket,)),
            members=(
                StepMember(
                    position=position,
                    member=member,
                    instance=instance,
                    tasks=(TaskId(0),),
                    last=last,
                    staged=False,
                ),
            ),
            after=(),
        )

    def close(self) -> None:
        self._executor.unload(self._key)
