"""A trained policy is one proposer among others; where it does not fit it is ignored, and says why."""

from dataclasses import replace

import pytest

from planner.replan.considered import Verdict
from planner.replan.decide import decide, without_search
from planner.replan.learned import LearnedPolicy
from planner.replan.observation import Observation
from planner.replan.policy import How, PlainPolicy
from planner.replan.settings import ReplanSettings
from shared.messages.admin import Proposer
from shared.messages.control import AlarmSample
from shared.plan import Plan
from shared.policy.maddpg.book import Blocks, Book
from shared.policy.maddpg.checkpoint import Checkpoint, encode
from shared.policy.maddpg.decide import replanned
from shared.policy.maddpg.space import Space
from shared.policy.samples import Sample
from shared.schedule import StageSchedule
from shared.search.compose import ModelChoice, compose
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
SAMPLES = (AlarmSample((0b101, 0b10), (0.2, -0.2)), AlarmSample((0b000, 0b01), (0.5, -0.5)))


def observed(learned: bytes) -> Observation:
    loads = tuple(
        replace(load, model=model.name) for load, model in zip(LOADS, INCUMBENT.models, strict=True)
    )
    return seen(incumbent=INCUMBENT, loads=loads, samples=SAMPLES, environment=CLASS, learned=learned)


def wanted(book: Book) -> Plan:
    """What the forward pass says, by the code that the agent runs."""
    now = observed(b"")
    samples = (Sample(((1, 0, 1), (0, 1)), (0.2, -0.2)), Sample(((0, 0, 0), (1, 0)), (0.5, -0.5)))
    return replanned(SPACE, NETWORK, book, INCUMBENT, CLASS, GRAPHS, samples, now.loads)


def test_a_policy_that_fits_proposes_its_plan_beside_the_plain_ones() -> None:
    now = observed(encode(Checkpoint(SPACE, NETWORK)))
    plain, proposals = PlainPolicy().at_once(now), LearnedPolicy().at_once(now)
    assert list(proposals[:-1]) == list(plain)
    made, says = proposals[-1], wanted(Book())
    assert (made.how, made.scheduler) == (How.LEARNED, "maddpg")
    assert [block.members for block in made.plan.combined] == [block.members for block in says.combined]
    assert made.plan.models == says.models
    assert LearnedPolicy().remark(now) == ""
    assert LearnedPolicy().searches(now) == PlainPolicy().searches(now)


def test_its_schedules_come_by_digest_and_those_it_lacks_are_searched_for_at_once() -> None:
    """DIAMOND's branches may run side by side: a beam sees that, a missing schedule run in order does not."""
    combined = [block.members for block in wanted(Book()).combined]
    blocks = Blocks(INCUMBENT.models, GRAPHS)
    slow = {
        blocks.key(members): block.schedule
        for members, block in zip(combined, wanted(Book()).combined, strict=True)
    }
    brought = LearnedPolicy().at_once(observed(encode(Checkpoint(SPACE, NETWORK, Book(slow)))))[-1].plan
    assert brought == wanted(Book(slow))
    searched = LearnedPolicy().at_once(observed(encode(Checkpoint(SPACE, NETWORK))))[-1].plan
    assert stages(searched) < stages(brought)


def stages(plan: Plan) -> int:
    return sum(
        len(block.schedule.stages) for block in plan.combined if isinstance(block.schedule, StageSchedule)
    )


def test_its_plan_is_ranked_like_any_other() -> None:
    now = observed(encode(Checkpoint(SPACE, NETWORK)))
    decision = decide(now, LearnedPolicy().at_once(now))
    rows = {one.how: one for one in decision.considered}
    assert rows["learned"].scheduler == "maddpg"
    assert rows["learned"].verdict in (Verdict.TAKEN, Verdict.BEHIND, Verdict.WORSE)


@pytest.mark.parametrize(
    ("learned", "why"),
    [
        (encode(Checkpoint(replace(SPACE, device_class="other"), NETWORK)), "the device class 'other'"),
        (b"nothing", "not a checkpoint of maddpg"),
    ],
)
def test_a_policy_that_does_not_fit_is_ignored_and_says_why(learned: bytes, why: str) -> None:
    now = observed(learned)
    assert list(LearnedPolicy().at_once(now)) == list(PlainPolicy().at_once(now))
    assert why in LearnedPolicy().remark(now)


def test_samples_of_other_blocks_than_the_policys_are_a_reason_too() -> None:
    now = replace(observed(encode(Checkpoint(SPACE, NETWORK))), samples=(AlarmSample((1,), (0.0,)),))
    assert list(LearnedPolicy().at_once(now)) == list(PlainPolicy().at_once(now))
    assert "a sample shows blocks" in LearnedPolicy().remark(now)


def test_where_none_was_trained_nothing_is_said() -> None:
    assert LearnedPolicy().remark(observed(b"")) == ""


def asked(learned: bytes, proposer: Proposer) -> Observation:
    return replace(observed(learned), settings=ReplanSettings(proposer=proposer))


def test_asked_alone_its_plan_is_there_without_a_search_however_little_is_expected_of_it() -> None:
    """What is predicted to cost more is not tried otherwise; the trial decides."""
    (quick,) = LearnedPolicy().at_once(asked(encode(Checkpoint(SPACE, NETWORK)), Proposer.LEARNED))
    blocks = Blocks(INCUMBENT.models, GRAPHS)
    book = Book({blocks.key(one.members): one.schedule for one in quick.plan.combined})
    now = asked(encode(Checkpoint(SPACE, NETWORK, book)), Proposer.LEARNED)
    (made,) = LearnedPolicy().at_once(now)
    assert made.how is How.LEARNED and LearnedPolicy().searches(now) == ()
    slow = replace(now.costs, rates=replace(now.costs.rates, barrier_s=100.0))
    for one in (now, replace(now, costs=slow)):
        decision = without_search(one, LearnedPolicy().at_once(one))
        assert decision is not None and decision.proposal == made
    assert decision is not None and decision.predicted is not None and decision.predicted > 2.0
    among_others = replace(now, costs=slow, settings=ReplanSettings())
    rows = decide(among_others, LearnedPolicy().at_once(among_others)).considered
    assert {one.verdict for one in rows if one.how == "learned"} == {Verdict.WORSE}


@pytest.mark.parametrize(
    ("learned", "why"),
    [
        (b"", "there is no trained policy"),
        (encode(Checkpoint(replace(SPACE, device_class="other"), NETWORK)), "the device class 'other'"),
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
    now = asked(encode(Checkpoint(SPACE, NETWORK)), Proposer.PLAIN)
    assert list(LearnedPolicy().at_once(now)) == list(PlainPolicy().at_once(now))
    assert LearnedPolicy().remark(now) == ""
