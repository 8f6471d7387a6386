"""A trained policy is one proposer among others; where it does not fit it is ignored, and says why."""

from dataclasses import replace

import pytest

from stageloom.planner.replan.decide import decide, without_search
from stageloom.planner.replan.learned import LearnedPolicy
from stageloom.planner.replan.policy import How, Observation, PlainPolicy, ReplanSettings
from stageloom.planner.replan.predict import predict
from stageloom.planner.schema.explanation import EvaluationVerdict
from stageloom.planner.schema.replan import Proposer
from stageloom.shared.digest import digest_bytes
from stageloom.shared.legality import violations
from stageloom.shared.messages.control import AlarmSample
from stageloom.shared.plan import Member, Plan
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, encode
from stageloom.shared.policy.maddpg.decide import Blocks, Book, replanned
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.policy.queues import PolicySample
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.costs import MeasuredStage, Members
from stageloom.shared.search.job import run_block_search
from stageloom.shared.stage_string import to_string
from tests.policy.maddpg.cases import network
from tests.replan.test_decide import GRAPHS, LEFT, LOADS, RIGHT, seen

CLASS = "toy"
INCUMBENT = compose(
    [
        ModelChoice(name=graph.name, artifact=artifact, graph=graph, partition="base")
        for artifact, graph in (LEFT, RIGHT)
    ]
)
SPACE = Space.of(INCUMBENT, CLASS, samples=2)
NETWORK = network(SPACE)
BLOCKS = Blocks(INCUMBENT.models, GRAPHS)
SAMPLES = (AlarmSample((0b101, 0b10), (0.2, -0.2)), AlarmSample((0b000, 0b01), (0.5, -0.5)))


def observed(learned: bytes) -> Observation:
    loads = tuple(
        replace(load, model=model.name) for load, model in zip(LOADS, INCUMBENT.models, strict=True)
    )
    return seen(incumbent=INCUMBENT, loads=loads, samples=SAMPLES, environment=CLASS, learned=learned)


def wanted(book: Book) -> Plan:
    """What the forward pass says, by the code that the agent runs."""
    now = observed(b"")
    samples = (PolicySample(((1, 0, 1), (0, 1)), (0.2, -0.2)), PolicySample(((0, 0, 0), (1, 0)), (0.5, -0.5)))
    return replanned(SPACE, NETWORK, book, INCUMBENT, CLASS, GRAPHS, samples, now.loads)


def test_a_policy_that_fits_proposes_its_plan_beside_the_plain_ones() -> None:
    now = observed(encode(MaddpgCheckpoint(SPACE, NETWORK)))
    plain, proposals = PlainPolicy().at_once(now), LearnedPolicy().at_once(now)
    assert list(proposals[:-1]) == list(plain)
    made, says = proposals[-1], wanted({})
    assert (made.how, made.scheduler) == (How.LEARNED, "maddpg")
    assert [block.members for block in made.plan.combined] == [block.members for block in says.combined]
    assert made.plan.models == says.models
    said = LearnedPolicy().remark(now)
    assert said == f"policy {digest_bytes([now.learned])[:12]} proposed {made.plan.digest[:12]}"
    assert LearnedPolicy().searches(now) == PlainPolicy().searches(now)


def test_samples_are_read_in_the_order_of_the_loads_whatever_the_plans_is() -> None:
    """A device names queues in the order in which it first had them, among them some of models since gone."""
    now = observed(encode(MaddpgCheckpoint(SPACE, NETWORK)))
    gone = replace(now.loads[0], model="gone")
    other = replace(
        now,
        loads=(gone, *reversed(now.loads)),
        samples=tuple(
            AlarmSample((0b1, *reversed(one.progress)), (0.0, *reversed(one.deviations))) for one in SAMPLES
        ),
    )
    assert LearnedPolicy().at_once(other)[-1].plan.models == LearnedPolicy().at_once(now)[-1].plan.models
    renamed = replace(now.loads[1], model="unseen")
    unseen = replace(now, loads=(now.loads[0], renamed))
    assert LearnedPolicy().remark(unseen).endswith(LearnedPolicy().at_once(unseen)[-1].plan.digest[:12])


