"""Which proposal to push, if any. Pure.

Where the device told enough of itself, every candidate and the plan that runs are judged on the same arrivals
(`stageloom.planner.replan.judge`): one is pushed if it is likely to gain 2 %. Elsewhere they are ranked by
predicted busy seconds over the incumbent's; a plan with unmeasured stages may then be pushed although the
formula predicts no gain: the formula is unsure, the trial is not. A measured one must gain.

A proven plan is ahead by as much as a trial would ask it to gain: it need not be tried again.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

from msgspec import structs

from stageloom.planner.replan.judge import LIKELY, TASKS, Judged, chance_of_gain, harms
from stageloom.planner.replan.policy import How, Observation, Proposal, ordered_by_deadline
from stageloom.planner.replan.predict import (
    CostPrediction,
    evaluation_of,
    predict,
)
from stageloom.planner.replan.scene import LoadScene
from stageloom.planner.schema.explanation import EvaluationVerdict, PlanEvaluation
from stageloom.planner.schema.replan import Proposer
from stageloom.shared.errors import PlanError
from stageloom.shared.plan import Plan, StepChoice
from stageloom.shared.search.arrangements import computing_lanes, express_of
from stageloom.shared.text import counted

PROVEN_AHEAD: Final = 0.02  # the gain that a trial asks for
UNSURE: Final = 0.02  # what the formula may be wrong by and the plan is still worth a trial
SAME: Final = 1e-6
KEPT_BY_REGIME: Final = "this load is known here, and the plan that runs won under it"
NOTHING_TO_TRY: Final = "no plan to try: "
"""So begins the reason of a re-plan whose proposals were all looked at in vain."""

NOTHING_BETTER: Final = "a search found nothing better"
"""So begins the remark of a re-plan that pushed the plan that runs with other launch intervals after it."""

FEW_TASKS: Final = 200
"""Of each stream, where the answer must come at once."""

_LAST: Final = 10.0
"""The rank of what was not judged on the alarm's arrivals, where other proposals were: behind those."""


@dataclass(frozen=True, slots=True)
class ReplanDecision:
    """What to push; `proposal` None: nothing, for `reason`. `predicted` is cost over the incumbent's.

    `evaluations` has every proposal that there was, the incumbent's equals included, and where plans were
    judged on the alarm's arrivals the incumbent itself. `judged` then: of the proposal. `at_once`: no trial.
    """

    proposal: Proposal | None
    predicted: float | None
    reason: str
    evaluations: tuple[PlanEvaluation, ...] = ()
    judged: bool = False
    at_once: bool = False


_Judged: TypeAlias = tuple[Proposal, PlanEvaluation, float]
"""A proposal, what it is worth, and the rank of one that is `BEHIND` until one is taken."""


def decide(seen: Observation, proposals: Iterable[Proposal], *, tasks: int = TASKS) -> ReplanDecision:
    """The best proposal that differs from the incumbent, or why there is none.

    `tasks`: of each stream of arrivals that plans are judged on.
    """
    base = predict(seen.incumbent, seen.graphs, seen.costs, seen.loads)
    scene = seen.scene(tasks)
    judge = partial(_judge, seen, base) if scene is None else partial(_weigh, seen, base, scene)
    judged = [judge(proposal) for proposal in proposals]
    runs = [] if scene is None else [_row_of_incumbent(seen, base, scene.base)]
    evaluations = [evaluation for _, evaluation, _ in judged]
    ranked = [
        (rank, at)
        for at, (_, evaluation, rank) in enumerate(judged)
        if evaluation.verdict is EvaluationVerdict.BEHIND
    ]
    if not ranked:
        return ReplanDecision(None, None, _why_none(evaluations), (*evaluations, *runs))
    _, best = min(ranked)
    proposal = judged[best][0]
    taken = evaluations[best] = structs.replace(evaluations[best], verdict=EvaluationVerdict.TAKEN)
    reason = f"{proposal.how.value}: predicted at {taken.predicted:.3f} of the incumbent's cost"
    if scene is not None and taken.chance is not None:
        reason = _why(proposal.plan, taken, scene)
    return ReplanDecision(
        proposal, taken.predicted, reason, (*evaluations, *runs), judged=taken.chance is not None
    )


def by_regime(seen: Observation, known: Proposal | None) -> ReplanDecision | None:
    """What a device's library of regimes says; None where it says nothing, or the plan failed lately.

    Nor where it is not legal, or its cost is unknown.
    """
    if known is None:
        return None
    proposal, row, _ = _judge(seen, predict(seen.incumbent, seen.graphs, seen.costs, seen.loads), known)
    if row.verdict is EvaluationVerdict.SAME:
        return ReplanDecision(None, None, KEPT_BY_REGIME, (row,))
    refused = row.verdict in (EvaluationVerdict.BARRED, EvaluationVerdict.ILLEGAL)
    if refused or row.predicted is None:
        return None
    return _taken(proposal, row, "it won under such arrivals here")


