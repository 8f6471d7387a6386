"""Candidates judged on the arrivals of an alarm: the figure, the chance, and which plan is pushed."""

import math
from dataclasses import replace
from itertools import count

import pytest

from stageloom.planner.replan.decide import by_return, decide, lanes_of, rearranged, without_search
from stageloom.planner.replan.judge import (
    GAIN,
    LIKELY,
    Judged,
    ModelDemand,
    ServedPlan,
    StreamFigures,
    arrivals_of,
    chance_of_gain,
    harms,
    judge,
    log_gain,
)
from stageloom.planner.replan.levers import levers
from stageloom.planner.replan.policy import How, Observation, PlainPolicy, Proposal
from stageloom.planner.replan.scene import BESIDE_MOST, LoadScene, WayTimes, rate_per_s
from stageloom.planner.schema.explanation import EvaluationVerdict
from stageloom.shared.bound import bind
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.plan import ExecutorOptions, Plan, StepChoice
from stageloom.shared.policy.plain import Load
from stageloom.shared.search.arrangements import Arrangement, arranged_plan, express_of
from stageloom.shared.search.compose import Combination, ModelChoice, compose
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.job import run_search
from stageloom.shared.search.lane_load import ServedModel
from tests.search.graphs import CHAIN, DIAMOND, model

LEFT, RIGHT = model("left", DIAMOND, cuts=[1, 3]), model("right", CHAIN, cuts=[2])
GRAPHS = dict([LEFT, RIGHT])
CHOICES = [
    ModelChoice(name=name, artifact=one[0], graph=one[1])
    for name, one in zip("lr", [LEFT, RIGHT], strict=True)
]
ONE, TWO = ExecutorOptions(), ExecutorOptions(intra_op_threads=2)
TIMES: dict[Digest, WayTimes] = {
    LEFT[0]: {(ONE, 1): 0.020, (TWO, 1): 0.0125},
    RIGHT[0]: {(ONE, 1): 0.040, (TWO, 1): 0.025},
}
CAPACITY_PER_S = 2 / 0.030  # of two lanes, at equal rates


def day_plan() -> Plan:
    return arranged_plan(CHOICES, Arrangement(2, 1, (1, 1), (ONE, ONE)), [0, 1])


def night_plan() -> Plan:
    return arranged_plan(CHOICES, Arrangement(1, 2, (1, 1), (TWO, TWO)), [0, 1])


def loads(share: float, *, threads: int = 1, deadline_s: float = 0.2, slow: float = 1.0) -> tuple[Load, ...]:
    """Equally many tasks of both, at a share of what two lanes carry."""
    way = TWO if threads == 2 else ONE
    return tuple(
        Load(
            model=name,
            arrivals_per_s=share * CAPACITY_PER_S / 2,
            service_s=slow * TIMES[artifact][way, 1],
            queued=0,
            usual_per_s=share * CAPACITY_PER_S / 2,
            deadline_s=deadline_s,
        )
        for name, artifact in (("l", LEFT[0]), ("r", RIGHT[0]))
    )


