"""When a re-plan is due: hysteresis, cool-down, the causes, and what a firing carries."""

import math
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from stageloom.shared.policy.plain import Load
from stageloom.shared.policy.queues import QueueMeasure
from stageloom.shared.policy.trigger import Cause, Firing, Trigger, TriggerConfig

PACE_S = 0.1


Seen = dict[str, Any]
"""What a trigger observes, by argument."""


def seen(
    *work_s: float, age_s: float = 0.0, deadlines_s: tuple[float, ...] = (0.0, 0.0), **fields: object
) -> Seen:
    """Queues with so many seconds of work in tasks of a millisecond; the first one holds the oldest task."""
    loads = tuple(
        Load(
            model=str(i),
            arrivals_per_s=0.0,
            service_s=0.001,
            queued=round(work * 1000),
            oldest_age_s=0.0 if i else age_s,
            deadline_s=deadlines_s[i] if i < len(deadlines_s) else 0.0,
        )
        for i, work in enumerate(work_s)
    )
    return {"loads": loads, "progress": ((1, 0),) * len(loads), **fields}


CALM = seen(0.1, 0.1)
DIVERGED = seen(0.0, 1.0)  # variance 0.25 s^2, four times the threshold
BETWEEN = seen(0.0, 0.45)  # 0.050625 s^2: below the threshold, above half of it


class Watch:
    """Feeds a trigger at an even pace; it starts with a full ring."""

    def __init__(self, config: TriggerConfig | None = None, first: Seen = CALM) -> None:
        self.trigger = Trigger(config)
        self.now = 0.0
        for _ in range(10):
            assert self.see(first) is None

    def see(self, observation: Seen) -> Firing | None:
        self.now += PACE_S
        return self.trigger.observe(**observation, now=self.now)

    def for_s(self, seconds: float, observation: Seen) -> list[Firing]:
        fired = [self.see(observation) for _ in range(round(seconds / PACE_S))]
        return [firing for firing in fired if firing is not None]


def test_queues_that_diverge_fire_with_value_threshold_and_samples() -> None:
    watch = Watch()
    firing = watch.see(DIVERGED)
    assert firing is not None
    assert (firing.cause, firing.at_s) == (Cause.VARIANCE, watch.now)
    assert (firing.value, firing.threshold) == pytest.approx((0.25, 0.0625))
    assert len(firing.samples) == 10
    assert firing.samples[-1].deviation == pytest.approx((-0.5, 0.5))
    assert firing.samples[0].deviation == pytest.approx((0.0, 0.0))


def test_the_threshold_itself_does_not_fire() -> None:
    assert Watch().for_s(1.0, seen(0.0, 0.5)) == []
    assert len(Watch().for_s(1.0, seen(0.0, 0.502))) == 1


def test_nothing_fires_before_the_ring_is_full() -> None:
    trigger = Trigger()
    fired = [trigger.observe(**DIVERGED, now=i * PACE_S) for i in range(10)]
    assert fired[:9] == [None] * 9
    assert fired[9] is not None
    assert len(fired[9].samples) == 10


def test_a_backlog_fires_once_and_not_at_every_sample() -> None:
    assert len(Watch().for_s(59.0, DIVERGED)) == 1


def test_it_is_armed_again_only_below_the_lower_border() -> None:
    watch = Watch()
    watch.see(DIVERGED)
    watch.for_s(15.0, BETWEEN)
    assert watch.for_s(5.0, DIVERGED) == []
    watch.see(CALM)
    assert len(watch.for_s(5.0, DIVERGED)) == 1


def test_a_divergence_in_the_cool_down_fires_when_that_is_over_if_it_still_stands() -> None:
    watch = Watch()
    first = watch.see(DIVERGED)
    assert first is not None
    watch.see(CALM)
    (second,) = watch.for_s(15.0, DIVERGED)
    assert 10.0 - 1e-9 <= second.at_s - first.at_s <= 10.0 + 2 * PACE_S
    watch.see(CALM)
    assert watch.for_s(3.0, DIVERGED) == []
    assert watch.for_s(20.0, CALM) == []


