"""A device that serves a queue, simulated: what the windows of a trial see of two plans under Poisson
arrivals.

A plan is a number of lanes and what a task takes in one of them. Tasks wait in one queue, first come, first
served; one that can no longer end before its deadline is dropped when its turn comes. The windows are
counted by the engine's own `WindowCounter`, and the trial is run by the agent's own `TrialCore`, on a
virtual clock.
"""

import heapq
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import cast

from stageloom.edge_agent.lifecycle.trial_runner import window_figures
from stageloom.edge_agent.worker.accounting import WindowCounter
from stageloom.shared.engine.core import EngineCore
from stageloom.shared.engine.steps import Outcome, Task
from stageloom.shared.engine.trial import (
    Decide,
    MeasureSide,
    SaveRecord,
    TrialConfig,
    TrialCore,
    TrialRecord,
    TrialResult,
    TrialSetup,
)
from stageloom.shared.engine.windows import Side, WindowFigures
from stageloom.shared.ids import Digest, TaskId

SERVICE_S: Mapping[str, float] = {"light": 0.008, "heavy": 0.024}
"""What a task takes in a narrow lane."""

SHARES: Mapping[str, float] = {"light": 0.75, "heavy": 0.25}
DEADLINES = 5.0
"""Times what a task takes in a narrow lane."""

WIDE = 0.65
"""What a task takes in one lane of two threads, over one lane of one thread."""

_SPREAD = 0.05
_DISK_S, _SWAP_S = 0.005, 0.001
_MIN_DEADLINE_S = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """A plan: so many lanes, in each of which a task takes `factor` times what it takes in a narrow one."""

    lanes: int
    factor: float


@dataclass(frozen=True, slots=True)
class Move:
    """Another load from the first window on that begins so long after the trial did; when that is told."""

    after_s: float
    load: float
    told_after_s: float  # after the move; infinite: never


NARROW, WIDE_LANE = Shape(2, 1.0), Shape(1, WIDE)
MEAN_S = sum(SHARES[name] * SERVICE_S[name] for name in SERVICE_S)
CAPACITY_PER_S = NARROW.lanes / MEAN_S
"""Of two narrow lanes: tasks of the mix."""


