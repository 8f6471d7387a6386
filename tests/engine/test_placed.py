"""Placement in a simulation: what holds in any run, defects that are found, and rates that are known."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from stageloom.shared.engine.history import HistoryRule
from stageloom.shared.engine.placement import ReadyTask, Worker
from stageloom.shared.engine.residency import Bus, NodeId, Residency
from stageloom.shared.plan import PlacementPolicy
from tests.engine.placed import (
    CUTS,
    Scene,
    SlotName,
    World,
    evenly,
    highest_rate,
    keeps_up,
    known_rate,
    poisson,
    two_resources,
)

PUSHING = [PlacementPolicy.DM, PlacementPolicy.DMDA, PlacementPolicy.HEFT]


def random_scene(seed: int) -> tuple[Scene, list[float]]:
    """Up to four parts on up to three resources, with bytes at the borders, noise, and a replica or more."""
    random = Random(seed)
    resources, parts = random.randint(1, 3), random.randint(1, 4)
    durations = [[random.uniform(0.1, 3.0) for _ in range(resources)] for _ in range(parts)]
    scene = Scene(
        parts_s=durations,
        border_bytes=[random.choice([0, 100, 1000]) for _ in range(parts)],
        nodes=[random.randrange(resources) for _ in range(resources)],
        bus=Bus(latency_s=random.choice([0.0, 0.2]), bytes_per_s=random.choice([1e3, 1e9])),
        replicas=random.randint(1, 5),
        policy=random.choice(list(PlacementPolicy)),
        rule=random.choice(list(HistoryRule)),
        beta=random.choice([0.0, 1.0]),
        spread=random.choice([0.0, 0.5]),
        calibrated=random.random() < 0.7,
        prefetch=random.random() < 0.8,
    )
    rate = random.uniform(0.2, 1.5) / sum(min(one) for one in durations)
    return scene, poisson(rate, 40, seed)


@pytest.mark.parametrize("seed", range(60))
def test_every_part_runs_once_on_data_that_is_valid_and_leaves_nothing_booked(seed: int) -> None:
    scene, arrivals_s = random_scene(seed)
    World(scene, arrivals_s, seed).run()


def _keep_begun(self: Worker, task: object) -> None:
    self._placed.pop(task, None)


def _never_renewed(self: Worker, now: float) -> float:
    return min(self._begun.values()) if len(self._begun) >= self.spec.lanes else now


def _still_in_the_queue(self: Worker, task: object, now: float) -> None:
    self._begun[task] = now + self._placed[task][0]


def _nothing_missing(self: Residency[SlotName], slots: object, node: NodeId) -> tuple[SlotName, ...]:
    return ()


def _remembers(self: Residency[SlotName], slot: SlotName) -> None:
    """What lay in the slot once is thought to lie there still; `write` then only adds a node."""


def _adds(self: Residency[SlotName], slot: SlotName, node: NodeId, tensor_bytes: list[int]) -> None:
    nodes = self._slots[slot].nodes if slot in self._slots else 0
    _WRITE(self, slot, node, tensor_bytes)
    self._slots[slot].nodes |= nodes


_WRITE = Residency.write

DEFECTS: dict[str, tuple[type, dict[str, Callable[..., object]], str]] = {
    "prediction not subtracted": (Worker, {"take_back": _keep_begun}, "not taken back"),
    "prediction counted twice": (Worker, {"begin": _still_in_the_queue}, "not taken back"),
    "exp_start not renewed": (Worker, {"exp_start_s": _never_renewed}, "exp_start lies in the past"),
    "missing copy": (Residency, {"missing": _nothing_missing}, "where it is not valid"),
    "stale residency": (Residency, {"release": _remembers, "write": _adds}, "where it is not valid"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_simulation_finds_what_is_planted(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, methods, message = DEFECTS[defect]
    scene = Scene(
        parts_s=[[1.0, 3.0], [0.5, 1.0]],
        border_bytes=[100, 100],
        nodes=[0, 1],
        bus=Bus(bytes_per_s=1e3),
        replicas=3,
        spread=0.3,
    )
    arrivals_s = evenly(0.9, 60)
    World(scene, arrivals_s).run()
    for name, method in methods.items():
        monkeypatch.setattr(owner, name, method)
    with pytest.raises(AssertionError, match=message):
        World(scene, arrivals_s).run()


@pytest.mark.parametrize("policy", PUSHING)
@pytest.mark.parametrize(("slow", "tail"), CUTS)
def test_evenly_spaced_batches_reach_the_known_rate(
    policy: PlacementPolicy, slow: float, tail: float
) -> None:
    reached = highest_rate(two_resources(slow, tail, policy, heads=(0,)), known_rate(slow, tail))
    assert 0.975 <= reached <= 1.0
    if (slow, tail) == (3.0, 0.25):
        assert reached >= 0.99


@pytest.mark.parametrize("policy", PUSHING)
def test_below_the_fast_ones_own_rate_nothing_goes_to_the_slow_one(policy: PlacementPolicy) -> None:
    played = World(two_resources(3.0, 0.25, policy), evenly(0.7, 300)).run()
    assert not any(played.away)
    assert max(played.latencies_s) == pytest.approx(1.0)


@pytest.mark.parametrize("policy", PUSHING)
def test_no_rate_above_the_known_one_is_kept_while_heads_stay(policy: PlacementPolicy) -> None:
    scene = two_resources(3.0, 0.1, policy, heads=(0,))
    assert not keeps_up(World(scene, evenly(1.02 * known_rate(3.0, 0.1), 600)).run())


def test_ranks_across_batches_would_starve_the_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads alone are more than the resource can carry, and have the larger rank: no tail's turn comes."""
    scene = Scene(parts_s=[[0.75], [0.25]], policy=PlacementPolicy.HEFT, replicas=64)
    fair = World(scene, evenly(1.5, 60)).run()
    monkeypatch.setattr(ReadyTask, "order", property(lambda self: (0, -self.rank_s)))
    starved = World(scene, evenly(1.5, 60)).run()
    assert fair.latencies_s[5] < 4.0
    assert starved.latencies_s[5] > 40.0


