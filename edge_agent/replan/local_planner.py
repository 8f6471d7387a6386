"""What answers a trigger on the device: the policy's plan if there is one, the plain one as the next best."""

from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from stageloom.edge_agent.background import Background
from stageloom.edge_agent.lifecycle.events import ArtifactGone, PlansMade
from stageloom.edge_agent.lifecycle.states import RunnablePlan
from stageloom.edge_agent.replan.alarms import Fired
from stageloom.edge_agent.replan.derived_plans import plain_plan
from stageloom.edge_agent.replan.policy import DAMAGED, PolicyAnswer, PolicyRunner
from stageloom.edge_agent.reporting.status import PolicyStatus
from stageloom.edge_agent.store import ArtifactStore
from stageloom.shared.ids import Digest


class LocalPlanner:
    """The main loop's side of the policy; the policy itself is asked on the background's thread."""

    def __init__(
        self,
        background: Background,
        desk: PolicyRunner,
        tell: Callable[[PlansMade | ArtifactGone], None],
        note: Callable[[str, str], None],
        own: Path | None = None,
    ) -> None:
        """`own`: a policy of this device, for as long as the planner names none."""
        self.status: PolicyStatus | None = None
        self._background = background
        self._desk = desk
        self._tell = tell
        self._note = note
        self._own = own
        self._holds = False
        self._wanted: Digest | None = None  # of the planner's
        self._newest: Digest | None = None  # plan that the policy made
        self._running: RunnablePlan | None = None

    def start(self) -> None:
        """Take the device's own policy, if it has one; the status says what came of it."""
        if self._own is not None and self._wanted is None:
            self._load(self._own, None)

    def use(self, digest: Digest | None, store: ArtifactStore) -> None:
        """The planner names a policy, which lies in the store, or none."""
        self._wanted = digest
        if digest is not None:
            self._load(store.path(digest), digest)
        elif self._own is not None:
            self.start()
        else:
            self._background.run(self._desk.drop, lambda _: None)
            self.status, self._holds = None, False

    def needed(self) -> frozenset[Digest]:
        """What must stay in the store."""
        return frozenset() if self._wanted is None else frozenset((self._wanted,))

    def _load(self, path: Path, digest: Digest | None) -> None:
        def loaded(found: PolicyStatus) -> None:
            if digest != self._wanted:
                return  # another one is on its way
            self._loaded(found)
            if digest is not None and found.refused == DAMAGED:
                path.unlink(missing_ok=True)
                self._tell(ArtifactGone(digest))

        self._background.run(lambda: self._desk.load(path, digest), loaded)

    def fired(self, fired: Fired, running: RunnablePlan | None) -> None:
        """A trigger fired; the link is told what to run instead, at once where no policy has to be asked."""
        plain = plain_plan(fired, running)
        if running is None or not self._holds:
            self._offer(plain)
            return
        self._background.run(
            lambda: self._desk.plan(fired, running), lambda answer: self._answered(answer, plain)
        )

    def activated(self, running: RunnablePlan) -> None:
        """A plan runs; say so if the policy made it, or has no say over it."""
        self._running = running
        digest = running.ref.digest
        if digest == self._newest:
            self._note("policy_plan", f"plan {digest[:12]} of the learned policy is active")
        self._judge()

    def _loaded(self, found: PolicyStatus) -> None:
        self.status, self._holds = found, not found.refused
        if found.refused:
            self._note("policy_refused", f"policy {found.digest[:12]}: {found.refused}")
        self._judge()

    def _judge(self) -> None:
        """Whether the policy is for what runs: better known now than when a trigger fires."""
        running = self._running
        if self._holds and running is not None:
            self._background.run(lambda: self._desk.refusal(running), self._said)

    def _said(self, refused: str) -> None:
        """What the policy says of the running plan: nothing, or why it has no say."""
        if self.status is None:
            return
        if refused and refused != self.status.refused:
            self._note("policy_refused", f"policy {self.status.digest[:12]}: {refused}")
        self.status = structs.replace(self.status, refused=refused)

    def _answered(self, answer: PolicyAnswer, plain: RunnablePlan | None) -> None:
        self._said(answer.refused)
        if answer.plan is not None:
            self._newest = answer.plan.ref.digest
        self._offer(answer.plan, plain)

    def _offer(self, *plans: RunnablePlan | None) -> None:
        self._tell(PlansMade(tuple(one for one in plans if one is not None)))