def test_a_replan_that_did_not_help_is_tried_again_after_a_minute() -> None:
    watch = Watch()
    first, second = watch.for_s(100.0, DIVERGED)
    assert second.at_s - first.at_s == pytest.approx(60.0, abs=2 * PACE_S)


def diverging_now_and_then(watch: Watch, seconds: float, observation: Seen = DIVERGED) -> list[Firing]:
    """Above the threshold for a second of every two, as queues are near saturation."""
    fired = []
    for _ in range(round(seconds / 2.0)):
        fired += watch.for_s(1.0, observation) + watch.for_s(1.0, CALM)
    return fired


def test_queues_that_go_on_to_diverge_are_told_less_and_less_often() -> None:
    fired = diverging_now_and_then(Watch(), 3600.0)
    waits = [round(b.at_s - a.at_s) for a, b in pairwise(fired)]
    assert waits[:6] == pytest.approx([10, 20, 40, 80, 160, 320], abs=2)
    assert waits[6:] == pytest.approx([640] * len(waits[6:]), abs=2)
    assert len(waits) == 10


def test_queues_that_diverge_twice_as_much_are_told_although_others_were_told_in_vain() -> None:
    watch = Watch()
    diverging_now_and_then(watch, 200.0)
    assert diverging_now_and_then(watch, 40.0) == []
    assert diverging_now_and_then(watch, 40.0, seen(0.0, 1.9)) == []
    (firing,) = diverging_now_and_then(watch, 40.0, seen(0.0, 2.1))
    assert firing.cause is Cause.VARIANCE and firing.value == pytest.approx(1.05**2)
    (firing,) = diverging_now_and_then(watch, 40.0, seen(0.1, 0.1, age_s=1.1))
    assert firing.cause is Cause.OLDEST_AGE, "twice its threshold, where no age was told"


@pytest.mark.parametrize(
    "news", ["another plan", "nobody heard", "other arrivals", "drift", "power mode", "quiet"]
)
def test_what_waits_is_news_once_something_else_has_happened(news: str) -> None:
    watch = Watch(first=seen(0.1, 0.1, power_mode=""))
    diverging_now_and_then(watch, 200.0)
    if news == "another plan":
        watch.trigger.another_plan(watch.now)
    elif news == "nobody heard":
        watch.trigger.unheard()
    elif news == "quiet":
        watch.for_s(1000.0, CALM)
    else:
        what: dict[str, Seen] = {
            "other arrivals": seen(0.1, 0.1, regime=3.0),
            "drift": seen(0.1, 0.1, drift=2.0),
            "power mode": seen(0.1, 0.1, power_mode="15W"),
        }
        assert len(watch.for_s(1.0, what[news])) == 1
    if news == "power mode":
        diverged = seen(0.0, 1.0, power_mode="15W")
        watch.for_s(11.0, seen(0.1, 0.1, power_mode="15W"))
        assert len(watch.for_s(1.0, diverged)) == 1
        return
    watch.for_s(11.0, CALM)
    first, second = diverging_now_and_then(watch, 25.0)
    assert second.at_s - first.at_s == pytest.approx(10.0, abs=2.0)


def test_tasks_that_are_far_more_urgent_than_those_told_of_are_heard() -> None:
    watch = Watch()
    diverging_now_and_then(watch, 200.0)
    watch.trigger.configure(TriggerConfig.with_deadlines([0.1]))
    (firing, *_) = diverging_now_and_then(watch, 20.0, seen(0.0, 0.0, age_s=0.09, deadlines_s=(0.1, 1.0)))
    assert firing.cause is Cause.OLDEST_AGE and firing.threshold == pytest.approx(0.05)


