"""What is known of the present engine process: which plans it holds, which one runs. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from stageloom.edge_agent.link.events import RunnablePlan
from stageloom.edge_agent.plans.actions import Action, DrainEngine, SwapTo, UnloadPlan
from stageloom.edge_agent.worker.messages import PlanTooLarge
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
    asked: PlanKey | None = None  # the last one that was asked to run
    freed: set[PlanKey] = field(default_factory=set)  # being freed, or freeing itself
    active: PlanKey | None = None
    draining: bool = False  # told to launch nothing until the next swap
    stale: bool = False  # a plan did not load while none ran: one that has found no GPU once never finds one
    first_load: tuple[PlanKey, float] | None = None  # plans load in turn: whose turn it is, and since when

    def key_of(self, digest: Digest, plans: dict[PlanKey, RunnablePlan]) -> PlanKey | None:
        """The newest key under which one of `plans` is this one."""
        return next((key for key, plan in reversed(plans.items()) if plan.ref.digest == digest), None)

    @property
    def running(self) -> RunnablePlan | None:
        """The plan that runs."""
        return None if self.active is None else self.loaded.get(self.active)

    def holds(self, digest: Digest) -> bool:
        """It is loaded, or about to be."""
        return self.key_of(digest, {**self.loading, **self.loaded}) is not None

    def swap_to(self, key: PlanKey, *, keep: bool) -> list[Action]:
        """Launch into this plan, which also ends a drain; nothing where it was asked for already."""
        before = self.asked
        if before == key and not self.draining:
            return []
        if before is not None and before != key and not keep:
            self.freed.add(before)
        self.asked, self.draining = key, False
        self.freed.discard(key)
        return [SwapTo(key, keep)]

    def drain(self) -> list[Action]:
        """Launch nothing until the next swap."""
        if self.draining:
            return []
        self.draining = True
        return [DrainEngine()]

    def unload(self, keys: Iterable[PlanKey]) -> list[Action]:
        """Free these, unless they are being freed."""
        unwanted = [key for key in keys if key not in self.freed]
        self.freed.update(unwanted)
        return [UnloadPlan(key) for key in unwanted]

    def released(self, key: PlanKey) -> None:
        """It is freed: there is more room."""
        self.loaded.pop(key, None)
        self.stated_bytes.pop(key, None)
        self.freed.discard(key)
        self.crowded.clear()
        if self.active == key:
            self.active = None
        if self.asked == key:
            self.asked = None
