"""One planner that has imported two networks, per worker; a device of its own for each test."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.e2e.fleet import Device, Fleet
from tests.e2e.networks import write_chain

MODELS = {"alpha": 1, "beta": 2}
_NUMBERS = count(1)
BOTH = ("--model", "alpha", "--model", "beta")


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The networks' ONNX files by name."""
    folder = tmp_path_factory.mktemp("networks")
    return {name: write_chain(folder / f"{name}.onnx", seed) for name, seed in MODELS.items()}


def stocked(folder: Path, files: dict[str, Path]) -> Fleet:
    """A planner with both networks and three plans.

    `whole`: a block per model. `cut`: the same networks in other blocks, two replicas and lanes. `alpha`: one
    of the two networks only.
    """
    fleet = Fleet(folder)
    for name, file in files.items():
        fleet.do("model", "add", str(file), "--name", name)
    fleet.make_plan("whole", *BOTH)
    both_twice = (word for name in MODELS for word in ("--model", f"{name}:replicas=2"))
    fleet.make_plan("cut", *both_twice, "--partition", "base", "--lanes", "2")
    fleet.make_plan("alpha", "--model", "alpha")
    return fleet


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]) -> Iterator[Fleet]:
    fleet = stocked(tmp_path_factory.mktemp("fleet"), files)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Fleet:
    """The worker's planner, running whatever the test before did to it."""
    if not shared_fleet.runs:
        shared_fleet.start()
    return shared_fleet


@pytest.fixture
def own_fleet(tmp_path: Path, files: dict[str, Path]) -> Iterator[Fleet]:
    """A planner for this test alone, whose data the test may spoil."""
    fleet = stocked(tmp_path / "own", files)
    yield fleet
    fleet.close()


@pytest.fixture
def device(fleet: Fleet, tmp_path: Path) -> Iterator[Device]:
    """Joined and not started, under a name that no test had before."""
    with Device(fleet, f"device-{next(_NUMBERS)}", tmp_path) as found:
        yield found.join()
