"""From glances at a simulated engine to alarms and local plans."""

from collections.abc import Mapping

import pytest

from stageloom.edge_agent.lifecycle.states import PlanRef, RunnablePlan
from stageloom.edge_agent.replan.alarms import Alarms, Fired, alarm_raised
from stageloom.edge_agent.replan.policy import plain_plan
from stageloom.shared.engine.stats import QueueSnapshot
from stageloom.shared.ids import Digest
from stageloom.shared.messages import control
from stageloom.shared.messages.control import Origin
from stageloom.shared.plan import decode_plan
from stageloom.shared.policy.queues import TOP_THRESHOLD, QueueMeasure
from stageloom.shared.policy.trigger import Cause
from tests.engine.driver import Driver
from tests.engine.plans import chains
from tests.policy.test_plain import PLAN

PACE_S = 0.1
SERVICE_S = {"a": 0.02, "b": 0.02}
DAY, NIGHT = {"a": 16.0, "b": 4.0}, {"a": 4.0, "b": 1.0}


class Device:
    """An engine core of two models with one lane, whose steps take 20 ms, and its alarms."""

    def __init__(self, threshold: float | None = None) -> None:
        self.driver = Driver(chains(2, 1))
        self.alarms = Alarms(threshold=threshold)
        self.held = False
        self.trying = False
        self.structure: Digest | None = None  # of the plan that runs
        self.fired: list[tuple[float, Fired]] = []
        self._step_ends_s = 0.0

    def glance(self) -> QueueSnapshot:
        return self.driver.core.sample(self.driver.now)

    def run(
        self,
        seconds: float,
        per_s: Mapping[str, float],
        deadline_s: float | None = None,
        service_s: Mapping[str, float] = SERVICE_S,
    ) -> list[Fired]:
        """Tasks arrive evenly; one step of 20 ms after another; ten glances a second."""
        before = len(self.fired)
        debt = dict.fromkeys(per_s, 0.0)
        for _ in range(round(seconds / 0.01)):
            self.driver.at(round(self.driver.now + 0.01, 6))
            now = self.driver.now
            for model, rate in per_s.items():
                debt[model] += rate * 0.01
                while debt[model] >= 1.0 - 1e-9:
                    debt[model] -= 1.0
                    self.driver.submit(model, deadline_s=None if deadline_s is None else now + deadline_s)
            if self.driver.steps and now >= self._step_ends_s:
                self.driver.end()
                self._step_ends_s = now + 0.02
            if round(now * 100) % 10 == 0:
                found = self.alarms.glance(
                    *(self.glance(), service_s),
                    held=self.held,
                    trying=self.trying,
                    structure=self.structure,
                )
                if found is not None:
                    self.fired.append((now, found))
        return [found for _, found in self.fired[before:]]


def test_a_burst_on_one_queue_crosses_the_threshold_and_even_load_does_not() -> None:
    device = Device()
    assert device.run(5.0, {"a": 10.0, "b": 10.0}) == []
    (fired,) = device.run(3.0, {"a": 60.0, "b": 10.0})
    assert fired.firing.cause in (Cause.VARIANCE, Cause.OLDEST_AGE)
    a, b = fired.loads
    assert (a.model, b.model) == ("a", "b")
    assert a.arrivals_per_s > 2 * b.arrivals_per_s and b.arrivals_per_s == pytest.approx(10.0, rel=0.3)
    assert a.queued > b.queued and a.service_s == 0.02
    assert len(fired.firing.samples) == 10
    assert fired.firing.samples[-1].shape == (2, 1)


def test_arrivals_are_those_of_the_last_seconds_and_survive_a_restart_of_the_engine() -> None:
    device = Device()
    device.run(20.0, {"a": 20.0})
    assert device.alarms.loads(device.glance())[0].arrivals_per_s == pytest.approx(20.0, rel=0.05)
    device.run(6.0, {"a": 5.0})
    assert device.alarms.loads(device.glance())[0].arrivals_per_s == pytest.approx(5.0, rel=0.1)
    before = device.driver.now
    device.driver = Driver(chains(2, 1))  # counts begin again at 0
    device.driver.now = before
    device.run(6.0, {"a": 10.0})
    assert device.alarms.loads(device.glance())[0].arrivals_per_s == pytest.approx(10.0, rel=0.1)


def test_an_attempt_holds_the_alarm_until_it_has_ended_and_the_load_is_judged_anew() -> None:
    device = Device()
    device.run(2.0, {"a": 5.0, "b": 5.0})
    device.held = True
    assert device.run(5.0, {"a": 100.0, "b": 5.0}) == []
    device.held = False
    assert len(device.run(0.3, {"a": 100.0, "b": 5.0})) == 1


