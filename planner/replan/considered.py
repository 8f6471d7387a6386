"""What is kept of a plan that was looked at, whether or not it was taken. Pure."""

from dataclasses import dataclass
from enum import Enum

from stageloom.planner.replan.predict import Prediction
from stageloom.shared.digest import digest_of, digest_to_raw
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Plan


class Verdict(str, Enum):
    """What became of a plan that was looked at."""

    FOUND = "found"  # an operator's search: whoever asked for it decides
    LED = "led"  # the best so far of a tournament, until another one was
    LOST = "lost"  # in a tournament, to the best so far
    TAKEN = "taken"
    BEHIND = "behind"  # another one is predicted to cost less
    SAME = "same"
    BARRED = "barred"
    WORSE = "worse"
    ILLEGAL = "illegal"

    @property
    def sentence(self) -> str:
        """For people."""
        return _SENTENCES[self]


_SENTENCES = {
    Verdict.FOUND: "found by a search",
    Verdict.LED: "was the best so far of a tournament",
    Verdict.LOST: "lost to the best so far of a tournament",
    Verdict.TAKEN: "taken",
    Verdict.BEHIND: "another one was predicted to cost less",
    Verdict.SAME: "equal to the plan that runs",
    Verdict.BARRED: "did not gain here lately",
    Verdict.WORSE: "predicted to cost no less",
    Verdict.ILLEGAL: "not legal any more",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """A plan, and what became of it.

    `busy`: predicted busy device seconds per second, at the arrivals of that moment, or at one task of each
    model a second where there were none; None for a plan that is not legal. `predicted` is that over the
    incumbent's. `measured`: every stage in it was measured by then. `how`: `operator`, `contest`, or a
    proposal's. In a tournament it had these figures on the twin, `judged_at_s` after the start.
    """

    plan: Digest
    serves: Digest
    scheduler: str
    how: str
    verdict: Verdict
    blocks: int
    members_max: int
    busy: float | None
    predicted: float | None
    measured: bool
    search_s: float | None = None
    judged_at_s: float | None = None
    throughput_per_s: float | None = None
    p99_s: float | None = None


def considered(
    plan: Plan,
    verdict: Verdict,
    *,
    scheduler: str,
    how: str,
    prediction: Prediction | None = None,
    predicted: float | None = None,
    search_s: float | None = None,
) -> Considered:
    """The row of a plan."""
    return Considered(
        plan=plan.digest,
        serves=serves(plan),
        scheduler=scheduler,
        how=how,
        verdict=verdict,
        blocks=len(plan.combined),
        members_max=max(len(block.members) for block in plan.combined),
        busy=None if prediction is None else prediction.busy,
        predicted=predicted,
        measured=prediction is not None and prediction.measured,
        search_s=search_s,
    )


def serves(plan: Plan) -> Digest:
    """Digest over the models that a plan runs: plans that can stand in for each other have the same."""
    models = sorted((model.name, digest_to_raw(model.artifact)) for model in plan.models)
    return digest_of([list(model) for model in models])
