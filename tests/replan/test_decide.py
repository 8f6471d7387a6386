"""What a re-plan proposes and which proposal it pushes, on graphs whose costs are known exactly."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from stageloom.planner.cluster.interface import search
from stageloom.planner.replan.compare import block_pairs, drift
from stageloom.planner.replan.decide import by_regime, by_return, decide, without_search
from stageloom.planner.replan.levers import by_deadline
from stageloom.planner.replan.policy import How, Observation, PlainPolicy, Proposal
from stageloom.planner.replan.predict import keeps_up, predict, serves
from stageloom.planner.schema.explanation import EvaluationVerdict
from stageloom.shared.ids import DeviceId, OpId
from stageloom.shared.messages.telemetry import GroupSpan, StepTrace
from stageloom.shared.plan import Plan, QueueRule, StepChoice, Wait
from stageloom.shared.policy.plain import Load
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.compose import Combination, ModelChoice, compose
from stageloom.shared.search.costs import CostTable, MeasuredStage, fitted, samples
from stageloom.shared.search.job import SearchJob, run_search
from tests.search.graphs import CHAIN, DIAMOND, model

LEFT, RIGHT = model("left", DIAMOND, cuts=[1, 3]), model("right", CHAIN, cuts=[2])
GRAPHS = dict([LEFT, RIGHT])
RATES = DeviceRates(barrier_s=0.0)
SECOND_EACH = CostTable(
    measured_s={
        (artifact, OpId(op)): 1.0 for artifact, graph in (LEFT, RIGHT) for op in range(len(graph.operators))
    },
    rates=RATES,
)
LOADS = (
    Load(model="left", arrivals_per_s=0.1, service_s=4.0, queued=3),
    Load(model="right", arrivals_per_s=0.1, service_s=4.0, queued=0),
)


def plan_of(scheduler: str = "sequential", combination: Combination = Combination.ALONE) -> Plan:
    choices = [
        ModelChoice(name="left", artifact=LEFT[0], graph=LEFT[1]),
        ModelChoice(name="right", artifact=RIGHT[0], graph=RIGHT[1]),
    ]
    return compose(choices, scheduler=scheduler, combination=combination)


def measured(plan: Plan, seconds: Sequence[float]) -> CostTable:
    """`SECOND_EACH`, and the stages of the plan's first combined block as measured."""
    schedule = plan.combined[0].schedule
    members = ((LEFT[0], 0, len(LEFT[1].operators)),)
    stages = tuple(
        MeasuredStage(members, 1, stage.groups, time)
        for stage, time in zip(schedule.stages, seconds, strict=True)  # type: ignore[union-attr]
    )
    return replace(SECOND_EACH, stages=stages)


