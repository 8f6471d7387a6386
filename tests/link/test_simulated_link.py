"""Both cores against each other in a bad world; `simulator` checks all along and at the end."""

import pytest

from shared.messages.control import DeviceState
from tests.link import simulator

BATCH = 50


@pytest.mark.parametrize("first", range(0, 500, BATCH))
def test_the_link_converges_and_keeps_its_books_under_faults(first: int) -> None:
    for seed in range(first, first + BATCH):
        simulator.run(seed)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(10_000, 20_000, 500))
def test_the_link_converges_in_ten_thousand_worlds(first: int) -> None:
    for seed in range(first, first + 500):
        simulator.run(seed)


def test_the_scenarios_visit_every_state_and_every_fault() -> None:
    """A simulator that never gets anywhere proves nothing."""
    worlds = [simulator.run(seed) for seed in range(500, 530)]
    assert {state for world in worlds for state in world.device.visited} >= {
        DeviceState(name)
        for name in (
            "received",
            "waiting",
            "verified",
            "staged",
            "probation",
            "committed",
            "rejected",
            "rolled_back",
        )
    }
    assert any(world.restored for world in worlds)
    assert any(world.device.life > 3 for world in worlds)
    assert any(ledger.dropped for world in worlds for ledger in world.store.ledgers.values())
