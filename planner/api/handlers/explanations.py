"""What is told of plans beyond what they are: why, and how the plans of a trial compare."""

from concurrent.futures import Future

from stageloom.planner.api import routes
from stageloom.planner.api.context import ApiCall, ApiContext, handles
from stageloom.planner.schema.explanation import PlanExplainRequest, PlanExplanation
from stageloom.planner.schema.trial import TrialCompareRequest, TrialComparison


@handles(routes.PLAN_EXPLAIN)
def plan_explain(
    api: ApiContext, request: PlanExplainRequest, call: ApiCall
) -> "PlanExplanation | Future[PlanExplanation]":
    from stageloom.planner.explain.plan import explain  # all of the search, which few requests need

    return api.apart(explain, request.plan, request.device)


@handles(routes.TRIAL_COMPARE)
def trial_compare(
    api: ApiContext, request: TrialCompareRequest, call: ApiCall
) -> "TrialComparison | Future[TrialComparison]":
    from stageloom.planner.replan.compare import trial_comparison

    return api.apart(trial_comparison, request.device, request.generation)