@pytest.mark.parametrize("policy", PUSHING)
def test_a_slow_resource_that_becomes_slower_gets_the_share_it_can_carry(policy: PlacementPolicy) -> None:
    """From k = 3 to k = 9, at the highest rate of k = 9: f* = 1 / (0.25 + 2.25).

    Five tails are there before the first has told; what they take shows for some 40 batches.
    """
    before = two_resources(3.0, 0.25, policy, heads=(0,))
    scene = Scene(parts_s=before.parts_s, policy=policy, allowed=before.allowed, slows_at=100, slower=3.0)
    played = World(scene, evenly(0.995 * known_rate(9.0, 0.25), 400)).run()
    settled = played.away[160:380]
    assert sum(settled) / len(settled) == pytest.approx(0.4, rel=0.1)
    assert played.most_waiting <= 6


def test_copies_shorter_than_the_queue_cost_nothing_if_prefetched_and_show_if_not() -> None:
    """Saturated: batches come faster than they are served, so that there always is a queue."""
    scene = Scene(
        parts_s=[[1.0, 100.0], [100.0, 1.0]],
        border_bytes=[0, 500],
        nodes=[0, 1],
        bus=Bus(bytes_per_s=1e3),
        policy=PlacementPolicy.DMDA,
    )
    ahead = World(scene, [0.0] * 50).run()
    late = World(replace(scene, prefetch=False), [0.0] * 50).run()
    assert max(ahead.latencies_s) == pytest.approx(51.5)
    assert max(late.latencies_s) >= max(ahead.latencies_s) + 20
    assert late.idle_for_copies_s > 20