def seen(**changes: object) -> Observation:
    base = Observation(
        device=DeviceId("nano"),
        cause="variance",
        incumbent=plan_of(),
        desired=(1, 1),
        loads=LOADS,
        samples=(),
        graphs=GRAPHS,
        costs=SECOND_EACH,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_the_prediction_is_arrivals_times_operator_seconds_where_groups_hinder_each_other_fully() -> None:
    operators = len(LEFT[1].operators) + len(RIGHT[1].operators)
    for scheduler in ("sequential", "greedy"):
        assert predict(plan_of(scheduler), GRAPHS, SECOND_EACH, LOADS).busy == pytest.approx(0.1 * operators)


def test_a_plan_over_another_version_of_a_model_is_illegal_though_it_was_priced_before() -> None:
    artifact, graph = model("left, newer", DIAMOND, cuts=[1, 3])
    older, graphs = plan_of("greedy"), {artifact: graph, RIGHT[0]: RIGHT[1]}
    predict(older, GRAPHS, SECOND_EACH, LOADS)
    models = (replace(older.models[0], artifact=artifact), older.models[1])
    now = seen(incumbent=replace(plan_of(), models=models), graphs=graphs)
    (row,) = decide(now, [Proposal(older, How.REGIME)]).evaluations
    assert row.verdict is EvaluationVerdict.ILLEGAL
    assert by_regime(now, Proposal(older, How.REGIME)) is None


@pytest.mark.promise("plans-were-looked-kept")
def test_a_plan_of_larger_batches_is_priced_by_its_own_batches_not_by_those_that_were_measured() -> None:
    """Measured one task at a time; four take four times as long: a task costs the same under either plan."""
    computing = DeviceRates(flop_per_s=1.0, bytes_per_s=1e18, launch_s=0.0, barrier_s=0.0)
    launching = DeviceRates(flop_per_s=1e18, bytes_per_s=1e18, launch_s=1.0, barrier_s=0.0)
    one = plan_of()
    four = replace(one, models=tuple(replace(model, batch=4) for model in one.models))
    for rates, ratio in ((computing, 1.0), (launching, 0.25)):
        costs = replace(SECOND_EACH, rates=rates)
        alone = predict(one, GRAPHS, costs, LOADS).busy
        assert predict(four, GRAPHS, costs, LOADS).busy == pytest.approx(ratio * alone)


def test_members_run_together_as_often_as_the_slower_one_arrives() -> None:
    """With contention 0 two aligned chains cost the longer one; the rest of the faster one runs alone."""
    free = replace(SECOND_EACH, rates=replace(RATES, contention=0.0))
    plan = plan_of("greedy", Combination.ALIGNED)
    loads = (replace(LOADS[0], arrivals_per_s=0.3), LOADS[1])
    together = predict(plan, GRAPHS, free, [LOADS[0], LOADS[1]]).busy
    alone = predict(plan, GRAPHS, free, [LOADS[0], replace(LOADS[1], arrivals_per_s=0.0)]).busy
    assert predict(plan, GRAPHS, free, loads).busy == pytest.approx(together + 2 * alone)


def test_a_measured_stage_counts_instead_of_the_formula_and_makes_the_prediction_sure() -> None:
    wide = plan_of("greedy")
    costs = measured(wide, [1.0, 1.1, 1.0])
    found = predict(wide, GRAPHS, costs, [LOADS[0]])
    assert found.busy == pytest.approx(0.1 * 3.1)
    assert not found.measured, "the other model's stages were never measured"


def test_contention_is_fitted_to_measured_stages_once_three_tell() -> None:
    members = ((LEFT[0], 0, 4),)
    stages = (
        MeasuredStage(members, 1, ((0, 1),), 2.0),
        MeasuredStage(members, 1, ((0, 1), (2,)), 2.25),
        MeasuredStage(members, 1, ((1,), (2,)), 1.25),
    )
    two, many = (samples(replace(SECOND_EACH, stages=known), GRAPHS) for known in (stages[:2], stages * 50))
    assert fitted(two, RATES)[0].contention == 1.0
    assert fitted(many, RATES)[0].contention == pytest.approx(0.25, abs=0.05)


def test_a_proven_plan_goes_at_once_only_if_nothing_at_hand_is_predicted_to_cost_less() -> None:
    wide = plan_of("greedy")
    better = seen(costs=measured(wide, [1.0, 1.1, 1.0]), proven=(wide,))
    decision = without_search(better, PlainPolicy().at_once(better))
    assert decision is not None and decision.proposal is not None
    assert decision.proposal.plan.structure == wide.structure
    equal = seen(proven=(wide,))
    assert without_search(equal, PlainPolicy().at_once(equal)) is None


def test_a_proven_plan_is_proposed_at_launch_intervals_that_keep_up_with_the_arrivals() -> None:
    wide = plan_of("greedy")
    slow = replace(wide, models=tuple(replace(one, launch_interval_us=10_000_001) for one in wide.models))
    assert not keeps_up(slow, LOADS)
    proposals = PlainPolicy().at_once(seen(proven=(slow,)))
    (proven,) = [one.plan for one in proposals if one.how is How.PROVEN]
    assert keeps_up(proven, LOADS) and proven.structure == slow.structure


def test_what_was_barred_is_not_pushed_under_other_launch_intervals_either() -> None:
    wide = plan_of("greedy")
    other = replace(wide, models=tuple(replace(one, launch_interval_us=5) for one in wide.models))
    assert other.structure == wide.structure and other.digest != wide.digest
    barred = seen(barred=((wide.digest, wide.structure),))
    decision = decide(barred, [Proposal(other, How.SEARCH, "greedy")])
    assert decision.proposal is None and "did not gain here lately" in decision.reason


def test_a_winner_of_the_library_that_failed_lately_is_not_pushed_again() -> None:
    wide = plan_of("greedy")
    known = Proposal(wide, How.REGIME)
    assert by_regime(seen(), known) is not None
    assert by_regime(seen(barred=((wide.digest, wide.structure),)), known) is None


def test_the_incumbents_own_plan_is_no_proposal_and_the_reason_says_so() -> None:
    decision = decide(seen(), [Proposal(plan_of(), How.SEARCH, "sequential")])
    assert decision.proposal is None and "equal to the plan that runs" in decision.reason


@pytest.mark.promise("plans-were-looked-kept")
def test_every_proposal_is_told_with_what_became_of_it() -> None:
    """1. The same plan as the incumbent. 2. One that was barred. 3. Two that gain, of which one is taken."""
    wide = plan_of("greedy")
    barred = replace(wide, lanes=2)
    best, behind = replace(wide, lanes=3), replace(wide, lanes=4)
    now = seen(costs=measured(wide, [1.0, 1.1, 1.0]), barred=((barred.digest, barred.structure),))
    proposals = [Proposal(one, How.SEARCH, "greedy") for one in (plan_of(), barred, best, behind)]
    decision = decide(now, proposals)
    assert decision.proposal is not None and decision.proposal.plan == best
    told = {one.plan: one for one in decision.evaluations}
    assert [told[one.plan.digest].verdict for one in proposals] == [
        EvaluationVerdict.SAME,
        EvaluationVerdict.BARRED,
        EvaluationVerdict.TAKEN,
        EvaluationVerdict.BEHIND,
    ]
    assert told[best.digest].predicted == decision.predicted == told[behind.digest].predicted
    assert told[plan_of().digest].predicted == 1.0 and told[best.digest].scheduler == "greedy"
    assert {one.serves for one in decision.evaluations} == {serves(wide)}


def test_plans_over_the_same_models_serve_alike_whatever_else_differs() -> None:
    assert serves(plan_of()) == serves(plan_of("greedy", Combination.ALIGNED))
    one = plan_of()
    assert serves(one) != serves(replace(one, models=one.models[:1]))
    renamed = tuple(replace(model, name=f"my-{model.name}") for model in one.models)
    assert serves(one) != serves(replace(one, models=renamed))


@pytest.mark.promise("plans-were-looked-kept")
def test_streams_are_predicted_as_they_run_and_not_as_a_sum() -> None:
    """A diamond of four seconds: its two branches overlap where nothing hinders them."""
    free = replace(SECOND_EACH, rates=replace(RATES, contention=0.0))
    assert predict(plan_of("nimble"), GRAPHS, free, [LOADS[0]]).busy == pytest.approx(0.1 * 3.0)
    assert predict(plan_of("nimble"), GRAPHS, SECOND_EACH, [LOADS[0]]).busy == pytest.approx(0.1 * 4.0)


def test_every_search_of_the_plain_policy_gives_a_legal_plan_over_the_same_models() -> None:
    policy, now = PlainPolicy(), seen()
    jobs = policy.searches(now)
    assert {job.combination for job in jobs} == {Combination.ALONE, Combination.ALIGNED}
    assert sum(job.budget_s or 0.0 for job in jobs) == pytest.approx(now.settings.budget_s)
    found = [(job, search(replace(job, budget_s=None))) for job in jobs]
    for proposal in policy.after(now, found):
        assert predict(proposal.plan, GRAPHS, now.costs, LOADS).busy > 0.0
        assert keeps_up(proposal.plan, LOADS)
        assert [one.name for one in proposal.plan.models] == ["left", "right"]


def test_a_search_with_a_budget_stops_when_the_next_round_would_not_fit() -> None:
    choices = (ModelChoice(name="left", artifact=LEFT[0], graph=LEFT[1]),)
    times = iter([0.0, *(second for n in range(20) for second in (n * 10.0, n * 10.0 + 9.0, n * 10.0 + 9.0))])
    calls: list[float] = []

    def now() -> float:
        calls.append(next(times))
        return calls[-1]

    plan = run_search(SearchJob(models=choices, scheduler="ios", budget_s=20.0), now)
    assert plan == search(SearchJob(models=choices, scheduler="ios"))
    assert calls[-1] <= 20.0


def test_compared_plans_show_what_differs_and_how_far_stages_drifted() -> None:
    control, candidate = plan_of(), plan_of("greedy")
    pairs = {pair.members: pair for pair in block_pairs(control, candidate)}
    assert not pairs["left#0.0"].same and pairs["right#0.0"].same
    spans = (GroupSpan(0, 0, 0, 1_000_000), GroupSpan(1, 0, 0, 900_000), GroupSpan(2, 1, 0, 2_000_000))
    trace = StepTrace(
        candidate.digest[:16], 0, 1, 0, 4_000_000, (*spans, GroupSpan(3, 0, 0, 1_000_000)), whole=True
    )
    drifts = {
        one.stage: one for one in drift(candidate, GRAPHS, SECOND_EACH, [trace]) if not one.combined_block
    }
    assert drifts[1].planned_s == 2.0 and drifts[1].measured_s == 2.0 and drifts[1].drift == 1.0
    assert drift(candidate, GRAPHS, SECOND_EACH, [])[0].measured_s is None


WANTED = tuple(replace(load, deadline_s=20.0) for load in LOADS)


def test_where_nothing_is_known_of_cores_tasks_with_deadlines_get_the_earliest_first_on_trial() -> None:
    """Busy seconds are the same in any order, so that a trial must tell."""
    now = seen(loads=WANTED)
    found = decide(now, PlainPolicy().arranged(now))
    assert found.proposal is not None
    plan = found.proposal.plan
    assert plan.step_choice is StepChoice.DEADLINE and plan.combined == now.incumbent.combined
    assert {(one.queue.rule, one.launch_interval_us) for one in plan.models} == {(QueueRule.DEADLINE, 0)}
    assert (found.proposal.how, found.predicted) == (How.ARRANGED, 1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"loads": LOADS},
        {"incumbent": by_deadline(plan_of())},
        {"incumbent": replace(plan_of(), wait=Wait.ALL)},
    ],
    ids=["no deadlines", "it has that order", "its combined blocks wait"],
)
def test_the_order_is_not_proposed_where_it_would_change_nothing(changes: dict[str, object]) -> None:
    assert PlainPolicy().arranged(seen(**{"loads": WANTED, **changes})) == ()