def test_its_schedules_come_by_digest_and_those_it_lacks_are_searched_for_at_once() -> None:
    """DIAMOND's branches may run side by side: a beam sees that, a missing schedule run in order does not."""
    combined = [block.members for block in wanted({}).combined]
    blocks = Blocks(INCUMBENT.models, GRAPHS)
    slow = {
        blocks.key(members): block.schedule
        for members, block in zip(combined, wanted({}).combined, strict=True)
    }
    brought = LearnedPolicy().at_once(observed(encode(MaddpgCheckpoint(SPACE, NETWORK, slow))))[-1].plan
    assert brought == wanted(slow)
    searched = LearnedPolicy().at_once(observed(encode(MaddpgCheckpoint(SPACE, NETWORK))))[-1].plan
    assert stages(searched) < stages(brought)


def test_a_schedule_of_the_store_is_taken_where_todays_costs_make_it_the_cheaper_one() -> None:
    """1. The policy's own run in order. 2. The store has others, and texts that are no schedule of them.
    3. They are cheaper where groups do not hinder each other, and dearer where the policy's were measured."""
    trained = MaddpgCheckpoint(SPACE, NETWORK)
    book = {BLOCKS.key(b.members): b.schedule for b in wanted({}).combined}
    free = replace(observed(b"").costs, rates=DeviceRates(barrier_s=0.0, contention=0.0))
    searched = proposed(replace(observed(encode(trained)), costs=free))
    found = {BLOCKS.key(b.members): ("no schedule", "7", to_string(b.schedule)) for b in searched.combined}
    now = replace(observed(encode(replace(trained, book=book))), schedules=found, costs=free)
    best, own = (predict(plan, GRAPHS, free, now.loads).busy for plan in (searched, wanted(book)))
    assert predict(proposed(now), GRAPHS, free, now.loads).busy == best < own
    assert LearnedPolicy().missing(now) == ()
    cheap = tuple(
        MeasuredStage(parts_of(block.members), 1, stage.groups, 1e-6)
        for block in wanted(book).combined
        if isinstance(block.schedule, StageSchedule)
        for stage in block.schedule.stages
    )
    assert proposed(replace(now, costs=replace(free, stages=cheap))) == wanted(book)


def proposed(now: Observation) -> Plan:
    proposal = LearnedPolicy().at_once(now)[-1]
    assert proposal.how is How.LEARNED
    return proposal.plan


def parts_of(members: tuple[Member, ...]) -> Members:
    return tuple((artifact, block.start, block.stop) for artifact, _, block in BLOCKS.parts(members))


def test_what_nobody_has_a_schedule_of_is_named_for_a_longer_search_which_finds_none_worse() -> None:
    found = LearnedPolicy()
    now = observed(encode(MaddpgCheckpoint(SPACE, NETWORK)))
    plan = found.at_once(now)[-1].plan
    missing = {(job.combined_block, job.batch): job for job in found.missing(now)}
    assert missing.keys() == {BLOCKS.key(one.members) for one in plan.combined}
    for one in plan.combined:
        job = missing[BLOCKS.key(one.members)]
        assert job.first == one.schedule
        better = run_block_search(job, iter(range(1000)).__next__)
        assert job.costs.schedule_s(better) <= job.costs.schedule_s(job.first)
        assert violations(better, job.graph) == []


def test_a_policy_goes_along_with_plans_that_it_was_trained_for_and_with_no_other() -> None:
    policy, body = LearnedPolicy(), encode(MaddpgCheckpoint(SPACE, NETWORK))
    now = observed(body)
    assert policy.fitting(now, INCUMBENT) == digest_bytes([body])
    whole = replace(INCUMBENT, models=tuple(replace(model, cuts=()) for model in INCUMBENT.models))
    assert policy.fitting(now, whole) is None
    assert policy.fitting(replace(now, environment="another class"), INCUMBENT) is None
    assert policy.fitting(observed(b""), INCUMBENT) is None
    assert policy.fitting(observed(b"nothing"), INCUMBENT) is None
    assert PlainPolicy().fitting(now, INCUMBENT) is None


def stages(plan: Plan) -> int:
    return sum(
        len(block.schedule.stages) for block in plan.combined if isinstance(block.schedule, StageSchedule)
    )


def test_its_plan_is_ranked_like_any_other() -> None:
    now = observed(encode(MaddpgCheckpoint(SPACE, NETWORK)))
    decision = decide(now, LearnedPolicy().at_once(now))
    rows = {one.how: one for one in decision.evaluations}
    assert rows["learned"].scheduler == "maddpg"
    assert rows["learned"].verdict in (
        EvaluationVerdict.TAKEN,
        EvaluationVerdict.BEHIND,
        EvaluationVerdict.WORSE,
    )


