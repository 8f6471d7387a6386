"""The lifecycle core without sockets, clocks, files or a plan manager, for tests event by event."""

from typing import Any

from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle.core import Lifecycle
from stageloom.edge_agent.lifecycle.session import LinkConfig
from stageloom.edge_agent.lifecycle.states import LinkState, PlanRef, RunnablePlan
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import Digest
from stageloom.shared.messages import control
from stageloom.shared.messages.control import ArtifactNeed, Desired, DeviceState, Origin
from tests.lifecycle import orders

NEED = ArtifactNeed("m", digest_bytes([b"artifact"]), 8)
GOOD = RunnablePlan(PlanRef(digest_bytes([b"good"]), Origin.PLANNER), b"good", ())


def desired(generation: int, plan: bytes = b"plan", *, epoch: int = 1, **fields: Any) -> Desired:
    return Desired(epoch=epoch, generation=generation, plan_digest=digest_bytes([plan]), plan=plan, **fields)


class Driver:
    """A core whose writes reach the disk unless `full`."""

    def __init__(self, state: LinkState | None = None, *, boot: bool = True) -> None:
        plans: Any = orders.RecordingPlans()
        self.core = Lifecycle(state or LinkState(), config=LinkConfig(boot=11), plans=plans)
        self.now_s = 0.0
        self.full = False
        self.disk = state or LinkState()
        if boot:
            self.booted = self.boot()

    def boot(self, present: frozenset[Digest] = frozenset()) -> list[Any]:
        self.core.boot("env", present, 0.0)
        return self.run()

    def run(self) -> list[Any]:
        actions: list[Any] = []
        while (action := self.core.next(self.now_s)) is not None:
            if isinstance(action, ev.Persist):
                if self.full:
                    self.core.persist_failed("disk full", self.now_s)
                    continue
                self.disk = action.state
                self.core.persisted(action.state)
            elif isinstance(action, ev.Hold):
                self.core.held(action.state)
            if not isinstance(action, ev.CollectArtifacts):
                actions.append(action)
        return actions

    def do(self, event: Any, *, after_s: float = 0.0) -> list[Any]:
        self.now_s += after_s
        orders.happen(self.core, event, self.now_s)
        return self.run()

    def online(self) -> "Driver":
        self.do(ev.Connected())
        welcome = control.Welcome(device="d", epoch=1, heartbeat_interval_s=1.0, bulk_credits=4)  # type: ignore[arg-type]
        self.do(ev.Received(welcome))
        return self

    def stored(self) -> DeviceState | None:
        """The state on disk."""
        return self.disk.state

    @property
    def state(self) -> DeviceState | None:
        return self.core.state.state

    def to_probation(self, generation: int = 1, plan: bytes = b"plan") -> list[ev.Action]:
        self.do(ev.Received(desired(generation, plan)))
        self.do(orders.PlanVerified((1, generation)))
        return self.do(ev.PlanStaged((1, generation)))


def kinds(actions: list[ev.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]