def test_an_order_that_gained_nothing_is_barred_like_any_plan() -> None:
    tried = by_deadline(plan_of())
    now = seen(loads=WANTED, barred=((tried.digest, tried.structure),))
    assert decide(now, PlainPolicy().arranged(now)).proposal is None


def test_what_ran_until_other_arrivals_came_is_tried_whatever_is_predicted_of_it() -> None:
    """One that costs more busy seconds by the formula; not where it failed lately, is not legal, or runs."""
    dear = replace(plan_of(), lanes=2)
    stages = len(plan_of().combined[0].schedule.stages)  # type: ignore[union-attr]
    here = seen(costs=measured(plan_of(), [0.1] * stages))
    decision = by_return(here, Proposal(dear, How.RETURNING))
    assert decision is not None and decision.proposal is not None and decision.proposal.plan is dear
    assert [row.verdict for row in decision.evaluations] == [EvaluationVerdict.TAKEN]
    barred = replace(here, barred=((dear.digest, dear.structure),))
    assert by_return(barred, Proposal(dear, How.RETURNING)) is None
    illegal = replace(dear, models=tuple(replace(one, cuts=(99,)) for one in dear.models))
    assert by_return(here, Proposal(illegal, How.RETURNING)) is None
    assert by_return(here, Proposal(here.incumbent, How.RETURNING)) is None
    assert by_return(here, None) is None
    assert not decision.at_once, "the device did not tell what its models take"
