"""How one device is re-planned."""

from dataclasses import asdict, dataclass
from typing import Any

from stageloom.shared.ids import Digest
from stageloom.shared.messages.admin import Proposer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanSettings:
    """On by default: a re-plan can do no harm, since its plan must win a trial before it is believed."""

    enabled: bool = True
    scheduler: str = "ios"
    members_max: int = 2  # H: blocks per combined block at most
    budget_s: float = 10.0  # for the searches of one re-plan: the best found so far is proposed
    proposer: Proposer = Proposer.ALL
    attach: bool = True  # send the trained policy that fits a pushed plan along, where the device may use it

    def fields(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What is kept about a plan that a re-plan pushed."""

    structure: Digest  # the plan but for its launch intervals
    how: str
    predicted: float | None  # predicted cost over the incumbent's
    remark: str = ""  # what went into the decision beside the plans
    policy: Digest | None = None  # the trained policy that fits the plan
