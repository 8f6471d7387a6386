"""Whatever legal plans follow each other, time goes on, tasks are conserved, and nothing runs twice."""

from random import Random

import pytest

from stageloom.planner.twin.arrivals import Bursty, Periodic, Poisson, Process
from stageloom.planner.twin.reference import Twin
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.search.costs import CostTable
from tests.engine.generate import random_library, random_plan
from tests.twin.cases import device


def _process(random: Random) -> Process:
    rate = random.choice([50.0, 300.0, 2000.0])
    kinds: list[Process] = [
        Periodic(rate_per_s=rate),
        Poisson(rate_per_s=rate),
        Bursty(on_rate_per_s=2 * rate, mean_on_s=0.02, mean_off_s=0.02),
    ]
    return random.choice(kinds)


@pytest.mark.promise("twin-agrees-queueing-theory")
@pytest.mark.parametrize("seed", range(25))
def test_tasks_are_conserved_whatever_plans_follow_each_other(seed: int) -> None:
    """Plans of any cut, wait rule, step choice and queue; models come, go, and change under their name."""
    random = Random(seed)
    library = random_library(random)
    names = sorted(set(library.names.values()))
    toy = device(
        launch_s=2e-4,
        step_s=1e-5,
        lanes_interference=0.2,
        cores=2,
        noise=((0.0, 0.5), (0.5, 1.0), (1.0, 2.0)),
    )
    twin = Twin(
        StepTimes(toy, CostTable(rates=toy.rates())),
        {name: _process(random) for name in names},
        shared={tuple(names): Poisson(rate_per_s=40.0)} if len(names) > 1 else None,
        seed=seed,
        deadlines_s={name: 0.02 for name in names if random.random() < 0.4},
    )
    ended_s = 0.0
    for _ in range(4):
        twin.deploy(random_plan(random, library))
        window = twin.run(random.uniform(0.02, 0.15), sample_at_s=[0.01])
        assert window.began_s == ended_s
        ended_s = twin.now_s
        stats = twin.stats
        assert stats.submitted == stats.ended.total + stats.open_tasks
        assert stats.ended.failed == 0 or len(names) > 1  # only the parts of shared tasks may fail
        assert window.open_after == stats.open_tasks
        assert 0.0 <= window.busy_s <= window.seconds * (1 + 1e-9)
        assert (window.used_s or 0.0) <= window.busy_s * (1 + 1e-9)
        lanes = max(len(stats.lane_loads), 1)
        assert sum(one.sum_s for one in window.steps) <= lanes * (window.seconds + 1.0)
        assert all(latency > 0.0 for model in window.models for latency in model.latencies_s)
        assert all(glance.at_s == pytest.approx(window.began_s + 0.01) for glance in window.glances)
    assert len(stats.loaded) <= 4
