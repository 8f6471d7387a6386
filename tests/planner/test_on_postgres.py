"""A real planner process whose database is a Postgres server, and the commands beside it."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from benchmarks.adversary.postgres import binaries, postgres_server
from stageloom.planner.cli.app import execute
from stageloom.planner.store.store import Store
from stageloom.planner.store.used_database import USED_FILE
from stageloom.shared.errors import ExitCode
from tests.planner.processes import PlannerProcess, ok, plan_file, stageloom
from tests.planner.test_measuring import Measuring
from tests.planner.test_replanning import SETTINGS, Rig, new_device, stock


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a server of this file's own: its connections are ended here."""
    programs = binaries()
    if programs is None:
        pytest.skip("no Postgres: install the extra `dev`")
    with postgres_server(programs) as server:
        yield server.url


@pytest.fixture(scope="module")
def planner(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlannerProcess]:
    """A planner on that server."""
    folder = tmp_path_factory.mktemp("on-postgres")
    (folder / "planner.toml").write_text(f'{SETTINGS}database_url = "{server}"\n')
    (folder / "home").mkdir(mode=0o700)
    Store(folder / "home").close()  # what a planner left there before it had a server
    made = PlannerProcess(folder / "home", "--config", str(folder / "planner.toml"))
    yield made
    made.stop()


def told(server: str, *statements: str) -> None:
    """Have the server carry out statements that no transaction may hold."""
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for one in statements:
            connection.execute(text(one))
    engine.dispose()


def created(server: str, name: str) -> str:
    """The URL of a new database."""
    told(server, f"CREATE DATABASE {name}")
    return make_url(server).set(database=name).render_as_string(hide_password=False)


def end_sessions(server: str, name: str) -> None:
    """As a restart of the server does."""
    told(server, f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = '{name}'")


@pytest.mark.more
def test_whatever_has_a_device_measure_stages_waits_for_it_in_the_planners_database(
    planner: PlannerProcess, model_file: Path, tmp_path: Path
) -> None:
    home = planner.home
    stock(home, model_file)
    with new_device(home) as device:
        measuring = Measuring(Rig(planner, device))
        measuring.start()
        searched = ("--model", "branches", "--device", device.name, "--json")
        measure = ("--from", plan_file(tmp_path / "measure.toml", measure_s=5.0, executor="null"))
        null = ("--from", plan_file(tmp_path / "null.toml", executor="null"))
        try:
            profiled = json.loads(ok(home, "device", "profile", device.name, "--plan", "first", "--json"))
            made = json.loads(ok(home, "plan", "create", "--scheduler", "ios", *searched, *measure))
            compare = ("scheduler", "compare", "--scheduler", "greedy", *searched, "--measure", "5", *null)
            (row,) = json.loads(ok(home, *compare))
        finally:
            measuring.ended.set()
            measuring.join()
    assert len(profiled["requests"]) == 1
    assert made["scheduler"] == "ios"
    assert row["measured_ms"] == 2.0, "as the device said"


def test_commands_read_the_database_that_the_planner_was_given_by_its_configuration(
    planner: PlannerProcess, model_file: Path
) -> None:
    home = planner.home
    ok(home, "model", "add", str(model_file), "--name", "given", "--shape", "x=3x8")
    ok(home, "plan", "create", "--model", "given", "--name", "given")
    assert "given" in [one["model"] for one in json.loads(ok(home, "model", "list", "--json"))]
    assert "given" in [one["plan"] for one in json.loads(ok(home, "plan", "list", "--json"))]
    assert "combined given#0.0" in ok(home, "plan", "show", "given")
    assert stat.S_IMODE((home / USED_FILE).stat().st_mode) == 0o600, "a URL may hold a password"


def test_a_migration_of_another_database_than_the_running_planners_is_refused(
    planner: PlannerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = f"sqlite:///{planner.home}/planner.sqlite"
    for url, said in (("nonsense", "database_url cannot be used"), (stale, "names another database than")):
        arguments = ["planner", "migrate", "--data-dir", str(planner.home), "--database-url", url]
        assert execute(arguments) == ExitCode.USAGE
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_no_backup_is_made_of_what_is_not_the_planners_database(
    planner: PlannerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backup = ["planner", "backup", str(tmp_path / "b.tar"), "--data-dir", str(planner.home)]
    assert execute(backup) == ExitCode.USAGE
    assert "use pg_dump" in capsys.readouterr().err
    assert not (tmp_path / "b.tar").exists()


@pytest.mark.full
def test_a_planner_whose_database_another_one_took_while_it_was_away_stops_with_one_line(
    server: str, tmp_path: Path
) -> None:
    """1. Two data directories name one database; 2. the first one's lock goes with its connection; 3. the
    second planner starts; 4. the first one is to write and ends."""
    url = created(server, "contended")
    first = PlannerProcess(tmp_path / "first", "--database-url", url)
    refused = stageloom(tmp_path / "second", "up", "--listen", "127.0.0.1:0", "--database-url", url)
    assert refused.returncode == ExitCode.UNAVAILABLE
    assert "another planner runs on this database" in refused.stderr
    end_sessions(server, "contended")
    second = PlannerProcess(tmp_path / "second", "--database-url", url)
    for _ in range(2):  # the first write finds the connection gone, the second one the lock
        stageloom(tmp_path / "first", "device", "token")
    assert first.ended() == ExitCode.UNAVAILABLE
    assert "Traceback" not in first.log()
    assert first.log().splitlines()[-1] == (
        "error: another planner took this database while it could not be reached; stop that one, or start "
        "this one with another --database-url"
    )
    ok(tmp_path / "second", "device", "token")
    assert second.stop() == 0
