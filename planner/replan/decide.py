"""Which proposal to push, if any. Pure.

Ranked by predicted cost, against the incumbent's. A proven plan is ahead by as much as a trial would ask it
to gain: it need not be tried again. A plan with unmeasured stages may be pushed although the
formula predicts no gain: the formula is unsure, the trial is not. A measured one must gain.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec import structs

from stageloom.planner.replan.policy import How, Observation, Proposal
from stageloom.planner.replan.predict import (
    CostPrediction,
    evaluation_of,
    predict,
)
from stageloom.planner.schema.explanation import EvaluationVerdict, PlanEvaluation
from stageloom.planner.schema.replan import Proposer
from stageloom.shared.errors import PlanError

PROVEN_AHEAD: Final = 0.02  # the gain that a trial asks for
UNSURE: Final = 0.02  # what the formula may be wrong by and the plan is still worth a trial
SAME: Final = 1e-6
KEPT_BY_REGIME: Final = "this load is known here, and the plan that runs won under it"


@dataclass(frozen=True, slots=True)
class ReplanDecision:
    """What to push; `proposal` None: nothing, for `reason`. `predicted` is cost over the incumbent's.

    `evaluation_of` has every proposal that there was, the incumbent's equals included.
    """

    proposal: Proposal | None
    predicted: float | None
    reason: str
    evaluations: tuple[PlanEvaluation, ...] = ()


_Judged: TypeAlias = tuple[Proposal, PlanEvaluation, float]
"""A proposal, what it is worth, and the rank of one that is `BEHIND` until one is taken."""


def decide(seen: Observation, proposals: Iterable[Proposal]) -> ReplanDecision:
    """The best proposal that differs from the incumbent, or why there is none."""
    base = predict(seen.incumbent, seen.graphs, seen.costs, seen.loads)
    judged = [_judge(seen, base, proposal) for proposal in proposals]
    evaluations = [evaluation for _, evaluation, _ in judged]
    ranked = [
        (rank, at)
        for at, (_, evaluation, rank) in enumerate(judged)
        if evaluation.verdict is EvaluationVerdict.BEHIND
    ]
    if not ranked:
        return ReplanDecision(None, None, _why_none(evaluations), tuple(evaluations))
    _, best = min(ranked)
    proposal = judged[best][0]
    taken = evaluations[best] = structs.replace(evaluations[best], verdict=EvaluationVerdict.TAKEN)
    return ReplanDecision(
        proposal,
        taken.predicted,
        f"{proposal.how.value}: predicted at {taken.predicted:.3f} of the incumbent's cost",
        tuple(evaluations),
    )


def by_regime(seen: Observation, known: Proposal | None) -> ReplanDecision | None:
    """What a device's library of regimes says; None where it says nothing, or the plan is not legal."""
    if known is None:
        return None
    proposal, row, _ = _judge(seen, predict(seen.incumbent, seen.graphs, seen.costs, seen.loads), known)
    if row.verdict is EvaluationVerdict.SAME:
        return ReplanDecision(None, None, KEPT_BY_REGIME, (row,))
    if row.verdict is EvaluationVerdict.ILLEGAL or row.predicted is None:
        return None
    taken = structs.replace(row, verdict=EvaluationVerdict.TAKEN)
    reason = f"{known.how.value}: it won under such arrivals here"
    return ReplanDecision(proposal, taken.predicted, reason, (taken,))


def without_search(seen: Observation, proposals: Iterable[Proposal]) -> ReplanDecision | None:
    """The fast path: a proven plan that nothing else at hand is predicted to beat, the incumbent included.

    Where the trained policy alone is asked, its plan: then no search is needed.
    """
    decision = decide(seen, proposals)
    if decision.proposal is not None and (
        decision.proposal.how is How.PROVEN or _is_asked_alone(seen, decision.proposal)
    ):
        return decision
    return None


def _is_asked_alone(seen: Observation, proposal: Proposal) -> bool:
    return proposal.how is How.LEARNED and seen.settings.proposer is Proposer.LEARNED


def _judge(seen: Observation, base: CostPrediction, proposal: Proposal) -> _Judged:
    """A proposal by itself; one that may be pushed is `BEHIND` here."""
    plan, incumbent = proposal.plan, seen.incumbent.structure
    other = plan.structure != incumbent

    def judged(verdict: EvaluationVerdict, found: CostPrediction | None = None, rank: float = 0.0) -> _Judged:
        over = None if found is None else found.busy / base.busy if base.busy > 0.0 else 1.0
        row = evaluation_of(
            plan,
            verdict,
            scheduler=proposal.scheduler,
            how=proposal.how.value,
            prediction=found,
            predicted=over,
        )
        return proposal, row, rank

    if plan.digest == seen.incumbent.digest:
        return judged(EvaluationVerdict.SAME, base)
    barred = any(plan.digest == one or (other and plan.structure == tried) for one, tried in seen.barred)
    try:
        found = predict(plan, seen.graphs, seen.costs, seen.loads)
    except PlanError:
        return judged(EvaluationVerdict.BARRED if barred else EvaluationVerdict.ILLEGAL)
    if barred:
        return judged(EvaluationVerdict.BARRED, found)
    predicted = found.busy / base.busy if base.busy > 0.0 else 1.0
    asked = _is_asked_alone(seen, proposal)  # an operator asked for it to be tried; a trial does no harm
    if other and not asked and predicted > _most(proposal, found.measured and base.measured):
        return judged(EvaluationVerdict.WORSE, found)
    ahead = PROVEN_AHEAD if proposal.how is How.PROVEN else 0.0
    return judged(EvaluationVerdict.BEHIND, found, predicted - ahead)


def _most(proposal: Proposal, measured: bool) -> float:
    """The highest predicted cost over the incumbent's that is still worth pushing."""
    if proposal.how is How.PROVEN or measured:
        return 1.0 - SAME
    return 1.0 + UNSURE


def _why_none(found: Iterable[PlanEvaluation]) -> str:
    counts = Counter(one.verdict for one in found)
    parts = [f"{counts[one]} {one.sentence}" for one in EvaluationVerdict if counts[one]]
    return "no plan to try: " + (", ".join(parts) if parts else "nothing was proposed")
