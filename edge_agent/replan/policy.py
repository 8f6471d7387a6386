"""A learned policy on the device: read, refused with a reason, asked for a plan when a trigger fires.

For a thread of its own: numpy is imported with the first policy, and to bind a plan takes milliseconds. The
checkpoint comes from elsewhere, so it is bounded and typed before anything is made of it.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stageloom.edge_agent.lifecycle.states import RunnablePlan
from stageloom.edge_agent.replan.alarms import Fired
from stageloom.edge_agent.replan.derived_plans import decoded, runnable
from stageloom.edge_agent.reporting.status import PolicyStatus
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import StageloomError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Plan
from stageloom.shared.policy.plain import TOLERANCE
from stageloom.shared.policy.samples import Sample

if TYPE_CHECKING:
    from stageloom.shared.policy.maddpg.checkpoint import Checkpoint

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
        self._found: Checkpoint | None = None

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

    def _replanned(self, found: "Checkpoint", fired: Fired, before: Plan) -> Plan:
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


def in_order(fired: Fired, models: Sequence[str]) -> tuple[Sample, ...]:
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
