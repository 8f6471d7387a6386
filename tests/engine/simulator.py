"""A seeded simulator: random plans, arrivals, cancels, deadlines, failures, swaps and drains on one core."""

from collections.abc import Callable
from heapq import heappop, heappush
from random import Random

from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import (
    Action,
    PlanKey,
    Task,
)
from stageloom.shared.ids import TaskId
from stageloom.shared.plan import Wait
from tests.engine.audit import SpyCore
from tests.engine.generate import Library, random_library, random_plan
from tests.engine.memory import Wrong
from tests.engine.played import PlayedEngine, Tally

MAX_EVENTS = 60_000


class Scenario:
    """One run.

    To plant a defect `spoil` alters each action before it is carried out, `misread` what the core is told of
    a plan; `check_after=False` leaves it to the device's memory alone to notice a missing dependency.
    """

    def __init__(
        self,
        seed: int,
        *,
        spoil: Callable[[Action], Action] | None = None,
        misread: Callable[[BoundPlan], BoundPlan] | None = None,
        check_after: bool = True,
        engine: type[PlayedEngine] = PlayedEngine,
    ) -> None:
        self.random = Random(seed)
        self.library: Library = random_library(self.random)
        self.core = SpyCore(
            max_preparing=self.random.randint(1, 3), max_programs=self.random.choice([8, 1000])
        )
        self.engine = engine(self.random, self.core, self.at, spoil=spoil, check_after=check_after)
        self._misread = misread
        self._events: list[tuple[float, int, Callable[[], list[Action]]]] = []
        self._sequence = 0
        self._next_key = 0
        self._active: PlanKey | None = None
        self._waiting_plan: PlanKey | None = None
        self._drained_swap = False
        self.engine.failure_rate = self.random.choice([0.0, 0.0, 0.03])
        self._load = self.random.choice([0.3, 1.0, 3.0, 10.0])

    def at(self, delay_s: float, event: Callable[[], list[Action]]) -> None:
        """Let something happen later."""
        self._sequence += 1
        heappush(self._events, (self.engine.now + delay_s, self._sequence, event))

    # The course of a scenario

    def run(self, tasks: int = 60, swaps: int = 3) -> Tally:
        """Play it to the end and check that nothing is left."""
        self._perform(self._load_plan())
        self._perform(self._activate())
        when = 0.0
        for number in range(tasks):
            when += self.random.expovariate(1.0) * 1e-3 / self._load
            self.at(when, lambda number=number: self._submit(number))  # type: ignore[misc]
        for _ in range(self.random.randint(0, swaps)):
            self.at(self.random.uniform(0, when), self._begin_swap)
        self._play()
        self._finish()
        return self.engine.tally

    def _play(self) -> None:
        for _ in range(MAX_EVENTS):
            wakeup = self.core.next_wakeup(self.engine.now)
            due = self._events[0][0] if self._events else None
            if due is None and wakeup is None:
                return
            if wakeup is not None and (due is None or wakeup <= due):
                self.engine.now = max(self.engine.now, wakeup)
                self._perform(self.core.tick(self.engine.now))
            else:
                self.engine.now, _, event = heappop(self._events)
                self._perform(event())
        raise Wrong("the scenario never ends")

    def _finish(self) -> None:
        """After all that was to happen: shut down, and look for anything left."""
        (plan,) = self.core.plans
        open_tasks = set(self.engine.tasks) - set(self.engine.ended)
        if plan.wait is Wait.ALL:
            self.core.audit_stand_still()
        else:
            assert not open_tasks, f"tasks {sorted(open_tasks)} never end"
        self._perform(self.core.drain(self.engine.now, refuse=True))
        self._play()
        assert set(self.engine.tasks) == set(self.engine.ended)
        assert self.core.idle
        stats = self.core.snapshot(self.engine.now)
        assert stats.open_tasks == stats.instances == sum(stats.lane_loads) == 0
        assert stats.submitted == stats.ended.total == len(self.engine.tasks)
        for key in stats.loaded:
            self._perform(self.core.unload(key, self.engine.now))
        assert not self.engine.device.plans
        assert not self.engine.device.live

    # Events

    def _load_plan(self) -> list[Action]:
        key = PlanKey(self._next_key)
        self._next_key += 1
        bound = random_plan(self.random, self.library)
        self.engine.device.load(key, bound)
        self._waiting_plan = key
        return self.core.load(key, self._misread(bound) if self._misread else bound, self.engine.now)

    def _activate(self) -> list[Action]:
        assert self._waiting_plan is not None
        self._active, self._waiting_plan = self._waiting_plan, None
        return self.core.activate(self._active, self.engine.now)

    def _begin_swap(self) -> list[Action]:
        """A new plan beside the old one, one that is given up, back and forth, or a drain first."""
        if self._waiting_plan is not None or self._drained_swap:
            return []
        self.engine.tally.swaps += 1
        kind = self.random.choice(["beside", "beside", "beside", "given up", "drained", "pause"])
        if kind == "pause":
            self.at(self.random.uniform(0, 5e-3), self._resume)
            self._drained_swap = True
            return self.core.drain(self.engine.now)
        if kind == "drained":
            self._drained_swap = True
            self.at(1e-3, self._poll_drained)
            return self.core.drain(self.engine.now)
        key = PlanKey(self._next_key)
        actions = self._load_plan()
        if kind == "given up":
            self._waiting_plan = None
            self.at(1e-3, lambda: self.core.unload(key, self.engine.now))
        else:
            self.at(self.random.uniform(0, 2e-3), self._activate)
        return actions

    def _resume(self) -> list[Action]:
        self._drained_swap = False
        assert self._active is not None
        return self.core.activate(self._active, self.engine.now)

    def _poll_drained(self) -> list[Action]:
        if not self.core.idle:
            self.at(1e-3, self._poll_drained)
            return []
        assert self._active is not None
        self._perform(self.core.unload(self._active, self.engine.now))
        self._perform(self._load_plan())
        self._drained_swap = False
        return self._activate()

    def _submit(self, number: int) -> list[Action]:
        random = self.random
        names = sorted(set(self.library.names.values()))
        count = random.randint(2, len(names)) if len(names) > 1 and random.random() < 0.25 else 1
        if random.random() < 0.02:
            names.append("nobody knows")
        deadline = self.engine.now + random.uniform(0, 0.03) if random.random() < 0.25 else None
        task = Task(
            id=TaskId(number),
            models=tuple(random.sample(names, k=count)),
            nbytes=random.choice([10, 30, 61]),
            priority=random.randint(0, 2),
            deadline_s=deadline,
        )
        self.engine.tally.shared += count > 1
        if random.random() < 0.15:
            self.at(random.uniform(0, 0.02), lambda: self.core.cancel(task.id, self.engine.now))
        return self.engine.submit(task)

    def _perform(self, actions: list[Action]) -> None:
        self.engine.perform(actions)
        self.core.audit(self.engine.now)
