"""Plans that place their blocks on the twin: known rates are reached; the compiled twin refuses them."""

import pytest

from stageloom.planner.twin.arrivals import Periodic
from stageloom.planner.twin.reference import Twin
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.residency import Bus
from stageloom.shared.errors import PlanError
from stageloom.shared.plan import PlacementPolicy
from tests.engine.test_placing import halves
from tests.twin.cases import device, measured

SLOW = 3.0


def twin_of(bound: BoundPlan, rate_per_s: float, bus: Bus | None = None) -> Twin:
    """Head and tail take a second each on the fast resource."""
    times = measured(bound, {"a": 1.0}, device(cores=4))
    load = {"a": Periodic(rate_per_s=rate_per_s)}
    twin = Twin(times, load, slower={1: SLOW}, bus=bus)
    twin.deploy(bound)
    return twin


@pytest.mark.parametrize("policy", [PlacementPolicy.DM, PlacementPolicy.DMDA, PlacementPolicy.HEFT])
def test_tails_go_away_as_far_as_the_rate_needs_it(policy: PlacementPolicy) -> None:
    """g1 = g2 = 1, c2 = 3: f* = 2 / 4, and the highest rate is 1 / 1.5 where the fast one reaches 1 / 2."""
    twin = twin_of(halves(policy, replicas=6), 0.95 / 1.5)
    twin.run(100.0)
    window = twin.run(600.0)
    assert window.completed == pytest.approx(600.0 * 0.95 / 1.5, abs=4)
    assert window.glances[-1].queues[0].queued <= 2


def test_below_the_fast_resources_own_rate_nothing_is_slower_than_there() -> None:
    twin = twin_of(halves(replicas=6), 0.4)
    twin.run(60.0)  # calibrates
    (model,) = twin.run(200.0).models
    assert max(model.latencies_s) == pytest.approx(2.0)


def test_copies_take_the_bus_one_after_another() -> None:
    """With a bus that takes ten seconds a tensor no tail is worth sending, once it is known what it takes."""
    twin = twin_of(halves(replicas=6), 0.45, Bus(latency_s=10.0))
    twin.run(200.0)
    (model,) = twin.run(200.0).models
    assert max(model.latencies_s) == pytest.approx(2.0)


def test_the_compiled_twin_refuses_what_it_cannot_simulate() -> None:
    compiled = pytest.importorskip("stageloom.planner.twin.compiled.twin")
    bound = halves()
    twin = compiled.CompiledTwin(measured(bound, {"a": 1.0}), {"a": Periodic(rate_per_s=1.0)})
    with pytest.raises(PlanError, match="the compiled twin places no blocks, as placement dmda asks for"):
        twin.deploy(bound)