def test_a_device_with_one_queue_fires_by_the_oldest_tasks_age() -> None:
    watch = Watch(first=seen(0.1))
    assert watch.for_s(1.0, seen(50.0, age_s=0.5)) == []
    firing = watch.see(seen(50.0, age_s=0.6))
    assert firing is not None
    assert (firing.cause, firing.value, firing.threshold) == (Cause.OLDEST_AGE, 0.6, 0.5)


@pytest.mark.parametrize("drift", [1.3, 1 / 1.3])
def test_drift_in_either_direction_fires(drift: float) -> None:
    firing = Watch().see(seen(0.1, 0.1, drift=drift))
    assert firing is not None
    assert (firing.cause, firing.threshold) == (Cause.DRIFT, 1.25)
    assert firing.value == pytest.approx(1.3)


def test_drift_is_armed_again_half_way_to_none() -> None:
    watch = Watch()
    for drift, count in ((1.3, 1), (1.13, 0), (1.3, 0), (1.1, 0), (1.3, 1)):
        assert len(watch.for_s(11.0, seen(0.1, 0.1, drift=drift))) == count, drift


def test_another_power_mode_fires_once_and_says_from_which_to_which() -> None:
    watch = Watch(first=seen(0.1, 0.1, power_mode="15W"))
    (firing,) = watch.for_s(100.0, seen(0.1, 0.1, power_mode="MAXN"))
    assert (firing.cause, firing.detail) == (Cause.POWER_MODE, "15W to MAXN")


def test_a_power_mode_that_changes_in_the_cool_down_is_not_forgotten() -> None:
    watch = Watch(first=seen(0.1, 0.1, power_mode="15W"))
    watch.see(seen(0.0, 1.0, power_mode="15W"))
    (firing,) = watch.for_s(12.0, seen(0.1, 0.1, power_mode="MAXN"))
    assert firing.cause is Cause.POWER_MODE


def test_one_replan_answers_everything_that_is_above_its_threshold() -> None:
    watch = Watch()
    everything = seen(0.0, 1.0, age_s=2.0, drift=2.0)
    (firing,) = watch.for_s(50.0, everything)
    assert firing.cause is Cause.VARIANCE


def test_tops_threshold_on_task_counts_is_a_matter_of_two_fields() -> None:
    config = TriggerConfig(measure=QueueMeasure.TASKS, variance=2e5)
    firing = Watch(config).see(seen(0.0, 0.895))  # 0 and 895 tasks: 200256
    assert firing is not None
    assert (firing.value, firing.threshold) == (447.5**2, 2e5)
    assert firing.samples[-1].deviation == (-447.5, 447.5)
    assert Watch(config).see(seen(0.0, 0.894)) is None


def test_thresholds_follow_the_deadlines() -> None:
    config = TriggerConfig.with_deadlines([0.1, 2.0])
    assert (config.variance, config.oldest_age_s) == pytest.approx((0.025**2, 0.05))
    assert (TriggerConfig().variance, TriggerConfig().oldest_age_s) == (0.0625, 0.5)


def test_a_queue_counts_by_what_its_tasks_may_wait_beside_the_tightest_deadline() -> None:
    """Half of a deadline is an age that fires, and a quarter of it a deviation, whichever model it is of."""
    config = TriggerConfig.with_deadlines([0.02])
    both = (1.0, 0.02)
    for calm, diverged in (
        (seen(0.4, 0.0, deadlines_s=both), seen(0.6, 0.0, deadlines_s=both)),
        (seen(0.0, 0.008, deadlines_s=both), seen(0.0, 0.012, deadlines_s=both)),
        (seen(0.4, 0.008, deadlines_s=both), seen(0.6, 0.0, deadlines_s=both)),
    ):
        watch = Watch(config, first=calm)
        assert watch.for_s(20.0, calm) == []
        (firing,) = watch.for_s(1.0, diverged)
        assert firing.cause is Cause.VARIANCE and firing.threshold == pytest.approx(0.005**2)
        assert firing.value == pytest.approx(0.006**2)
    watch = Watch(config, first=CALM)
    assert watch.for_s(20.0, seen(0.0, 0.0, age_s=0.49, deadlines_s=both)) == []
    (firing,) = watch.for_s(1.0, seen(0.0, 0.0, age_s=0.51, deadlines_s=both))
    assert firing.cause is Cause.OLDEST_AGE
    assert (firing.value, firing.threshold) == pytest.approx((0.51, 0.5))
    counts = TriggerConfig(measure=QueueMeasure.TASKS, variance=1e4, tightest_s=0.02)
    (firing,) = Watch(counts).for_s(1.0, seen(0.6, 0.0, deadlines_s=both))
    assert firing.value == pytest.approx(9e4), "tasks are counted as in the paper"