def by_return(
    seen: Observation, proposal: Proposal | None, *, won_here: bool = False
) -> ReplanDecision | None:
    """What ran until other arrivals came, now that they are gone; None where it failed lately.

    Nor where it is not legal, or its cost is unknown. It is tried whatever is predicted: the trial is short,
    and what the device showed of the two plans, it showed under other arrivals. Where a gain is likely it
    runs at once: the plan that took its place has won under arrivals that are gone, and under no others.

    `won_here`: it has won under these as well, over another plan. Then what ran before must win a trial, and
    none that is proven is proposed, as a device runs that without one.
    """
    if proposal is None or (won_here and _is_proven(seen, proposal.plan)):
        return None
    base, scene = predict(seen.incumbent, seen.graphs, seen.costs, seen.loads), seen.scene(TASKS)
    _, row, _ = _judge(seen, base, proposal)
    if row.verdict in (EvaluationVerdict.SAME, EvaluationVerdict.BARRED, EvaluationVerdict.ILLEGAL):
        return None
    if row.predicted is None:
        return None
    why = "it ran here until other arrivals came"
    weighed = row if scene is None else _weigh(seen, base, scene, proposal)[1]
    likely = weighed.chance is not None and weighed.verdict is EvaluationVerdict.BEHIND
    if scene is None or not likely or won_here:
        return _taken(proposal, row, why)
    taken = _taken(proposal, weighed, f"{why}, and {_why(proposal.plan, weighed, scene)}")
    return replace(taken, at_once=True)


def _taken(proposal: Proposal, row: PlanEvaluation, why: str) -> ReplanDecision:
    """A proposal that is pushed without a word of the others."""
    taken = structs.replace(row, verdict=EvaluationVerdict.TAKEN)
    return ReplanDecision(proposal, taken.predicted, f"{proposal.how.value}: {why}", (taken,))


def without_search(
    seen: Observation, proposals: Sequence[Proposal], expected: Proposal | None = None
) -> ReplanDecision | None:
    """The fast path: a proven plan that nothing else at hand is predicted to beat, the incumbent included.

    Or the one that is `expected` to be best, where it is likely to gain under the alarm's own load, and then
    as sure as others are judged later. Where the trained policy alone is asked, its answer, whatever it is.
    """
    if asked_alone(seen, proposals):
        return decide(seen, proposals)
    if expected is None:
        decision = decide(seen, proposals, tasks=FEW_TASKS)
    else:
        decision = decide(seen, [expected, *proposals])
    if decision.proposal is None:
        return None
    how = decision.proposal.how
    return decision if how is How.PROVEN or (how is How.EXPECTED and decision.judged) else None


def asked_alone(seen: Observation, proposals: Iterable[Proposal]) -> bool:
    """Whether nobody is asked but the trained policy, which has a plan."""
    return any(_is_asked_alone(seen, one) for one in proposals)


def rearranged(seen: Observation, proposals: Iterable[Proposal]) -> ReplanDecision | None:
    """A plan that shares the cores otherwise and is likely to gain: then no search is needed either."""
    decision = decide(seen, proposals)
    return decision if decision.proposal is not None and decision.judged else None


def _is_asked_alone(seen: Observation, proposal: Proposal) -> bool:
    return proposal.how is How.LEARNED and seen.settings.proposer is Proposer.LEARNED


def _judge(seen: Observation, base: CostPrediction, proposal: Proposal) -> _Judged:
    """A proposal by itself, by its busy seconds; one that may be pushed is `BEHIND` here."""
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
    barred = _is_barred(seen, plan)
    try:
        found = predict(plan, seen.graphs, seen.costs, seen.loads)
    except PlanError:
        return judged(EvaluationVerdict.BARRED if barred else EvaluationVerdict.ILLEGAL)
    if barred:
        return judged(EvaluationVerdict.BARRED, found)
    predicted = found.busy / base.busy if base.busy > 0.0 else 1.0
    # A trial does no harm: of what an operator asked for, and where busy seconds say nothing of an order.
    tried = _is_asked_alone(seen, proposal) or _is_an_order(seen, plan)
    if other and not tried and predicted > _most(proposal, found.measured and base.measured):
        return judged(EvaluationVerdict.WORSE, found)
    ahead = PROVEN_AHEAD if proposal.how is How.PROVEN else 0.0
    return judged(EvaluationVerdict.BEHIND, found, predicted - ahead)


def _is_an_order(seen: Observation, plan: Plan) -> bool:
    """Whether it is the plan that runs, in the order of its tasks' deadlines."""
    ordered = ordered_by_deadline(seen)
    return ordered is not None and plan.digest == ordered.digest


