"""What is known of the present engine process: which plans it holds, which one runs. Pure."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

from stageloom.edge_agent.lifecycle.events import Action
from stageloom.edge_agent.lifecycle.states import RunnablePlan
from stageloom.edge_agent.worker.messages import PauseLaunches, PlanTooLarge, SwitchPlan, Unload
from stageloom.shared.backoff import backoff_s
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.ids import Digest


@dataclass
class EngineView:
    """One life of the engine process, by what it has said and what it was told."""

    up: bool = False
    stopping: bool = False
    loading: dict[PlanKey, RunnablePlan] = field(default_factory=dict)
    loaded: dict[PlanKey, RunnablePlan] = field(default_factory=dict)
    stated_bytes: dict[PlanKey, int] = field(default_factory=dict)  # of loaded plans
    memory_bytes: int = 0  # what plans may take together, when the last one was loaded
    crowded: dict[Digest, PlanTooLarge] = field(default_factory=dict)  # fit alone, but not beside the others
    tries: int = 0  # of a load that found no room though no plan was loaded, one after another
    again_s: float = 0.0  # when the next one is due
    asked: PlanKey | None = None  # the last one that was asked to run
    freed: set[PlanKey] = field(default_factory=set)  # being freed, or freeing itself
    active: PlanKey | None = None
    draining: bool = False  # told to launch nothing until the next swap
    kept: bool = False  # the last swap kept the plan before: queues are bounded by the larger of both plans
    stale: bool = False  # a plan did not load while none ran: one that has found no GPU once never finds one
    first_load: tuple[PlanKey, float] | None = None  # plans load in turn: whose turn it is, and since when

    def key_of(self, digest: Digest, plans: dict[PlanKey, RunnablePlan]) -> PlanKey | None:
        """The newest key under which one of `plans` is this one."""
        return next((key for key, plan in reversed(plans.items()) if plan.ref.digest == digest), None)

    @property
    def running(self) -> RunnablePlan | None:
        return None if self.active is None else self.loaded.get(self.active)

    def holds(self, digest: Digest) -> bool:
        """It is loaded, or about to be."""
        return self.key_of(digest, {**self.loading, **self.loaded}) is not None

    def swap_to(self, key: PlanKey, *, keep: bool) -> list[Action]:
        """Launch into this plan, which also ends a drain; nothing where it was asked for already.

        Without `keep` the bounds of its queues hold, too, so it is asked for again where it runs already in
        a window of a trial that has ended.
        """
        before = self.asked
        if before == key and not self.draining and (keep or not self.kept):
            return []
        if before is not None and before != key and not keep:
            self.freed.add(before)
        self.asked, self.draining, self.kept = key, False, keep
        self.freed.discard(key)
        return [SwitchPlan(key, keep)]

    def drain(self) -> list[Action]:
        """Launch nothing until the next swap."""
        if self.draining:
            return []
        self.draining = True
        return [PauseLaunches(refuse=False)]

    def unload(self, keys: Iterable[PlanKey]) -> list[Action]:
        """Free these, unless they are being freed."""
        unwanted = [key for key in keys if key not in self.freed]
        self.freed.update(unwanted)
        return [Unload(key) for key in unwanted]

    def released(self, key: PlanKey) -> None:
        """It is freed: there is more room."""
        self.loaded.pop(key, None)
        self.stated_bytes.pop(key, None)
        self.freed.discard(key)
        self.crowded.clear()
        self.tries = 0
        if self.active == key:
            self.active = None
        if self.asked == key:
            self.asked = None


class Supervisor:
    """Decides about restarts, and remembers which plans crashed the process.

    The first restart is immediate: one crash should cost as little as it can. Each further one waits longer,
    until the process has lived for `stable_s`. A plan under which it crashed `max_crashes` times within
    `window_s` is condemned for the life of the agent.
    """

    def __init__(
        self,
        rng: Random,
        *,
        max_crashes: int = 3,
        window_s: float = 60.0,
        stable_s: float = 30.0,
        first_delay_s: float = 0.5,
        longest_delay_s: float = 30.0,
    ) -> None:
        self.max_crashes = max_crashes
        self.restarts = 0
        self._window_s = window_s
        self._stable_s = stable_s
        self._first_delay_s = first_delay_s
        self._longest_delay_s = longest_delay_s
        self._rng = rng
        self._started_s: float | None = None  # since when the process takes commands
        self._delays: Iterator[float] | None = None
        self._crashes: dict[Digest, deque[float]] = {}
        self._condemned: set[Digest] = set()

    def started(self, now_s: float) -> None:
        self._started_s = now_s

    def crashed(self, plan: Digest | None, now_s: float) -> float:
        """The process ended by itself while `plan` ran or was loaded; returns seconds to wait."""
        self.restarts += 1
        if plan is not None:
            crashes = self._crashes.setdefault(plan, deque())
            crashes.append(now_s)
            while crashes[0] < now_s - self._window_s:
                crashes.popleft()
            if len(crashes) >= self.max_crashes:
                self._condemned.add(plan)
        if self._started_s is not None and now_s - self._started_s >= self._stable_s:
            self._delays = None
        self._started_s = None
        if self._delays is None:
            self._delays = backoff_s(self._rng, first_s=self._first_delay_s, cap_s=self._longest_delay_s)
            return 0.0
        return next(self._delays)

    def pardon(self, plan: Digest) -> None:
        """It was tried again and has outlived its probation: what it did before is forgotten."""
        self._condemned.discard(plan)
        self._crashes.pop(plan, None)

    def condemned(self, plan: Digest) -> bool:
        """It has crashed the engine too often."""
        return plan in self._condemned