def test_another_cut_of_a_model_waits_for_a_full_ring_of_its_own() -> None:
    watch = Watch()
    other = {**DIVERGED, "progress": ((1,), (0, 1))}
    fired = [watch.see(other) for _ in range(10)]
    assert fired[:9] == [None] * 9
    assert fired[9] is not None
    assert {sample.shape for sample in fired[9].samples} == {(1, 2)}


@pytest.mark.promise("alarm-sent-until-acknowledged")
@pytest.mark.parametrize("seed", range(100))
def test_firings_keep_their_distance_and_always_have_a_reason_and_all_samples(seed: int) -> None:
    rng = Random(seed)
    config = TriggerConfig(cooldown_s=3.0, retry_s=20.0)
    trigger = Trigger(config)
    now, work = 0.0, [0.1, 0.1, 0.1]
    fired: list[Firing] = []
    calm_since: dict[Cause, float] = {}
    for _ in range(1000):
        now += rng.uniform(0.01, 0.3)
        work = [max(0.0, queue + rng.gauss(0.0, 0.1)) for queue in work]
        observation = seen(*work, age_s=rng.uniform(0, 0.7), drift=math.exp(rng.gauss(0, 0.1)))
        firing = trigger.observe(**observation, now=now)
        if firing is not None:
            assert firing.value > firing.threshold
            assert len(firing.samples) == 10
            last = [earlier for earlier in fired if earlier.cause is firing.cause]
            if last:
                calm = calm_since.get(firing.cause, -1.0)
                assert calm > last[-1].at_s or now - last[-1].at_s >= config.retry_s
            fired.append(firing)
        mean = sum(work) / 3
        if sum((round(q * 1000) / 1000 - mean) ** 2 for q in work) / 3 < 0.5 * config.variance + 1e-4:
            calm_since[Cause.VARIANCE] = now
        if observation["loads"][0].oldest_age_s < 0.5 * config.oldest_age_s:
            calm_since[Cause.OLDEST_AGE] = now
        if max(observation["drift"], 1 / observation["drift"]) < math.sqrt(config.drift):
            calm_since[Cause.DRIFT] = now
    assert len(fired) > 3
    assert all(b.at_s - a.at_s >= config.cooldown_s for a, b in pairwise(fired))


@pytest.mark.parametrize(
    "fields",
    [
        {"variance": 0.0},
        {"drift": 1.0},
        {"regime": 1.0},
        {"rearm": 0.0},
        {"rearm": 1.1},
        {"cooldown_s": math.nan},
    ],
)
def test_a_trigger_that_would_always_or_never_fire_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no trigger"):
        TriggerConfig(**fields)  # type: ignore[arg-type]


def test_arrivals_that_moved_fire_once_until_they_are_what_the_plan_is_for() -> None:
    watch = Watch()
    moved = seen(0.1, 0.1, regime=2.5)
    assert watch.for_s(1.0, seen(0.1, 0.1, regime=1.9)) == []
    (firing,) = watch.for_s(20.0, moved)
    assert (firing.cause, firing.value, firing.threshold) == (Cause.REGIME, 2.5, 2.0)
    assert watch.for_s(10.0, seen(0.1, 0.1, regime=1.0)) == []
    assert len(watch.for_s(1.0, moved)) == 1


