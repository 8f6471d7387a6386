"""A fast resource on one core, a paced one on another, and batches that come at given times."""

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np

from benchmarks.runner import uncollected
from stageloom.edge_agent.executor.base import Executor, StepResult
from stageloom.edge_agent.executor.executors import Executors, make_executor
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.executor.slot_store import SlotStore
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.messages import WorkerConfig
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import bind
from stageloom.shared.engine.history import ENOUGH, DurationHistory
from stageloom.shared.engine.placing import footprint, kind_on
from stageloom.shared.engine.residency import Bus
from stageloom.shared.engine.steps import CopySlot, Step
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Plan
from stageloom.shared.search.halves import PartTimes
from tests.engine.placed import MOST_WAITING, Played, keeps_up
from tests.executor.paced import PacedExecutor, PacedTransfer

FAST, SLOW = 0, 1
"""Lanes and resources."""

DRAIN_S = 120.0


class WithoutPrefetch(Executors):
    """Tensors are copied when the step that reads them begins."""

    def copy(self, copy: CopySlot) -> None:
        """Nothing: the step copies."""


@dataclass(frozen=True, slots=True)
class RanStep:
    """One step of a batch."""

    batch: int
    block: int
    lane: int
    began_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


@dataclass
class Run:
    """What became of batches that came at `arrivals_s`, all on one clock."""

    arrivals_s: Sequence[float]
    latencies_s: list[float]
    steps: list[RanStep] = field(default_factory=list)

    def away(self, first: int = 0, last: int | None = None) -> float:
        """The share of the batches from `first` on, up to `last`, whose last block ran on the slow lane."""
        tails = {step.batch: step.lane for step in sorted(self.steps, key=lambda step: step.block)}
        lanes = [lane for batch, lane in tails.items() if first <= batch < (last or len(self.arrivals_s))]
        return sum(lane == SLOW for lane in lanes) / len(lanes)

    def since(self, first: int) -> "Run":
        """The same of the batches from `first` on."""
        steps = [step for step in self.steps if step.batch >= first]
        return Run(self.arrivals_s[first:], self.latencies_s[first:], steps)

    def seconds(self, block: int, lane: int) -> list[float]:
        """What the steps of a block took on a lane."""
        return [step.seconds for step in self.steps if (step.block, step.lane) == (block, lane)]

    @property
    def most_waiting(self) -> int:
        """Batches in the system and no part of them running, at most."""
        changes = [(at_s, 1) for at_s in self.arrivals_s]
        for step in self.steps:
            changes.append((step.began_s, -1))
            changes.append((step.ended_s, 1))
        changes += [
            (at_s + taken_s, -1) for at_s, taken_s in zip(self.arrivals_s, self.latencies_s, strict=True)
        ]
        waiting = most = 0
        for _, change in sorted(changes):  # at one instant what goes down comes first
            waiting += change
            most = max(most, waiting)
        return most

    @property
    def keeps_up(self) -> bool:
        """Latency has no slope above 0 at 95 %, and at most four batches wait."""
        return keeps_up(Played(latencies_s=self.latencies_s, most_waiting=self.most_waiting))

    @property
    def mean_s(self) -> float:
        return fmean(self.latencies_s[len(self.latencies_s) // 10 :])

    @property
    def p99_s(self) -> float:
        return float(np.percentile(self.latencies_s[len(self.latencies_s) // 10 :], 99))


class Rig:
    """One plan of one model on an engine; batches of one item."""

    def __init__(
        self,
        artifact: Artifact,
        plan: Plan,
        feeds: dict[str, np.ndarray],
        *,
        slow: float = 3.0,
        bus: Bus | None = None,
        prefetch: bool = True,
        known: PartTimes | None = None,
        whole_s: float | None = None,
    ) -> None:
        """What steps take, to begin with: `known`, or `whole_s` where the plan is not cut."""
        sys.setswitchinterval(WorkerConfig().switch_interval_s)
        self.paced = PacedExecutor(OnnxExecutor(), slow=slow)
        bus = bus or Bus()
        store = SlotStore(PacedTransfer(bus))
        kind = Executors if prefetch else WithoutPrefetch
        history = DurationHistory()
        graphs = {artifact.digest: artifact.graph}
        if known is not None:
            _teach(history, plan, graphs, [(known.head_s, 0.0), (known.tail_s, known.slow_tail_s)])
        elif whole_s is not None and plan.places:
            _teach(history, plan, graphs, [(whole_s, whole_s * slow)])
        self._steps: list[tuple[int, RanStep]] = []
        self._feeds = feeds
        self._name = plan.models[0].name
        self.lanes = len(plan.lane_resources)
        self._made = kind(self._executor, store)
        self.engine = InProcessEngine(self._made, on_step=self._on_step, history=history, bus=bus)
        self.engine.activate(self.engine.load(plan, {artifact.digest: artifact}))
        self.closed_loop(4, 8)  # warm

    def _executor(self, name: str) -> Executor:
        return self.paced if name == self.paced.name else make_executor(name)

    def _on_step(self, step: Step, result: StepResult) -> None:
        member = step.members[0]
        ran = RanStep(member.tasks[0], member.member.block, step.lane, result.started_s, result.ended_s)
        self._steps.append((member.tasks[0], ran))

    def close(self) -> None:
        """End the engine's threads."""
        self.engine.close()

    def closed_loop(self, at_once: int, batches: int, at: Callable[[int], object] = int) -> Run:
        """So many batches at any time; `at` is called before each with its number."""
        tickets = threading.Semaphore(at_once)
        return self._serve([None] * batches, lambda _: tickets.acquire(), tickets.release, at)

    def open_loop(
        self, arrivals_s: Sequence[float], at: Callable[[int], object] = int, *, most: float = math.inf
    ) -> Run:
        """Batches at these times from now on; `at` is called before each with its number.

        None comes any more once more than `most` are in the system.
        """
        began_s = time.monotonic() + 0.05

        def wait(at_s: float | None) -> None:
            assert at_s is not None
            time.sleep(max(0.0, began_s + at_s - time.monotonic()))

        return self._serve(list(arrivals_s), wait, lambda: None, at, began_s, most)

    def _serve(
        self,
        times_s: Sequence[float | None],
        wait: Callable[[float | None], object],
        ended: Callable[[], object],
        at: Callable[[int], object],
        began_s: float = 0.0,
        most: float = math.inf,
    ) -> Run:
        self._steps = []
        with uncollected():
            return self._served(times_s, wait, ended, at, began_s, most)

    def _served(
        self,
        times_s: Sequence[float | None],
        wait: Callable[[float | None], object],
        ended: Callable[[], object],
        at: Callable[[int], object],
        began_s: float,
        most: float,
    ) -> Run:
        ends_s, arrivals_s = [0.0] * len(times_s), [0.0] * len(times_s)
        ids: dict[int, int] = {}
        left = threading.Semaphore(0)

        def done(batch: int) -> None:
            ends_s[batch] = time.monotonic()
            ended()
            left.release()

        for batch, at_s in enumerate(times_s):
            at(batch)
            wait(at_s)
            arrivals_s[batch] = time.monotonic() if at_s is None else began_s + at_s
            future = self.engine.submit(self._name, self._feeds, on_end=lambda _, batch=batch: done(batch))  # type: ignore[misc]
            ids[future.task] = batch
            if len(ids) - sum(map(bool, ends_s)) > most:
                break
        count = len(ids)
        for _ in range(count):
            if not left.acquire(timeout=DRAIN_S):
                raise RuntimeError("the engine does not answer")
        ends_s, arrivals_s = ends_s[:count], arrivals_s[:count]
        latencies_s = [end_s - at_s for end_s, at_s in zip(ends_s, arrivals_s, strict=True)]
        steps = [
            RanStep(ids[task], ran.block, ran.lane, ran.began_s, ran.ended_s)
            for task, ran in self._steps
            if task in ids
        ]
        return Run(arrivals_s, latencies_s, steps)


def _teach(
    history: DurationHistory, plan: Plan, graphs: dict[Digest, Graph], times_s: Sequence[tuple[float, float]]
) -> None:
    bound = bind(plan, graphs)
    for index, combined in enumerate(bound.combined):
        for resource in combined.plan.variant_on:
            seconds = times_s[combined.members[0].block][resource]
            if seconds and combined.members[0].replica == 0:
                for _ in range(ENOUGH):
                    history.add(footprint(bound, index, 1, (1,)), kind_on(bound, index, resource), seconds)


def evenly(rate_per_s: float, batches: int) -> list[float]:
    """Arrivals at equal distances."""
    return [batch / rate_per_s for batch in range(batches)]


def saturated_per_s(rig: Rig, at_once: int, batches: int) -> float:
    """Batches a second in a closed loop, without its first tenth."""
    run = rig.closed_loop(at_once, batches)
    ends_s = sorted(at + taken for at, taken in zip(run.arrivals_s, run.latencies_s, strict=True))
    first = batches // 10
    return (batches - 1 - first) / (ends_s[-1] - ends_s[first])


SHARES = (0.8, 0.85, 0.89, 0.92, 0.94, 0.96, 0.98, 1.0)
"""Rates that are tried, as shares of what a closed loop carries."""

TRIES = 2
"""Of a rate: a machine that does something else for a moment must not decide."""

AT_ONCE = 8
"""Batches of a closed loop, as many as a model has replicas: `dmda` keeps both resources busy with fewer only
where they are about equally fast."""


def highest_share(rig: Rig, batches: int) -> tuple[float, Run]:
    """The highest rate of evenly spaced batches that keeps up, over what a closed loop carries, and its run.

    Found by halving, from 0.94 on. The lowest share counts even where it does not keep up.
    """
    low, high = 0, len(SHARES)
    kept: Run | None = None
    while high - low > 1:
        middle = (low + high) // 2
        run = _try(rig, SHARES[middle], batches)
        if run.keeps_up:
            low, kept = middle, run
        else:
            high = middle
    return SHARES[low], kept or _try(rig, SHARES[low], batches)


def _try(rig: Rig, share: float, batches: int) -> Run:
    """A run at a share that keeps up, or the last of all tries.

    The closed loop comes right before each try, as machines change their clocks within minutes. A run ends
    as soon as more batches are in the system than may wait and lanes can run.
    """
    for _ in range(TRIES):
        carried = saturated_per_s(rig, AT_ONCE, max(batches // 7, 30))
        run = rig.open_loop(evenly(share * carried, batches), most=MOST_WAITING + rig.lanes)
        if run.keeps_up:
            break
    return run


def median_s(run: Run, block: int, lane: int) -> float:
    """What a block takes on a lane; 0 where it did not run there."""
    return median(run.seconds(block, lane) or [0.0])