def _is_proven(seen: Observation, plan: Plan) -> bool:
    return any(one.structure == plan.structure for one in seen.proven)


def _is_barred(seen: Observation, plan: Plan) -> bool:
    other = plan.structure != seen.incumbent.structure
    return any(plan.digest == one or (other and plan.structure == tried) for one, tried in seen.barred)


def _weigh(seen: Observation, base: CostPrediction, scene: LoadScene, proposal: Proposal) -> _Judged:
    """A proposal by itself, on the alarm's arrivals; one that may be pushed is `BEHIND` here.

    What was never measured as it would run has no figures, and is judged by busy seconds. So are launch
    intervals: they say which model goes first where deadlines do not, which the arrivals do not tell.
    """
    by_busy = _judge(seen, base, proposal)
    row = by_busy[1]
    if row.verdict in (EvaluationVerdict.SAME, EvaluationVerdict.ILLEGAL):
        return by_busy
    weighed = scene.weigh(proposal.plan)
    orders = proposal.how is How.INTERVALS and seen.incumbent.step_choice is not StepChoice.DEADLINE
    if weighed is None or orders:
        return proposal, row, _LAST
    chance = chance_of_gain(weighed.log_gain, weighed.error)
    verdict = EvaluationVerdict.BEHIND
    if row.verdict is EvaluationVerdict.BARRED:
        verdict = EvaluationVerdict.BARRED
    elif not _is_asked_alone(seen, proposal):
        if weighed.log_gain <= 0.0 or harms(scene.base, weighed.judged):
            verdict = EvaluationVerdict.WORSE
        elif chance < LIKELY:
            verdict = EvaluationVerdict.UNLIKELY
    predicted = math.exp(-weighed.log_gain)
    figures = _figures(weighed.judged) | {"chance": chance}
    judged = structs.replace(row, verdict=verdict, predicted=predicted, **figures)
    return proposal, judged, predicted - (PROVEN_AHEAD if proposal.how is How.PROVEN else 0.0)


def _row_of_incumbent(seen: Observation, base: CostPrediction, judged: Judged) -> PlanEvaluation:
    return evaluation_of(
        seen.incumbent,
        EvaluationVerdict.SAME,
        scheduler="",
        how="incumbent",
        prediction=base,
        predicted=1.0,
        figures=_figures(judged),
    )


def _figures(judged: Judged) -> dict[str, float]:
    """Those that a record keeps."""
    return {"p50_s": judged.p50_s, "p99_s": judged.p99_s, "share_in_time": judged.share_in_time}


def _most(proposal: Proposal, measured: bool) -> float:
    """The highest predicted cost over the incumbent's that is still worth pushing."""
    if proposal.how is How.PROVEN or measured:
        return 1.0 - SAME
    return 1.0 + UNSURE


def _why(plan: Plan, taken: PlanEvaluation, scene: LoadScene) -> str:
    """What the plan is, and what is predicted of it beside the plan that runs."""
    base = scene.base
    assert taken.share_in_time is not None and taken.p50_s is not None and taken.chance is not None
    found = f"a median of {_ms(taken.p50_s)} predicted where the running plan has {_ms(base.p50_s)}"
    if abs(taken.share_in_time - base.share_in_time) > 0.01:
        found = (
            f"{taken.share_in_time:.0%} in time predicted where the running plan has {base.share_in_time:.0%}"
        )
    return f"{lanes_of(plan)}: {found}; a gain is {taken.chance:.0%} likely"


def lanes_of(plan: Plan) -> str:
    """In a user's words how a plan shares the device."""
    threads = sorted({options.intra_op_threads for options in plan.executors})
    others = "".join(f"{one} or " for one in threads[:-1])
    said = f"{counted(computing_lanes(plan), 'lane')} of {others}{counted(threads[-1], 'thread')}"
    express = [plan.models[model].name for model in sorted(express_of(plan))]
    if express:
        said += (
            f" and an express lane for {express[0] if len(express) == 1 else counted(len(express), 'model')}"
        )
    cut = [f"{model.name} in {counted(model.num_blocks, 'block')}" for model in plan.models if model.cuts]
    batches = [f"{model.name} in batches of {model.batch}" for model in plan.models if model.batch > 1]
    more = [*cut, *batches]
    return ", ".join([said, *more[:3]]) + (f" and {len(more) - 3} more" if len(more) > 3 else "")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _why_none(found: Iterable[PlanEvaluation]) -> str:
    counts = Counter(one.verdict for one in found)
    parts = [f"{counts[one]} {one.sentence}" for one in EvaluationVerdict if counts[one]]
    return NOTHING_TO_TRY + (", ".join(parts) if parts else "nothing was proposed")