@pytest.mark.promise("policy-fit-ignored-reason")
@pytest.mark.parametrize(
    ("learned", "why"),
    [
        (encode(MaddpgCheckpoint(replace(SPACE, device_class="other"), NETWORK)), "the device class 'other'"),
        (b"nothing", "not a checkpoint of maddpg"),
    ],
)
def test_a_policy_that_does_not_fit_is_ignored_and_says_why(learned: bytes, why: str) -> None:
    now = observed(learned)
    assert list(LearnedPolicy().at_once(now)) == list(PlainPolicy().at_once(now))
    assert why in LearnedPolicy().remark(now)


def test_samples_of_other_models_than_the_loads_are_a_reason_too() -> None:
    now = replace(observed(encode(MaddpgCheckpoint(SPACE, NETWORK))), samples=(AlarmSample((1,), (0.0,)),))
    assert list(LearnedPolicy().at_once(now)) == list(PlainPolicy().at_once(now))
    assert "a sample shows other models" in LearnedPolicy().remark(now)


@pytest.mark.promise("policy-published-through-gate")
@pytest.mark.parametrize("proposer", [Proposer.ALL, Proposer.LEARNED])
def test_why_a_policy_is_withheld_is_the_remark(proposer: Proposer) -> None:
    now = replace(asked(b"", proposer), withheld="policy 0123 did not pass its check: it is behind")
    assert list(LearnedPolicy().at_once(now)) == list(PlainPolicy().at_once(now))
    assert LearnedPolicy().searches(now) == PlainPolicy().searches(now)
    assert LearnedPolicy().remark(now) == now.withheld
    assert LearnedPolicy().remark(replace(now, settings=ReplanSettings(proposer=Proposer.PLAIN))) == ""


def test_where_none_was_trained_nothing_is_said() -> None:
    assert LearnedPolicy().remark(observed(b"")) == ""


def asked(learned: bytes, proposer: Proposer) -> Observation:
    return replace(observed(learned), settings=ReplanSettings(proposer=proposer))


@pytest.mark.promise("policy-asked-alone-answers")
def test_asked_alone_its_plan_is_there_without_a_search_however_little_is_expected_of_it() -> None:
    """What is predicted to cost more is not tried otherwise; the trial decides."""
    (quick,) = LearnedPolicy().at_once(asked(encode(MaddpgCheckpoint(SPACE, NETWORK)), Proposer.LEARNED))
    blocks = Blocks(INCUMBENT.models, GRAPHS)
    book = {blocks.key(one.members): one.schedule for one in quick.plan.combined}
    now = asked(encode(MaddpgCheckpoint(SPACE, NETWORK, book)), Proposer.LEARNED)
    (made,) = LearnedPolicy().at_once(now)
    assert made.how is How.LEARNED and LearnedPolicy().searches(now) == ()
    slow = replace(now.costs, rates=replace(now.costs.rates, barrier_s=100.0))
    for one in (now, replace(now, costs=slow)):
        decision = without_search(one, LearnedPolicy().at_once(one))
        assert decision is not None and decision.proposal == made
    assert decision is not None and decision.predicted is not None and decision.predicted > 2.0
    kept = replace(now, incumbent=made.plan)
    answer = without_search(kept, LearnedPolicy().at_once(kept))
    assert answer is not None and answer.proposal is None, "that nothing is to change is an answer, too"
    among_others = replace(now, costs=slow, settings=ReplanSettings())
    rows = decide(among_others, LearnedPolicy().at_once(among_others)).evaluations
    assert {one.verdict for one in rows if one.how == "learned"} == {EvaluationVerdict.WORSE}


@pytest.mark.promise("policy-asked-alone-answers")
@pytest.mark.parametrize(
    ("learned", "why"),
    [
        (b"", "there is no trained policy"),
        (encode(MaddpgCheckpoint(replace(SPACE, device_class="other"), NETWORK)), "the device class 'other'"),
    ],
)
def test_asked_alone_and_without_a_say_the_others_answer_and_the_reason_is_said(
    learned: bytes, why: str
) -> None:
    now = asked(learned, Proposer.LEARNED)
    assert list(LearnedPolicy().at_once(now)) == list(PlainPolicy().at_once(now))
    assert LearnedPolicy().searches(now) == PlainPolicy().searches(now)
    assert why in LearnedPolicy().remark(now)


def test_where_it_is_not_asked_it_says_nothing() -> None:
    now = asked(encode(MaddpgCheckpoint(SPACE, NETWORK)), Proposer.PLAIN)
    assert list(LearnedPolicy().at_once(now)) == list(PlainPolicy().at_once(now))
    assert LearnedPolicy().remark(now) == ""
