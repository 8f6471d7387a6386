"""What answers a trigger on the device: the policy's plan if there is one, the plain one as the next best."""

from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from edge_agent.alarms import Fired
from edge_agent.background import Background
from edge_agent.link.events import PlansMade, RunnablePlan
from edge_agent.local_plans import plain_plan
from edge_agent.policy import PolicyAnswer, PolicyDesk
from edge_agent.status import PolicyStatus
from shared.ids import Digest


class LocalPlanner:
    """The main loop's side of the policy; the policy itself is asked on the background's thread."""

    def __init__(
        self,
        background: Background,
        desk: PolicyDesk,
        tell: Callable[[PlansMade], None],
        note: Callable[[str, str], None],
    ) -> None:
        self.status: PolicyStatus | None = None
        self._background = background
        self._desk = desk
        self._tell = tell
        self._note = note
        self._holds = False
        self._newest: Digest | None = None  # plan that the policy made

    def load(self, path: Path) -> None:
        """Take the policy in a file; the status says what came of it."""
        self._background.run(lambda: self._desk.load(path), self._loaded)

    def fired(self, fired: Fired, running: RunnablePlan | None) -> None:
        """A trigger fired; the link is told what to run instead, at once where no policy has to be asked."""
        plain = plain_plan(fired, running)
        if running is None or not self._holds:
            self._offer(plain)
            return
        self._background.run(
            lambda: self._desk.plan(fired, running), lambda answer: self._answered(answer, plain)
        )

    def activated(self, digest: Digest) -> None:
        """A plan runs; say so if the policy made it."""
        if digest == self._newest:
            self._note("policy_plan", f"plan {digest[:12]} of the learned policy is active")

    def _loaded(self, found: PolicyStatus) -> None:
        self.status, self._holds = found, not found.refused
        if found.refused:
            self._note("policy_refused", f"policy {found.digest[:12]}: {found.refused}")

    def _answered(self, answer: PolicyAnswer, plain: RunnablePlan | None) -> None:
        if self.status is not None:
            if answer.refused and answer.refused != self.status.refused:
                self._note("policy_refused", f"policy {self.status.digest[:12]}: {answer.refused}")
            self.status = structs.replace(self.status, refused=answer.refused)
        if answer.plan is not None:
            self._newest = answer.plan.ref.digest
        self._offer(answer.plan, plain)

    def _offer(self, *plans: RunnablePlan | None) -> None:
        self._tell(PlansMade(tuple(one for one in plans if one is not None)))