def test_the_thresholds_follow_the_tightest_deadline_that_tasks_have() -> None:
    device = Device()
    device.run(1.0, {"a": 5.0}, deadline_s=0.2)
    config = device.alarms.trigger.config
    assert config.variance == pytest.approx(0.0025)
    assert config.oldest_age_s == pytest.approx(0.1)
    device.run(1.0, {"a": 5.0}, deadline_s=0.8)
    assert device.alarms.trigger.config.oldest_age_s == pytest.approx(0.1), "the tightest one counts"
    device.run(130.0, {"a": 1.0}, deadline_s=0.8)
    assert device.alarms.trigger.config.oldest_age_s == pytest.approx(0.4), "until it was not seen for long"


def test_a_task_that_is_submitted_late_changes_neither_thresholds_nor_what_is_told() -> None:
    device = Device()
    device.run(5.0, {"a": 5.0}, deadline_s=0.2)
    device.run(0.4, {"a": 5.0}, deadline_s=0.001)
    device.run(5.0, {"a": 5.0}, deadline_s=0.2)
    assert device.alarms.trigger.config.oldest_age_s == pytest.approx(0.1)
    assert device.alarms.loads(device.glance())[0].deadline_s == pytest.approx(0.2)


def test_urgent_tasks_among_others_set_the_thresholds_and_the_usual_ones_are_told() -> None:
    device = Device()
    for _ in range(5):
        device.run(1.0, {"a": 5.0}, deadline_s=0.2)
        device.run(1.4, {"a": 5.0}, deadline_s=0.8)
    assert device.alarms.trigger.config.oldest_age_s == pytest.approx(0.1)
    assert device.alarms.loads(device.glance())[0].deadline_s == pytest.approx(0.8)


def test_an_alarms_loads_tell_what_is_usual_and_each_models_own_deadline() -> None:
    device = Device()
    device.run(20.0, {"a": 5.0, "b": 2.0})
    device.run(10.0, {"b": 2.0}, deadline_s=0.7)
    a, b = device.alarms.loads(device.glance())
    assert a.deadline_s == 0.0 and b.deadline_s == pytest.approx(0.7)
    assert a.arrivals_per_s < 0.2 and a.usual_per_s == pytest.approx(100 / 30, rel=0.05)
    assert b.arrivals_per_s == pytest.approx(2.0, rel=0.1) and b.usual_per_s == pytest.approx(2.0, rel=0.05)


def test_arrivals_that_stay_other_ones_fire_and_a_burst_and_a_pause_do_not() -> None:
    """Queues stay empty throughout: nothing but the arrivals themselves asks for another plan."""
    device = Device()
    few, many = {"a": 4.0, "b": 2.0}, {"a": 14.0, "b": 7.0}
    assert device.run(70.0, few) == []
    assert device.run(4.0, many) + device.run(40.0, few) == [], "a burst"
    assert device.run(20.0, {}) + device.run(20.0, few) == [], "a pause"
    (up,) = device.run(60.0, many)
    assert up.firing.cause is Cause.REGIME and up.firing.value > up.firing.threshold == 2.0
    assert [load.usual_per_s for load in up.loads] == [
        pytest.approx(14.0, rel=0.1),
        pytest.approx(7.0, rel=0.1),
    ]
    (down,) = device.run(60.0, few)
    assert down.firing.cause is Cause.REGIME
    assert [load.usual_per_s for load in down.loads] == [
        pytest.approx(4.0, rel=0.3),
        pytest.approx(2.0, rel=0.3),
    ]


def test_a_plan_that_was_chosen_in_a_burst_is_judged_by_what_comes_after_it() -> None:
    """A plan with other launch intervals alone is no other plan, and the burst is nobody's regime."""
    one, other = Digest("1" * 64), Digest("2" * 64)
    for after in (one, other):
        device = Device()
        device.structure = one
        device.run(60.0, {"a": 4.0, "b": 2.0})
        (burst,) = device.run(4.0, {"a": 60.0, "b": 2.0})
        assert burst.firing.cause in (Cause.VARIANCE, Cause.OLDEST_AGE)
        device.structure = after
        causes = [fired.firing.cause for fired in device.run(60.0, {"a": 4.0, "b": 2.0})]
        assert causes.count(Cause.REGIME) == (after == other)


