"""The twin against queueing theory, its books, and its seed."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from stageloom.planner.learning.maddpg.work import samples_of
from stageloom.planner.twin.arrivals import Bursty, Periodic, Poisson, Process
from stageloom.planner.twin.reference import Twin
from stageloom.planner.twin.window import TargetDevice, Window
from stageloom.shared.bound import BoundPlan
from stageloom.shared.errors import PlanError
from stageloom.shared.plan import QueuePlan, QueueRule
from stageloom.shared.policy.queues import QueueMeasure
from tests.engine.plans import chains, models_of, with_models
from tests.twin.cases import device, measured

Load = Mapping[str, Process]


def deployed(bound: BoundPlan, seconds: Mapping[str, float], load: Load, **options: object) -> Twin:
    twin = Twin(measured(bound, seconds), load, **options)  # type: ignore[arg-type]
    twin.deploy(bound)
    return twin


def conserves(window: Window) -> bool:
    """Tasks that came, in this window or before, have ended or are open; for tasks of one model each."""
    came = window.open_before + sum(model.submitted for model in window.models)
    return came == window.open_after + sum(model.ended.total for model in window.models)


def test_a_twin_is_a_device() -> None:
    bound = chains(1)
    twin: TargetDevice = deployed(bound, {"a": 0.01}, {"a": Periodic(rate_per_s=10.0)})
    assert twin.run(1.0).completed == 10


def test_an_underloaded_periodic_queue_is_exact() -> None:
    """D/D/1 below capacity: every task takes its service time, throughput is the rate, nothing queues."""
    bound = chains(4)
    window = deployed(bound, {"a": 0.005}, {"a": Periodic(rate_per_s=25.0)}).run(10.0)
    (model,) = window.models
    assert model.submitted == 250
    assert window.completed == 250
    assert model.latencies_s == pytest.approx([0.02] * 250)
    assert window.p99_s == pytest.approx(0.02)
    assert window.busy_s == pytest.approx(250 * 0.02)
    assert window.utilisation == pytest.approx(0.5)
    assert model.service_s == pytest.approx(0.02)
    assert window.busy_s_per_task == pytest.approx(0.02)
    assert {queue.queued for glance in window.glances for queue in glance.queues} == {0}
    assert [(one.combined, one.mask, one.count) for one in window.steps] == [(c, 1, 250) for c in range(4)]


@pytest.mark.promise("twin-agrees-queueing-theory")
def test_an_overloaded_periodic_queue_grows_as_it_must() -> None:
    """D/D/1 above capacity: one completion per service time, task n waits n (service - gap).

    Powers of two, so that no time is rounded. Beside the queue one task runs, one is next, one has the slot.
    """
    bound = chains(1, fields={"queue": QueuePlan(max_tasks=10_000)})
    window = deployed(bound, {"a": 2**-6}, {"a": Periodic(rate_per_s=128.0)}).run(8.0, sample_at_s=[4.0])
    (model,) = window.models
    assert window.completed == 511  # the 512th ends as the window does, which is the next one's
    assert model.latencies_s == tuple(2**-6 + n * 2**-7 for n in range(511))
    assert window.utilisation == 1.0
    assert model.queued == 1024 - 511 - 3
    assert window.glances[0].queues[0].queued == 513 - 256 - 3


@pytest.mark.promise("twin-agrees-queueing-theory")
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_the_mean_wait_under_poisson_arrivals_is_that_of_an_md1_queue(load: float) -> None:
    """Pollaczek and Khinchine: mean wait = load * service / (2 (1 - load))."""
    bound = chains(1, fields={"queue": QueuePlan(max_tasks=100_000)})
    rate = load / 0.01
    window = deployed(bound, {"a": 0.01}, {"a": Poisson(rate_per_s=rate)}, seed=11).run(
        6_000 / rate, sample_at_s=()
    )
    waits = [latency - 0.01 for latency in window.models[0].latencies_s]
    means = [math.fsum(waits[i::20]) / len(waits[i::20]) for i in range(20)]  # to see the spread, roughly
    mean = math.fsum(waits) / len(waits)
    assert min(waits) >= -1e-9
    assert mean == pytest.approx(load * 0.01 / (2 * (1 - load)), rel=0.12)
    assert max(means) - min(means) < mean
    assert window.utilisation == pytest.approx(load, rel=0.03)


def test_a_pipeline_of_lanes_has_the_throughput_of_its_slowest_block() -> None:
    """Two lanes and steps that leave room for each other: two replicas double the throughput."""
    load: Load = {"a": Periodic(rate_per_s=1000.0)}
    rates = []
    for replicas in (1, 2):
        bound = chains(1, lanes=2, fields={"replicas": replicas, "queue": QueuePlan(max_tasks=9999)})
        toy = device(cores=2)
        twin = Twin(measured(bound, {"a": 0.01}, toy), load)
        twin.deploy(bound)
        rates.append(twin.run(3.0, sample_at_s=()).throughput_per_s)
    assert rates == [pytest.approx(100.0, abs=0.4), pytest.approx(200.0, abs=0.8)]


@pytest.mark.parametrize("rule", QueueRule)
def test_tasks_are_conserved_over_windows_and_swaps(rule: QueueRule) -> None:
    """Arrivals = completed + refused + expired + open, in every window, whatever plan runs."""
    queue = QueuePlan(rule=rule, max_tasks=5)
    load: Load = {
        "a": Poisson(rate_per_s=90.0),
        "b": Bursty(on_rate_per_s=300.0, mean_on_s=0.2, mean_off_s=0.3),
    }
    plans = [
        chains(3, 2, fields={"queue": queue}),
        chains(
            2, 4, groups=[[(0, 0, 0), (1, 0, 0)], [(0, 0, 1), (1, 0, 1)], [(1, 0, 2)], [(1, 0, 3)]], lanes=2
        ),
        chains(3, 2, fields={"queue": queue, "batch": 4, "replicas": 2}, lanes=3),
    ]
    seconds = {"a": 0.004, "b": 0.003}
    twin = Twin(measured(plans[1], seconds), load, seed=5, deadlines_s={"b": 0.05})
    ways: set[str] = set()
    at_s = 0.0
    for turn in range(9):
        twin.deploy(plans[turn % 3])
        window = twin.run(0.7)
        assert conserves(window)
        assert window.began_s == pytest.approx(at_s)
        at_s += 0.7
        assert 0.0 <= (window.used_s or 0.0) <= window.busy_s <= window.seconds + 1e-9
        for model in window.models:
            ways |= {way for way in ("completed", "refused", "expired") if getattr(model.ended, way)}
            assert all(latency > 0.0 for latency in model.latencies_s)
        times = [glance.at_s for glance in window.glances]
        assert times == sorted(times)
        assert len(times) == 7
    assert ways == {"completed", "refused", "expired"}
    assert len(twin.stats.loaded) <= 2  # superseded plans go once they are empty


def test_a_shared_task_counts_in_each_model_and_ends_once() -> None:
    bound = chains(1, 1, groups=[[(0, 0, 0), (1, 0, 0)]])
    twin = deployed(bound, {"a": 0.01, "b": 0.02}, {}, shared={("a", "b"): Periodic(rate_per_s=10.0)})
    window = twin.run(5.0)
    assert [model.ended.completed for model in window.models] == [50, 50]
    assert twin.stats.ended.completed == 50
    assert window.models[0].latencies_s == pytest.approx([0.03] * 50)


@pytest.mark.promise("twin-agrees-queueing-theory")
def test_equal_seeds_give_equal_windows_and_others_do_not() -> None:
    bound = chains(3, 2, lanes=2)
    load: Load = {"a": Poisson(rate_per_s=60.0), "b": Poisson(rate_per_s=90.0)}
    toy = device(noise=((0.0, 0.8), (0.5, 1.0), (1.0, 1.5)))

    def windows(seed: int) -> list[Window]:
        twin = Twin(measured(bound, {"a": 0.003, "b": 0.002}, toy), load, seed=seed)
        twin.deploy(bound)
        return [twin.run(1.0), twin.run(1.0)]

    assert windows(1) == windows(1)
    assert windows(1) != windows(2)


def test_windows_add_up_to_one_long_window() -> None:
    bound = chains(2, 2, lanes=2)
    load: Load = {"a": Poisson(rate_per_s=80.0), "b": Periodic(rate_per_s=70.0)}
    seconds = {"a": 0.003, "b": 0.004}
    whole = deployed(bound, seconds, load, seed=3).run(4.0)
    twin = deployed(bound, seconds, load, seed=3)
    parts = [twin.run(span) for span in (0.35, 1.65, 0.8, 1.2)]
    for index, model in enumerate(whole.models):
        joined = [one for part in parts for one in part.models[index].latencies_s]
        assert joined == pytest.approx(model.latencies_s)
    assert sum(part.busy_s for part in parts) == pytest.approx(whole.busy_s)
    assert parts[-1].open_after == whole.open_after


def test_the_queues_are_looked_at_when_asked() -> None:
    """Samples as a policy reads them, in tasks: one block of a busy, a queue of 3 tasks of 0.01 s at b."""
    bound = chains(2, 1, fields={"queue": QueuePlan(max_tasks=3)})
    load: Load = {"a": Periodic(rate_per_s=1.0), "b": Periodic(rate_per_s=1000.0, offset_s=0.5)}
    twin = deployed(bound, {"a": 0.1, "b": 0.01}, load)
    window = twin.run(1.0, sample_at_s=[0.05, 0.15, 0.4, 0.9])
    assert [glance.at_s for glance in window.glances] == [0.05, 0.15, 0.4, 0.9]
    samples = samples_of(window.glances, (1.0, 1.0))
    assert [sample.progress for sample in samples] == [
        ((1, 0), (0,)),
        ((0, 1), (0,)),
        ((0, 0), (0,)),
        ((0, 0), (1,)),
    ]
    assert samples[-1].deviation == (-1.5, 1.5)
    assert window.queue_variance(QueueMeasure.TASKS) == pytest.approx(1.5**2 / 4)
    assert window.queue_variance() == pytest.approx((1.5 * window.models[1].service_s) ** 2 / 4)


def test_the_queue_of_a_starved_model_counts_with_the_others_service() -> None:
    """b's launches are an hour apart, so that only its first task runs, and that before the window."""
    strict = models_of([1, 1], launch_interval_us=3_600_000_000, work_conserving=False)
    bound = with_models([replace(strict[0], launch_interval_us=0), strict[1]])
    load: Load = {"a": Periodic(rate_per_s=10.0), "b": Periodic(rate_per_s=10.0)}
    twin = deployed(bound, {"a": 0.02, "b": 0.01}, load)
    twin.run(1.0)
    window = twin.run(1.0, sample_at_s=[0.99])
    assert [model.ended.completed for model in window.models] == [10, 0]
    (glance,) = window.glances
    queued = glance.queues[1].queued
    assert queued > 10
    assert window.queue_variance() == pytest.approx((queued * 0.02 / 2) ** 2)


def test_what_a_window_tells_as_telemetry_says_the_same() -> None:
    bound = chains(2, 1)
    load: Load = {"a": Poisson(rate_per_s=40.0), "b": Poisson(rate_per_s=40.0)}
    window = deployed(bound, {"a": 0.004, "b": 0.006}, load).run(5.0)
    found = [type(row).__name__ for row in window.rows()]
    assert found.count("TaskCounters") == found.count("LatencyHistogram") == found.count("QueueSample") == 2
    assert found.count("StepTimings") == 3
    assert found.count("Utilisation") == 1


def test_nothing_runs_before_a_plan_is_deployed() -> None:
    bound = chains(1)
    with pytest.raises(PlanError, match="deploy a plan first"):
        Twin(measured(bound, {"a": 0.01}), {"a": Poisson(rate_per_s=1.0)}).run(1.0)
