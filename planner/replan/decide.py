"""Which proposal to push, if any. Pure.

Ranked by predicted cost, against the incumbent's. A proven plan is ahead by as much as a trial would ask it
to gain: it need not be tried again. A plan that holds stages nobody measured may be pushed although the
formula sees no gain in it: the formula is unsure, the trial is not. A measured one must gain.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from planner.replan.observation import Observation
from planner.replan.policy import How, Proposal
from planner.replan.predict import predict
from shared.errors import PlanError

PROVEN_AHEAD: Final = 0.02  # the gain that a trial asks for
UNSURE: Final = 0.02  # what the formula may be wrong by and the plan is still worth a trial
SAME: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Decision:
    """What to push; `proposal` None: nothing, for `reason`. `predicted` is cost over the incumbent's."""

    proposal: Proposal | None
    predicted: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class _Ranked:
    proposal: Proposal
    predicted: float
    rank: float


def decide(seen: Observation, proposals: Iterable[Proposal]) -> Decision:
    """The best proposal that differs from the incumbent, or why there is none."""
    ranked, counts = _ranked(seen, proposals)
    if not ranked:
        return Decision(None, None, _why_none(counts))
    best = min(ranked, key=lambda one: one.rank)
    cost = f"predicted at {best.predicted:.3f} of the incumbent's cost"
    return Decision(best.proposal, best.predicted, f"{best.proposal.how.value}: {cost}")


def proven_at_once(seen: Observation, proposals: Iterable[Proposal]) -> Decision | None:
    """The fast path: a proven plan that nothing else at hand is predicted to beat, the incumbent included."""
    decision = decide(seen, proposals)
    if decision.proposal is not None and decision.proposal.how is How.PROVEN:
        return decision
    return None


def _ranked(seen: Observation, proposals: Iterable[Proposal]) -> tuple[list[_Ranked], dict[str, int]]:
    counts = {"same": 0, "barred": 0, "worse": 0, "illegal": 0}
    incumbent = seen.incumbent.structure
    base = predict(seen.incumbent, seen.graphs, seen.costs, seen.loads)
    plans = {plan for plan, _ in seen.barred}
    structures = {structure for _, structure in seen.barred}
    ranked: list[_Ranked] = []
    for proposal in proposals:
        structure = proposal.plan.structure
        if proposal.plan.digest == seen.incumbent.digest:
            counts["same"] += 1
            continue
        if proposal.plan.digest in plans or (structure != incumbent and structure in structures):
            counts["barred"] += 1
            continue
        try:
            found = predict(proposal.plan, seen.graphs, seen.costs, seen.loads)
        except PlanError:
            counts["illegal"] += 1
            continue
        predicted = found.busy / base.busy if base.busy > 0.0 else 1.0
        if structure != incumbent and predicted > _most(proposal, found.measured and base.measured):
            counts["worse"] += 1
            continue
        ahead = PROVEN_AHEAD if proposal.how is How.PROVEN else 0.0
        ranked.append(_Ranked(proposal, predicted, predicted - ahead))
    return ranked, counts


def _most(proposal: Proposal, measured: bool) -> float:
    """The highest predicted cost over the incumbent's that is still worth pushing."""
    if proposal.how is How.PROVEN or measured:
        return 1.0 - SAME
    return 1.0 + UNSURE


def _why_none(counts: dict[str, int]) -> str:
    said = {
        "same": "equal to the plan that runs",
        "barred": "did not gain here lately",
        "worse": "predicted to cost no less",
        "illegal": "not legal any more",
    }
    parts = [f"{count} {said[name]}" for name, count in counts.items() if count]
    return "no plan to try: " + (", ".join(parts) if parts else "nothing was proposed")