def seen(incumbent: Plan, of_load: tuple[Load, ...], **changes: object) -> Observation:
    base = Observation(
        device=DeviceId("shop-7"),
        cause="variance",
        incumbent=incumbent,
        desired=(1, 1),
        loads=of_load,
        samples=(),
        graphs=GRAPHS,
        costs=CostTable(),
        cores=(0, 1),
        times=TIMES,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def served(total_s: float, lanes: int = 1) -> ServedPlan:
    return ServedPlan(models=(ServedModel(blocks_s=(total_s,)),), lanes=lanes, by_deadline=False, beside=0.0)


def test_an_almost_idle_plan_is_judged_by_the_log_of_its_service_time() -> None:
    demand = [ModelDemand(name="m", rate_per_s=1e-3, work_s=1.0)]
    streams = arrivals_of(demand)
    slow, fast = (judge(served(seconds), demand, streams) for seconds in (1.0, 0.5))
    gained, error = log_gain(slow, fast)
    assert gained == pytest.approx(math.log(2.0), abs=0.01) and error < 0.01
    assert slow.p50_s == pytest.approx(1.0) and slow.share_in_time == 1.0
    assert not slow.saturated and slow.variance_s2 == 0.0


def test_saturated_plans_are_judged_by_tasks_per_second() -> None:
    demand = [ModelDemand(name="m", rate_per_s=100.0, work_s=1.0)]
    streams = arrivals_of(demand)
    one, two = (judge(served(0.1, lanes), demand, streams) for lanes in (1, 2))
    assert one.saturated and two.saturated
    assert log_gain(one, two)[0] == pytest.approx(math.log(2.0), abs=0.05)
    assert one.streams[0].per_s == pytest.approx(10.0, rel=0.05)


def test_a_task_that_misses_its_deadline_counts_as_twice_the_deadline() -> None:
    """Two tasks are there at once, and one lane has time for one of them."""
    demand = [ModelDemand(name="m", rate_per_s=1.0, work_s=1.0, deadline_s=1.5)]
    plan = ServedPlan(
        models=(ServedModel(blocks_s=(1.0,), deadline_s=1.5),), lanes=1, by_deadline=True, beside=0.0
    )
    found = judge(plan, demand, [[(0.0, 0), (0.0, 0), (9.0, 0)]])
    assert found.streams[0].log_latency == pytest.approx(math.log(3.0) / 3.0)
    assert found.share_in_time == pytest.approx(2 / 3)


def test_models_count_by_their_work() -> None:
    demand = [
        ModelDemand(name="light", rate_per_s=1.0, work_s=1.0),
        ModelDemand(name="heavy", rate_per_s=1.0, work_s=3.0),
    ]
    plan = ServedPlan(
        models=(ServedModel(blocks_s=(1.0,)), ServedModel(blocks_s=(3.0,))),
        lanes=1,
        by_deadline=False,
        beside=0.0,
    )
    found = judge(plan, demand, [[(0.0, 0), (9.0, 1)]])
    assert found.streams[0].log_latency == pytest.approx(0.75 * math.log(3.0))


def test_the_chance_is_a_half_at_the_least_gain_and_grows_with_the_gain() -> None:
    least = math.log1p(GAIN)
    assert chance_of_gain(least, 0.05) == pytest.approx(0.5)
    assert chance_of_gain(least, 0.0) == 1.0 and chance_of_gain(0.99 * least, 0.0) == 0.0
    chances = [chance_of_gain(gain, 0.05) for gain in (-0.1, 0.0, 0.02, 0.1, 0.3)]
    assert chances == sorted(chances)
    assert chance_of_gain(least + 0.8416 * 0.05, 0.05) == pytest.approx(LIKELY, abs=1e-3)


def test_a_gain_of_a_thousandth_is_no_gain_and_lost_tasks_or_a_longer_tail_harm() -> None:
    assert chance_of_gain(math.log(1 / 0.99993), 0.001) < 0.01
    fine = Judged(
        p50_s=0.01,
        p99_s=0.05,
        share_in_time=0.95,
        oldest_age_s=0.1,
        variance_s2=0.0,
        models=(),
        streams=(StreamFigures(0.0, 1.0, 1.0, 0.0),),
    )
    assert not harms(fine, replace(fine, p50_s=0.02))
    assert harms(fine, replace(fine, share_in_time=0.93))
    assert harms(fine, replace(fine, p99_s=0.07))
    assert not harms(fine, replace(fine, p99_s=0.07, share_in_time=1.0)), "those were lost before"


def test_arrivals_are_poisson_behind_what_waits_and_the_same_for_every_plan() -> None:
    demand = [
        ModelDemand(name="a", rate_per_s=30.0, work_s=1.0, queued=4, oldest_age_s=0.8),
        ModelDemand(name="b", rate_per_s=10.0, work_s=1.0),
    ]
    streams = arrivals_of(demand, streams=20, tasks=1000)
    assert streams == arrivals_of(demand, streams=20, tasks=1000)
    for stream in streams:
        assert [at for at, _ in stream] == sorted(at for at, _ in stream)
        assert stream[:4] == [(-0.8, 0), (pytest.approx(-0.6), 0), (pytest.approx(-0.4), 0), stream[3]]
    after = [one for stream in streams for one in stream if one[0] >= 0.0]
    assert sum(index == 0 for _, index in after) / len(after) == pytest.approx(0.75, abs=0.01)
    assert math.fsum(stream[-1][0] for stream in streams) / 20 == pytest.approx(1000 / 40.0, rel=0.03)
    assert arrivals_of([replace(one, rate_per_s=0.0) for one in demand]) == []


def test_the_usual_rate_counts_unless_more_comes_than_chance_explains() -> None:
    load = Load(model="m", arrivals_per_s=0.5, service_s=0.1, queued=0, usual_per_s=2.5)
    assert rate_per_s(load) == 2.5, "a lull of two seconds is chance"
    assert rate_per_s(replace(load, arrivals_per_s=4.0)) == 2.5
    assert rate_per_s(replace(load, arrivals_per_s=20.0)) == 20.0
    assert rate_per_s(replace(load, arrivals_per_s=5.0)) == 5.0, "25 in 5 s where 12.5 were expected"
    assert rate_per_s(replace(load, usual_per_s=0.0)) == 0.5


def test_by_night_one_wide_lane_is_pushed_and_by_day_two_lanes() -> None:
    night = seen(day_plan(), loads(0.25))
    found = decide(night, PlainPolicy().arranged(night))
    assert found.proposal is not None and found.judged
    assert found.proposal.plan.structure == night_plan().structure
    assert found.predicted is not None and 0.6 < found.predicted < 0.8
    assert "1 lane of 2 threads: a median of" in found.reason
    day = seen(night_plan(), loads(0.9, threads=2))
    back = decide(day, PlainPolicy().arranged(day))
    assert back.proposal is not None and back.proposal.plan.lanes == 2


def test_the_plan_that_is_best_already_stays_and_the_record_says_why() -> None:
    for plan, load in ((night_plan(), loads(0.25, threads=2)), (day_plan(), loads(0.9))):
        now = seen(plan, load)
        found = decide(now, PlainPolicy().arranged(now))
        assert found.proposal is None
        assert rearranged(now, PlainPolicy().arranged(now)) is None
        told = {one.plan: one for one in found.evaluations}
        assert len(told) > 1
        incumbent = told[plan.digest]
        assert (incumbent.verdict, incumbent.how) == (EvaluationVerdict.SAME, "incumbent")
        for one in found.evaluations:
            assert one.p50_s is not None and one.p99_s is not None and one.share_in_time is not None
            assert one is incumbent or one.chance is not None


def test_a_plan_is_the_likelier_pushed_the_faster_its_ways_are() -> None:
    """Monotone: shorter times of two threads never lower the chance, and at some point it is pushed."""
    chances, pushed = [], []
    for factor in (1.2, 1.0, 0.9, 0.8, 0.7, 0.6):
        times: dict[Digest, WayTimes] = {
            artifact: {**ways, (TWO, 1): factor * ways[ONE, 1]} for artifact, ways in TIMES.items()
        }
        now = seen(day_plan(), loads(0.25), times=times)
        found = decide(now, [Proposal(night_plan(), How.ARRANGED)])
        chances.append(found.evaluations[0].chance or 0.0)
        pushed.append(found.proposal is not None)
    assert chances == sorted(chances) and pushed == sorted(pushed)
    assert not pushed[0] and pushed[-1]


def test_a_proven_plan_goes_at_once_where_it_is_likely_to_gain_and_not_else() -> None:
    night = seen(day_plan(), loads(0.25), proven=(night_plan(),))
    found = without_search(night, PlainPolicy().at_once(night))
    assert found is not None and found.proposal is not None and found.proposal.how is How.PROVEN
    day = seen(day_plan(), loads(0.9), proven=(night_plan(),))
    assert without_search(day, PlainPolicy().at_once(day)) is None


def test_what_is_barred_is_not_pushed_however_well_it_is_judged() -> None:
    barred = night_plan()
    night = seen(day_plan(), loads(0.25), barred=((barred.digest, barred.structure),))
    found = decide(night, [Proposal(barred, How.ARRANGED)])
    assert found.proposal is None
    assert found.evaluations[0].verdict is EvaluationVerdict.BARRED


def test_a_way_that_was_never_measured_is_neither_proposed_nor_judged() -> None:
    times: dict[Digest, WayTimes] = {artifact: {(ONE, 1): ways[ONE, 1]} for artifact, ways in TIMES.items()}
    now = seen(day_plan(), loads(0.25), times=times)
    assert all(one.plan.lanes == 2 for one in PlainPolicy().arranged(now))
    found = decide(now, [Proposal(night_plan(), How.SEARCH)])
    assert found.evaluations[0].chance is None


def test_without_cores_nothing_arranged_is_proposed_and_busy_seconds_rank() -> None:
    now = seen(day_plan(), loads(0.25), cores=())
    assert PlainPolicy().arranged(now) == ()
    found = decide(now, [Proposal(night_plan(), How.SEARCH)])
    assert found.evaluations[0].chance is None and len(found.evaluations) == 1


def test_the_running_plans_own_times_do_where_nothing_was_measured() -> None:
    """One lane of one thread on two cores, as a plan that was made without a device has it."""
    simple = compose(CHOICES)
    now = seen(simple, loads(0.45), times={})
    found = decide(now, PlainPolicy().arranged(now))
    assert found.proposal is not None and found.proposal.plan.lanes == 2
    assert "in time predicted where the running plan has" in found.reason or "median" in found.reason


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 6, 8])
def test_no_lever_uses_more_cores_than_there_are_and_each_is_legal(cores: int) -> None:
    ways: WayTimes = {
        (ExecutorOptions(name=name, intra_op_threads=threads), batch): batch**0.7 * 0.01 / threads**0.5
        for name in ("onnx", "openvino")
        for threads in (1, 2, 3, 4, 6, 8)
        for batch in (1, 4)
    }
    demand = [ModelDemand(name=one.name, rate_per_s=1.0, work_s=0.01, deadline_s=0.02) for one in CHOICES]
    incumbent = compose(CHOICES)
    found = levers(incumbent, CHOICES, [ways, ways], demand, range(cores))
    assert found and len({one.structure for one in found}) == len(found)
    for plan in found:
        bind(plan, GRAPHS)
        assert plan.structure != incumbent.structure
        used = [core for lane in range(plan.lanes) for core in plan.cores_of(lane)]
        assert len(used) == len(set(used)) <= cores
        threads = max(options.intra_op_threads for options in plan.executors)
        assert plan.lanes * threads <= cores or not plan.resources
    assert any(one.batch == 4 for plan in found for one in plan.models)
    assert any(plan.step_choice is StepChoice.DEADLINE for plan in found)