def test_another_plan_has_the_cool_down_to_work_off_what_its_trial_left_queued() -> None:
    """With the plan of before, which was kept, what waits fires as soon as the trial has ended."""
    one, other = Digest("1" * 64), Digest("2" * 64)
    for after in (one, other):
        device = Device()
        device.structure = one
        device.run(2.0, {"a": 5.0, "b": 5.0})
        assert len(device.run(3.0, {"a": 60.0, "b": 5.0})) == 1
        device.held = True
        device.run(60.0, {"a": 60.0, "b": 5.0})
        device.held, device.structure = False, after
        began_s = device.driver.now
        device.run(12.0, {"a": 60.0, "b": 5.0})
        (at_s, _) = device.fired[1]
        assert at_s - began_s == pytest.approx(10.0 if after == other else 0.1, abs=0.25)


def test_settings_choose_measure_threshold_and_cool_down() -> None:
    tasks = Alarms(measure=QueueMeasure.TASKS).config(0.2)
    assert (tasks.measure, tasks.variance) == (QueueMeasure.TASKS, TOP_THRESHOLD)
    given = Alarms(threshold=7.0, cooldown_s=3.0).config(None)
    assert (given.variance, given.cooldown_s) == (7.0, 3.0)


def test_a_swap_whose_plan_has_measured_nothing_yet_keeps_the_queued_work() -> None:
    device = Device(threshold=0.01)
    device.run(2.0, {"a": 5.0, "b": 5.0})
    device.held = True
    device.run(3.0, {"a": 100.0, "b": 5.0})
    device.held = False
    (fired,) = device.run(0.2, {"a": 100.0, "b": 5.0}, service_s={})
    assert fired.firing.value > 0.01 and fired.loads[0].service_s == 0.02


@pytest.mark.parametrize(
    ("after", "structure", "causes"),
    [(NIGHT, "d", [Cause.REGIME]), (NIGHT, "e", []), (DAY, "d", [])],
)
def test_other_arrivals_after_a_restart_fire_once_where_the_plan_runs_that_was_chosen_before(
    after: Mapping[str, float], structure: str, causes: list[Cause]
) -> None:
    """A pause before they come tells nothing."""
    device, again = Device(), Device()
    device.structure = Digest("d" * 64)
    device.run(60.0, DAY)
    again.alarms = Alarms(chosen=device.alarms.chosen)
    again.structure = Digest(structure * 64)
    again.held = True  # the plan is being loaded
    assert again.run(20.0, {}) == []
    again.held = False
    assert [fired.firing.cause for fired in again.run(10.0, {}) + again.run(90.0, after)] == causes


# -- what is made of it -------------------------------------------------------------------------------------


def running() -> RunnablePlan:
    return RunnablePlan(PlanRef(PLAN.digest, Origin.PLANNER), PLAN.wire, ())


def fired(**loads: tuple[float, float, int]) -> Fired:
    from stageloom.shared.policy.plain import Load
    from stageloom.shared.policy.queues import PolicySample
    from stageloom.shared.policy.trigger import Firing

    samples = (PolicySample(((1, 0), (1,), (0,)), (0.5, -0.25, -0.25)),) * 10
    firing = Firing(cause=Cause.VARIANCE, value=0.5, threshold=0.1, at_s=1.0, samples=samples)
    return Fired(
        firing=firing,
        loads=tuple(
            Load(model=name, arrivals_per_s=rate, service_s=service, queued=queued, oldest_age_s=0.5)
            for name, (rate, service, queued) in loads.items()
        ),
    )


def test_an_alarm_is_answered_by_a_local_plan_that_differs_in_launch_intervals_only() -> None:
    seen = fired(a=(10.0, 0.01, 90), b=(10.0, 0.01, 0), c=(0.0, 0.01, 0))
    event, made = alarm_raised(seen, running(), 5), plain_plan(seen, running())
    assert made is not None and event.plan == PLAN.digest
    plan = decode_plan(made.wire, made.ref.digest)
    assert plan.combined == PLAN.combined and plan.models != PLAN.models
    assert made.ref.origin is Origin.LOCAL
    message = control.Alarm(
        boot=1,
        number=1,
        at_us=event.at_us,
        cause=event.cause,
        value=event.value,
        threshold=event.threshold,
        plan=event.plan,
        loads=event.loads,
        samples=event.samples,
        usual=event.usual,
    )
    decoded = control.TO_PLANNER.decode(control.TO_PLANNER.encode(message))
    assert decoded == message, "it fits the wire"
    assert event.samples[0].progress == (0b01, 1, 0)