def test_other_arrivals_are_named_before_the_queues_that_they_fill() -> None:
    firing = Watch().see({**DIVERGED, "regime": 3.0})
    assert firing is not None and firing.cause is Cause.REGIME


def test_arrivals_that_moved_by_less_than_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no arrivals moved"):
        Watch().see(seen(0.1, 0.1, regime=0.9))


@pytest.mark.parametrize("drift", [0.0, -1.0, math.nan, math.inf])
def test_impossible_drift_is_refused(drift: float) -> None:
    with pytest.raises(ValueError, match="no drift"):
        Watch().see(seen(0.1, 0.1, drift=drift))


def test_nothing_fires_while_held_and_the_state_after_the_hold_is_judged_anew() -> None:
    watch = Watch()

    def held(observation: Seen) -> Firing | None:
        watch.now += PACE_S
        return watch.trigger.observe(**observation, now=watch.now, held=True)

    assert [held(DIVERGED) for _ in range(50)] == [None] * 50
    firing = watch.see(DIVERGED)
    assert firing is not None and firing.cause is Cause.VARIANCE, "it kept its turn"

    calm = Watch()
    assert [calm.trigger.observe(**DIVERGED, now=calm.now, held=True) for _ in range(5)] == [None] * 5
    assert calm.see(CALM) is None, "what the attempt has put right asks for nothing"


def test_while_a_plan_is_tried_only_other_arrivals_fire_and_at_once_even_in_the_cool_down() -> None:
    moved = seen(0.1, 0.1, regime=3.0)
    for at_once in (False, True):
        watch = Watch()
        before = watch.see(DIVERGED)
        fired = None
        while fired is None:
            watch.now += PACE_S
            fired = watch.trigger.observe(**moved, now=watch.now, trying=True, at_once=at_once)
        assert fired.cause is Cause.REGIME and before is not None
        assert fired.at_s - before.at_s == pytest.approx(PACE_S if at_once else 10.0, abs=PACE_S)

    watch = Watch()
    for given in (DIVERGED, seen(0.1, 0.1, power_mode="15W"), seen(0.1, 0.1, drift=3.0)):
        for _ in range(20):
            watch.now += PACE_S
            assert watch.trigger.observe(**given, now=watch.now, trying=True) is None
    watch.now += PACE_S
    assert watch.trigger.observe(**moved, now=watch.now, held=True, at_once=True) is None


def test_other_arrivals_fire_while_plans_of_other_cuts_change_places_sooner_than_the_ring_fills() -> None:
    """Windows of a quarter of a second: every third sample or so is of another shape."""
    watch, fired = Watch(), None
    watch.see(DIVERGED)
    for at in range(120):
        watch.now += PACE_S
        cuts = ((1,), (1, 0)) if at // 3 % 2 else ((1, 0), (1, 0))
        moved = CALM | {"regime": 3.0, "progress": cuts}
        fired = watch.trigger.observe(**moved, now=watch.now, trying=True)
        if fired is not None:
            break
    assert fired is not None and fired.cause is Cause.REGIME
    assert 1 <= len(fired.samples) <= 3 and len({sample.shape for sample in fired.samples}) == 1


def test_thresholds_may_change_without_firing_again_for_the_same_backlog() -> None:
    watch = Watch()
    assert watch.see(DIVERGED) is not None
    watch.trigger.configure(TriggerConfig.with_deadlines([0.4]))
    assert watch.for_s(20.0, DIVERGED) == [], "above the new threshold too, but not armed"
    assert watch.for_s(1.0, CALM) == []
    firing = next(iter(watch.for_s(1.0, seen(0.0, 0.45, deadlines_s=(0.4, 0.4)))))
    assert firing.threshold == pytest.approx(0.01), "a quarter of 0.4 s, squared"
    with pytest.raises(ValueError, match="measure"):
        watch.trigger.configure(TriggerConfig(measure=QueueMeasure.TASKS))