def test_steps_that_take_longer_than_alone_tell_of_lanes_up_to_a_bound_and_then_of_the_device() -> None:
    def speed(incumbent: Plan, load: tuple[Load, ...]) -> tuple[float, float, bool]:
        scene = LoadScene.of(incumbent, GRAPHS, CostTable(), TIMES, load, cores=2, tasks=10)
        assert scene is not None
        return scene.speed.slow, scene.speed.beside, scene.speed.told

    slow, beside, told = speed(day_plan(), loads(0.9, slow=1.1))
    assert told and beside == pytest.approx(0.05 / 0.99) and slow == pytest.approx(1.1 / 1.05)
    slow, beside, told = speed(day_plan(), loads(0.9, slow=2.0))
    assert told and beside == BESIDE_MOST / 2 and slow == pytest.approx(2.0 / (1.0 + BESIDE_MOST / 2))
    slow, beside, told = speed(night_plan(), loads(0.25, threads=2, slow=1.5))
    assert not told and slow == pytest.approx(1.5)


@pytest.mark.parametrize("slow", [1.1, 1.2, 1.5, 2.0])
def test_whether_lanes_or_others_slow_the_running_plan_is_unknown_and_a_wide_lane_bears_the_doubt(
    slow: float,
) -> None:
    """Both readings give what the running plan's steps take, and for one lane they differ by `doubt`.

    A device that others use took the wide lane's times while it was quiet; were all of the excess put down
    to lanes, a wide lane would look the better the busier the device is.
    """
    scene = LoadScene.of(day_plan(), GRAPHS, CostTable(), TIMES, loads(0.5, slow=slow), cores=2, tasks=1000)
    quiet = LoadScene.of(day_plan(), GRAPHS, CostTable(), TIMES, loads(0.5), cores=2, tasks=1000)
    assert scene is not None and quiet is not None
    speed, others = scene.speed, min(slow * 0.5, 1.0)
    assert speed.slow * (1.0 + speed.beside * others) == pytest.approx(slow)
    assert speed.slow * speed.doubt == pytest.approx(slow)
    wide, wide_if_quiet = scene.weigh(night_plan()), quiet.weigh(night_plan())
    assert wide is not None and wide_if_quiet is not None
    assert chance_of_gain(wide.log_gain, wide.error) < LIKELY
    if wide.log_gain > math.log1p(GAIN):
        assert wide.error > wide_if_quiet.error
    same_lanes = scene.weigh(replace(day_plan(), step_choice=StepChoice.DEADLINE, max_skips=7))
    assert same_lanes is not None and same_lanes.error == pytest.approx(0.0, abs=1e-9)