class QueueDevice:
    """Arrivals, one queue and the lanes of the plan that runs."""

    def __init__(self, rate_per_s: float, shape: Shape, chance: Random) -> None:
        self.now = 0.0
        self.shape = shape
        self.failed = 0  # no task does
        self.window: WindowCounter | None = None
        self._rate_per_s = rate_per_s
        self._chance = chance
        self._number = 0
        self._arrives_s = chance.expovariate(rate_per_s)
        self._queue: deque[Task] = deque()
        self._running: list[tuple[float, int, Task]] = []  # by when they end
        self._completed = dict.fromkeys(SERVICE_S, 0)
        self._busy_s = 0.0
        self._since_s = 0.0

    # What `WindowCounter` asks the engine's core for

    @property
    def waiting(self) -> bool:
        return bool(self._queue)

    def oldest_age_s(self, now: float) -> float:
        return now - self._queue[0].arrived_s if self._queue else 0.0

    def completed(self) -> Mapping[str, int]:
        return self._completed

    # Time

    def run_until(self, to_s: float) -> None:
        """Let things happen."""
        while True:
            ends_s = self._running[0][0] if self._running else math.inf
            at_s = min(ends_s, self._arrives_s)
            if at_s > to_s:
                break
            self.now = at_s
            if ends_s <= self._arrives_s:
                self._end()
            else:
                self._arrive()
            self._launch()
            if self.window is not None:
                self.window.saturated = self.window.saturated and bool(self._queue)
        self.now = max(self.now, to_s)

    def load(self, load: float) -> None:
        """So many tasks come from the next one on."""
        self._rate_per_s = load * CAPACITY_PER_S

    def activate(self, shape: Shape) -> None:
        """Launch into this plan, and return once what runs on the other one has ended."""
        self.run_until(self.now + _SWAP_S)
        of_other = {number for _, number, _ in self._running}
        self.shape = shape
        self._launch()
        while of_other & {number for _, number, _ in self._running}:
            self.run_until(self._running[0][0])

    def measure(self, from_s: float, to_s: float) -> WindowFigures:
        """What happens between these instants."""
        self.run_until(from_s)
        core = cast(EngineCore, self)
        self.window = counter = WindowCounter.begin(core, None, self._busy(), self.now, to_s)
        self.run_until(to_s)
        self.window = None
        waiting = [*self._queue, *(task for _, _, task in self._running)]
        seen = counter.end(0, core, self._busy(), self.now, waiting)
        return window_figures(seen, tuple(SERVICE_S))

    def _busy(self) -> float:
        return self._busy_s + (self.now - self._since_s if self._running else 0.0)

    def _arrive(self) -> None:
        chance = self._chance
        (model,) = chance.choices(list(SHARES), list(SHARES.values()))
        allowed_s = max(DEADLINES * SERVICE_S[model], _MIN_DEADLINE_S)
        self._number += 1
        task = Task(id=TaskId(self._number), models=(model,), nbytes=0, deadline_s=self.now + allowed_s)
        task.arrived_s = self.now
        self._queue.append(task)
        self._arrives_s = self.now + chance.expovariate(self._rate_per_s)

    def _launch(self) -> None:
        while self._queue and len(self._running) < self.shape.lanes:
            task = self._queue.popleft()
            if self.window is not None:
                self.window.oldest_age_s = max(self.window.oldest_age_s, self.now - task.arrived_s)
            typical_s = SERVICE_S[task.models[0]] * self.shape.factor
            if self.now + typical_s > task.deadline_s:
                self._told(task, Outcome.EXPIRED)
                continue
            if not self._running:
                self._since_s = self.now
            taken_s = typical_s * math.exp(self._chance.gauss(0.0, _SPREAD))
            heapq.heappush(self._running, (self.now + taken_s, task.id, task))

    def _end(self) -> None:
        _, _, task = heapq.heappop(self._running)
        if not self._running:
            self._busy_s += self.now - self._since_s
        if self.now >= task.deadline_s:
            self._told(task, Outcome.EXPIRED)
            return
        self._completed[task.models[0]] += 1
        self._told(task, Outcome.COMPLETED)

    def _told(self, task: Task, outcome: Outcome) -> None:
        if self.window is not None:
            self.window.task_ended(task, outcome, self.now)


def try_under_load(
    seed: int,
    load: float,
    control: Shape,
    candidate: Shape,
    config: TrialConfig | None = None,
    move: Move | None = None,
) -> TrialResult:
    """One trial at `load` times the capacity of two narrow lanes, on a device that has served for a while."""
    device = QueueDevice(load * CAPACITY_PER_S, control, Random(f"arrivals {seed}"))
    device.run_until(5.0)
    service_s = tuple(seconds * control.factor for seconds in SERVICE_S.values())
    setup = TrialSetup(
        record=TrialRecord(candidate=Digest("c"), control=Digest("i"), environment="simulated", began_us=0),
        models=tuple(SERVICE_S),
        service_s=service_s,
        instance_s=service_s,
        control_bytes=1,
        candidate_bytes=1,
        memory_bytes=2,
        arrivals_per_s=tuple(load * CAPACITY_PER_S * share for share in SHARES.values()),
    )
    core = TrialCore(setup, Random(seed), config)
    shapes = {Side.CONTROL: control, Side.CANDIDATE: candidate}
    began_s, moved_s = device.now, math.inf
    todo = core.begin(device.now)
    while True:
        if move is not None and moved_s == math.inf and device.now - began_s >= move.after_s:
            moved_s = device.now
            device.load(move.load)
        if move is not None and device.now - moved_s >= move.told_after_s:
            core.arrivals_moved(moved_s)
            move = None
        action, *todo = todo
        if isinstance(action, Decide):
            return action.result
        if isinstance(action, MeasureSide):
            figures = device.measure(action.from_s, action.to_s)
            todo += core.window_ended(action.window, figures, device.now)
        elif isinstance(action, SaveRecord):
            device.run_until(device.now + _DISK_S)
            todo += core.recorded(device.now)
        else:
            device.activate(shapes[action.side])
            core.activated(device.now)
            todo += core.settled(device.now)
