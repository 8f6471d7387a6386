"""A learned policy on the device: read, refused with a reason, asked for a plan when a trigger fires.

For a thread of its own: numpy is imported with the first policy, and to bind a plan takes milliseconds. The
checkpoint comes from elsewhere, so it is bounded and typed before anything is made of it.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import structs

from stageloom.edge_agent.lifecycle.events import ArtifactGone, PlansMade
from stageloom.edge_agent.lifecycle.states import PlanRef, RunnablePlan
from stageloom.edge_agent.loop import Background
from stageloom.edge_agent.replan.alarms import Fired
from stageloom.edge_agent.reporting.status import PolicyStatus
from stageloom.edge_agent.store import ArtifactStore
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import PlanError, StageloomError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import Origin
from stageloom.shared.plan import Plan, decode_plan
from stageloom.shared.policy.plain import TOLERANCE, plain_replan
from stageloom.shared.policy.queues import PolicySample

if TYPE_CHECKING:
    from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint

_log = logging.getLogger(__name__)


DAMAGED: Final = "its bytes have another digest"


@dataclass(frozen=True)
class PolicyAnswer:
    """What the policy says: a plan, none where it would change nothing, or why it has no say."""

    plan: RunnablePlan | None = None
    refused: str = ""


class PolicyRunner:
    """One policy at a time, for one thread."""

    def __init__(self, graph: Callable[[Digest], Graph | None], device_class: Callable[[], str]) -> None:
        self._graph = graph
        self._device_class = device_class
        self._found: MaddpgCheckpoint | None = None

    def load(self, path: Path, digest: Digest | None = None) -> PolicyStatus:
        """Take the policy in a file, if it is one and, where `digest` is given, the one meant."""
        self._found = None
        try:
            raw = _read(path)
            found = digest_bytes([raw])
            if digest is not None and found != digest:
                return PolicyStatus(digest=digest, refused=DAMAGED)
            from stageloom.shared.policy.maddpg.checkpoint import decode

            self._found = decode(raw)
            return PolicyStatus(digest=found)
        except OSError as error:
            return PolicyStatus(digest=digest or "", refused=f"{path} cannot be read: {error.strerror}")
        except StageloomError as error:
            return PolicyStatus(digest=digest or "", refused=str(error))
        except ImportError as error:
            return PolicyStatus(digest=digest or "", refused=f"numpy is not installed: {error}")

    def drop(self) -> None:
        self._found = None

    def refusal(self, running: RunnablePlan) -> str:
        """Why the policy has no say over this plan, as far as that is known before a trigger fires."""
        before = decoded(running)
        if self._found is None or before is None:
            return ""
        from stageloom.shared.policy.maddpg.decide import require_own

        try:
            require_own(self._found.space, before, self._device_class())
        except StageloomError as error:
            return str(error)
        return ""

    def plan(self, fired: Fired, running: RunnablePlan) -> PolicyAnswer:
        """What to run instead of the running plan, from the samples that led to the trigger."""
        before = decoded(running)
        if self._found is None or before is None:
            return PolicyAnswer(refused="there is no policy, or no plan that can be read")
        try:
            made = self._replanned(self._found, fired, before)
        except StageloomError as error:
            return PolicyAnswer(refused=str(error))
        except Exception as error:  # ours; without an answer the plain plan would wait for ever
            _log.exception("the policy cannot be asked")
            return PolicyAnswer(refused=f"it cannot be asked: {type(error).__name__}: {error}")
        return PolicyAnswer() if not differs(made, before) else PolicyAnswer(runnable(made, running))

    def _replanned(self, found: "MaddpgCheckpoint", fired: Fired, before: Plan) -> Plan:
        from stageloom.shared.policy.maddpg.decide import replanned, require_own

        device_class = self._device_class()
        require_own(found.space, before, device_class)  # before its graphs are opened
        artifacts = dict.fromkeys(model.artifact for model in before.models)
        known = {digest: self._graph(digest) for digest in artifacts}
        graphs = {digest: graph for digest, graph in known.items() if graph is not None}
        seen = in_order(fired, [model.name for model in before.models])
        return replanned(
            found.space, found.network, found.book, before, device_class, graphs, seen, fired.loads
        )


def differs(made: Plan, before: Plan) -> bool:
    """Whether a swap is worth it: another structure, or a launch interval that is not much the same."""
    if made.structure != before.structure:
        return True
    pairs = zip(made.models, before.models, strict=True)
    return any(
        abs(new.launch_interval_us - old.launch_interval_us) > TOLERANCE * old.launch_interval_us
        for new, old in pairs
    )


def in_order(fired: Fired, models: Sequence[str]) -> tuple[PolicySample, ...]:
    """The samples with their models in a plan's order; they come in the order of the loads.

    None of them where a model of the plan was not seen: a policy takes what is missing as idle.
    """
    places = {load.model: at for at, load in enumerate(fired.loads)}
    if any(model not in places for model in models):
        return ()
    order = [places[model] for model in models]
    return tuple(
        replace(
            sample,
            progress=tuple(sample.progress[at] for at in order),
            deviation=tuple(sample.deviation[at] for at in order),
        )
        for sample in fired.firing.samples
    )


def _read(path: Path) -> bytes:
    from stageloom.shared.policy.maddpg.checkpoint import MAX_BYTES

    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


_decoded = lru_cache(maxsize=2)(decode_plan)
"""The planner waits for the alarm; what runs is seldom another plan than at the alarm before."""


def decoded(running: RunnablePlan) -> Plan | None:
    """The running plan; None where it cannot be read."""
    try:
        return _decoded(running.wire, running.ref.digest)
    except PlanError as error:
        _log.error("the running plan cannot be read: %s", error)
        return None


def runnable(plan: Plan, running: RunnablePlan) -> RunnablePlan:
    """A plan made from the one that runs, of the same artifacts."""
    return RunnablePlan(PlanRef(plan.digest, Origin.LOCAL), plan.wire, running.artifacts)


def plain_plan(fired: Fired, running: RunnablePlan | None) -> RunnablePlan | None:
    """The running plan with launch intervals for these loads; None where none would change."""
    before = None if running is None else decoded(running)
    if running is None or before is None:
        return None
    plan = plain_replan(before, fired.loads)
    return None if plan is before else runnable(plan, running)


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