def express_plan() -> Plan:
    return arranged_plan(CHOICES, Arrangement(2, 1, (1, 1), (ONE, ONE), express=frozenset({1})), [0, 1])


def test_a_plan_with_an_express_lane_is_judged_by_the_cores_that_there_are() -> None:
    times: dict[Digest, WayTimes] = {LEFT[0]: {(ONE, 1): 0.080}, RIGHT[0]: {(ONE, 1): 0.0002}}

    def weighed(heavy_per_s: float) -> tuple[float, Judged, Judged]:
        load = tuple(
            Load(
                model=name,
                arrivals_per_s=rate,
                service_s=times[artifact][ONE, 1],
                queued=0,
                usual_per_s=rate,
                deadline_s=deadline_s,
            )
            for name, artifact, rate, deadline_s in (
                ("l", LEFT[0], heavy_per_s, 0.4),
                ("r", RIGHT[0], 140.0, 0.020),
            )
        )
        scene = LoadScene.of(day_plan(), GRAPHS, CostTable(), times, load, cores=2, tasks=3000)
        assert scene is not None
        found = scene.weigh(express_plan())
        assert found is not None
        return found.log_gain, scene.base, found.judged

    gained, before, after = weighed(14.0)
    assert before.models[1].share_in_time < 0.9
    assert [one.share_in_time for one in after.models] == pytest.approx([1.0, 1.0], abs=0.01)
    assert gained > math.log(1.1)  # by work it would be nothing: short tasks have hardly any
    _, before, after = weighed(50.0)  # twice what two cores carry, lane or no lane
    assert 0.4 < after.models[0].share_in_time < before.models[0].share_in_time < 0.6


