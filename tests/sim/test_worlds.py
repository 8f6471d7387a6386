"""Planner, link, plan manager and engine together in bad worlds; `watch` checks after every step."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from stageloom.shared.engine.steps import Outcome
from stageloom.shared.messages.control import DeviceState
from tests.sim import world
from tests.sim.faults import Faults

BATCH = 60
USUAL = 3
"""Batches of `make test` (one) and `make test-more`; `full` has the others, and ten thousand worlds."""
COVERING = 80
"""Worlds that must have visited everything between them; with all batches, five hundred."""


@pytest.mark.promise(
    "converges-under-loss-delay", "two-committed-plans-generations", "produced-stored-dropped-spooled"
)
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(
            first, marks=pytest.mark.full if first >= USUAL * BATCH else pytest.mark.more if first else []
        )
        for first in range(0, 500 - COVERING, BATCH)
    ],
)
def test_worlds_keep_every_promise_and_converge_after_the_last_fault(first: int) -> None:
    for seed in range(first, first + BATCH):
        world.run(seed)


@pytest.mark.promise("converges-under-loss-delay", "two-committed-plans-generations")
@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(10_000, 20_000, 500))
def test_ten_thousand_worlds_keep_every_promise_and_converge(first: int) -> None:
    for seed in range(first, first + 500):
        world.run(seed)


@pytest.mark.more
@pytest.mark.promise("converges-under-loss-delay", "two-committed-plans-generations")
def test_worlds_visit_every_state_and_every_fault() -> None:
    """A simulator that never gets anywhere proves nothing."""
    happened: Counter[str] = Counter()
    states: set[DeviceState] = set()
    points: set[str] = set()
    outcomes: Counter[Outcome] = Counter()
    for seed in range(500 - COVERING, 500):
        played = world.run(seed)
        happened += played.happened
        states |= played.watch.states
        points |= played.points
        outcomes += played.outcomes
        assert played.watch.checks == played.steps, "every step is checked"
    kinds = set(Faults.__dataclass_fields__) - {"delay_s", "slow_store_s", "cut", "loss", "repeat"}
    kinds -= {"engine_crash"}
    wanted = kinds | {"lost", "repeated", "engine_exit", "cut (0,)", "cut (1,)", "cut (0, 1)"}
    assert wanted <= {name for name, count in happened.items() if count}
    assert states >= set(DeviceState) - {DeviceState.NO_GAIN}
    assert {point for point in points if point.startswith("agent.")} >= {
        "agent.state.before",
        "agent.state.after",
        "agent.file.written",
        "agent.file.previous",
        "agent.spool.append",
        "agent.spool.marked",
        "agent.spool.ack",
        "agent.spool.ledger",
        "agent.spool.remove",
        "agent.artifact.append",
        "agent.artifact.rename",
        "agent.artifact.renamed",
    }
    assert {Outcome.COMPLETED, Outcome.FAILED} <= set(outcomes)


def test_a_seed_is_the_same_world_in_every_process() -> None:
    """What is replayed must be what failed, whatever order a set of strings has in that process."""

    def played(hash_seed: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "tests.sim", "7"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout

    assert played("1") == played("2")


def test_a_broken_promise_comes_with_its_seed_and_the_last_events() -> None:
    with pytest.raises(AssertionError) as caught, world.world(3) as made:
        made.begin()
        made.until(5.0)
        raise AssertionError("something")
    (note,) = caught.value.__notes__
    assert "replay with: python -m tests.sim 3" in note
    assert "agent    -> Hello" in note