def test_without_a_change_to_make_there_is_no_local_plan() -> None:
    calm = fired(a=(10.0, 0.01, 0), b=(10.0, 0.01, 0))
    assert plain_plan(calm, running()) is None and plain_plan(calm, None) is None
    assert alarm_raised(calm, None, 5).plan is None


def test_a_regime_that_is_back_is_told_after_fifteen_tasks_with_the_arrivals_that_it_is_known_by() -> None:
    """1. Nights are told after five seconds or more, and a plan of their own runs. 2. From the second change
    on both are known by the plan that ran when they were left. 3. Where that runs already, nothing is told.
    """
    device = Device()
    device.structure = Digest("d" * 64)
    assert device.run(60.0, DAY) == []
    delays = []
    for per_s, structure in ((NIGHT, "e"), (DAY, "d"), (NIGHT, "e"), (DAY, "d")):
        began_s = device.driver.now
        (fired,) = device.run(20.0, per_s)
        assert fired.firing.cause is Cause.REGIME
        assert fired.firing.value > 2.0
        delays.append(device.fired[-1][0] - began_s)
        device.structure = Digest(structure * 64)
        assert device.run(60.0, per_s) == []
    assert delays[0] > 5.0
    assert max(delays[1:]) <= 15 / sum(NIGHT.values())
    for load in fired.loads:
        assert load.usual_per_s == load.arrivals_per_s == pytest.approx(DAY[load.model], rel=0.05)
    device = Device()
    device.structure = Digest("d" * 64)
    device.run(60.0, DAY)
    assert len(device.run(20.0, NIGHT)) == 1
    began_s = device.driver.now
    assert len(device.run(20.0, DAY)) == 1, "no plan came for the night"
    assert device.fired[-1][0] - began_s > 5.0


def device_that_knows_a_day() -> Device:
    """By night another plan runs than by day, and has for a while."""
    device = Device()
    device.structure = Digest("d" * 64)
    assert device.run(60.0, DAY) == []
    assert len(device.run(20.0, NIGHT)) == 1
    device.structure = Digest("e" * 64)
    assert device.run(60.0, NIGHT) == []
    return device


def test_a_regime_that_is_back_is_told_within_two_seconds_of_another_alarm() -> None:
    device = device_that_knows_a_day()
    began_s = device.driver.now
    device.alarms.trigger.another_plan(began_s)  # the cool-down begins
    (told,) = device.run(20.0, DAY)
    assert told.firing.cause is Cause.REGIME
    assert device.fired[-1][0] - began_s <= 2.0
    assert told.loads[0].arrivals_per_s == pytest.approx(DAY["a"], rel=0.05)


def test_arrivals_that_moved_are_told_while_a_plan_is_on_trial_and_nothing_else_is() -> None:
    device = device_that_knows_a_day()
    device.trying = True
    assert device.run(3.0, NIGHT | {"a": 40.0}) + device.run(20.0, NIGHT) == [], "a burst"
    began_s = device.driver.now
    (told,) = device.run(20.0, DAY)
    assert told.firing.cause is Cause.REGIME and device.fired[-1][0] - began_s <= 5.0
    assert told.moved_since_s is not None
    assert began_s <= told.moved_since_s <= device.fired[-1][0], "what the trial found since then counts"
    device = device_that_knows_a_day()
    device.held = True
    assert device.run(20.0, DAY) == [], "the agent itself measures, or guards a plan"


def test_arrivals_that_an_alarm_told_of_are_no_others_later_where_none_were_known_before() -> None:
    """A device that started twenty seconds ago would learn what came then together with what came since."""
    device = Device()
    assert device.run(20.0, {"a": 5.0, "b": 5.0}) == []
    (fired,) = device.run(3.0, {"a": 60.0, "b": 5.0})
    assert fired.firing.cause in (Cause.VARIANCE, Cause.OLDEST_AGE)
    device.trying = True
    assert device.run(60.0, {"a": 60.0, "b": 5.0}) == []
    (down,) = device.run(60.0, {"a": 5.0, "b": 5.0})
    assert down.firing.cause is Cause.REGIME


def test_an_alarm_waits_until_it_can_tell_how_much_comes_since_more_does() -> None:
    """Queues diverge at once; of ten seconds half would be those before."""
    device = Device()
    assert device.run(30.0, {"a": 4.0, "b": 1.0}) == []
    began_s = device.driver.now
    (fired,) = device.run(4.0, {"a": 60.0, "b": 10.0})
    assert 1.5 <= device.fired[-1][0] - began_s <= 2.5
    assert [load.arrivals_per_s for load in fired.loads] == pytest.approx([60.0, 10.0], rel=0.1)