def test_lanes_beyond_the_cores_take_turns() -> None:
    three = replace(day_plan(), lanes=3, resources=(), lane_resources=())
    scene = LoadScene.of(day_plan(), GRAPHS, CostTable(), TIMES, loads(0.9), cores=2, tasks=1000)
    assert scene is not None
    found = scene.weigh(three)
    assert found is not None
    assert found.log_gain == pytest.approx(0.0, abs=1e-9)


def test_searches_leave_an_express_lane_to_its_models_and_combine_nothing_with_them() -> None:
    jobs = PlainPolicy().searches(seen(express_plan(), loads(0.5)))
    assert {job.combination for job in jobs} == {Combination.ALONE}
    for job in jobs:
        assert express_of(run_search(replace(job, budget_s=0.1), count().__next__)) == frozenset({1})
    jobs = PlainPolicy().searches(seen(day_plan(), loads(0.5)))
    assert {job.combination for job in jobs} == {Combination.ALONE, Combination.ALIGNED}


def test_a_short_model_is_proposed_an_express_lane() -> None:
    ways: list[WayTimes] = [{(ONE, 1): 0.080}, {(ONE, 1): 0.0002}]
    demand = [ModelDemand(name=one.name, rate_per_s=1.0, work_s=0.01, deadline_s=0.4) for one in CHOICES]
    found = levers(day_plan(), CHOICES, ways, demand, range(2))
    assert express_plan().structure in {one.structure for one in found}


def test_what_ran_until_other_arrivals_came_runs_at_once_where_a_gain_is_likely_and_is_else_tried() -> None:
    by_day = seen(night_plan(), loads(0.9, threads=2))
    back = by_return(by_day, Proposal(day_plan(), How.RETURNING))
    assert back is not None and back.at_once
    assert back.reason.startswith(
        "returning: it ran here until other arrivals came, and 2 lanes of 1 thread: "
    )
    assert back.evaluations[0].chance is not None and back.evaluations[0].chance >= LIKELY
    tried = by_return(by_day, Proposal(day_plan(), How.RETURNING), won_here=True)
    assert tried is not None and tried.proposal is not None and not tried.at_once
    proven = replace(by_day, proven=(day_plan(),))
    assert by_return(proven, Proposal(day_plan(), How.RETURNING), won_here=True) is None, "none would try it"
    worse = by_return(seen(day_plan(), loads(0.9)), Proposal(night_plan(), How.RETURNING))
    assert worse is not None and worse.proposal is not None and not worse.at_once


def test_a_plan_is_named_in_a_users_words() -> None:
    assert lanes_of(day_plan()) == "2 lanes of 1 thread"
    cut = arranged_plan(CHOICES, Arrangement(2, 1, (2, 1), (ONE, ONE)), [0, 1])
    assert lanes_of(cut) == "2 lanes of 1 thread, l in 2 blocks"
    assert lanes_of(express_plan()) == "2 lanes of 1 thread and an express lane for r"


def test_a_plan_that_combines_blocks_of_several_models_has_other_ways_to_share_the_cores_too() -> None:
    together = compose(CHOICES, combination=Combination.ALIGNED)
    assert len(together.combined) == 1 and len(together.combined[0].members) == 2
    batches = {artifact: {**ways, (ONE, 8): 4.0 * ways[ONE, 1]} for artifact, ways in TIMES.items()}
    choices = [replace(one, batch=1) for one in CHOICES]
    demand = [ModelDemand(name=name, rate_per_s=1.0, work_s=0.02) for name in "lr"]
    found = levers(together, choices, [batches[one.artifact] for one in choices], demand, (0, 1))
    assert found, "each model is looked at, whichever block it is in"
    assert PlainPolicy().arranged(seen(together, loads(0.5)))


def test_arrivals_of_a_model_whose_work_is_not_known_are_judged_by_their_number() -> None:
    demand = [
        ModelDemand(name="known", rate_per_s=0.0, work_s=1.0),
        ModelDemand(name="failing", rate_per_s=10.0, work_s=0.0),
    ]
    plan = replace(served(0.01), models=served(0.01).models * 2)
    found = judge(plan, demand, arrivals_of(demand, tasks=1))
    assert math.isfinite(found.p99_s) and all(math.isfinite(one.log_latency) for one in found.streams)
