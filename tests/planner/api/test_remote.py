"""Every command that asks a planner works on one elsewhere: over TLS, with a token, without data here."""

import contextlib
import io
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.cli.app import app, execute
from stageloom.planner.config import PlannerConfig
from stageloom.planner.schema.access import AccessCreateRequest, Role
from stageloom.planner.service import Planner
from tests.e2e.networks import write_chain
from tests.planner.world import World
from tests.store.helpers import NANO

HERE_ONLY = {"up", "version", "model inspect", "planner install", "planner uninstall", "planner migrate"}
"""Commands about this machine."""

COMMANDS: list[tuple[str, int]] = [
    ("status", 0),
    ("watch --count 1", 0),
    ("config show", 0),
    (f"device token {NANO}-2", 0),
    ("device list", 0),
    (f"device show {NANO}", 0),
    (f"device telemetry {NANO}", 0),
    (f"device replan {NANO} --off", 0),
    (f"device profile {NANO} --no-wait", 0),
    (f"device release {NANO}", 0),
    ("model add {chain} --name chain", 0),
    ("model list", 0),
    ("plan create --model diamond --scheduler greedy --name again", 0),
    ("plan list", 0),
    ("plan show greedy", 0),
    ("plan show greedy --toml", 0),
    ("plan explain greedy", 0),
    (f"plan push {NANO} greedy", 0),
    (f"plan history {NANO}", 0),
    (f"plan compare {NANO}", 2),  # nothing was tried there
    ("replan list", 0),
    ("scheduler list", 0),
    ("scheduler compare --model diamond --scheduler greedy", 0),
    ("prediction create greedy --twin nano --rate diamond=10 --seconds 1", 0),
    ("prediction list", 0),
    ("policy train gpg --model diamond --imitation-steps 2 --episodes 0 --budget 60s --output {run}", 0),
    ("policy list", 0),
    ("policy export 00000000 {run}/none", 2),  # there is none of that digest
    ("policy import {chain}", 2),  # it is no policy
    (f"policy attach {NANO} none", 0),
    (f"policy train maddpg --device {NANO} --budget 5s", 2),  # it runs no plan to learn for
    ("job list", 0),
    ("job show 0123", 2),  # there is none of that id
    ("job cancel 0123", 2),
    ("access create other", 0),
    ("access list", 0),
    ("access revoke other", 0),
    ("audit list", 0),
    ("planner trust-clock", 0),
    ("planner backup {run}/planner.tar", 0),
    ("model remove chain", 0),
    (f"device revoke {NANO}", 0),
]


def commands(command: Any, path: str = "") -> Iterator[str]:
    """Words of every command."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path.strip()
    for name, child in (children or {}).items():
        yield from commands(child, f"{path} {name}")


def test_the_list_has_every_command_that_asks_a_planner() -> None:
    asked = {name for name in commands(get_command(app)) if name not in HERE_ONLY}
    missing = {name for name in asked if not any(f"{line} ".startswith(f"{name} ") for line, _ in COMMANDS)}
    assert missing == set()


@pytest.mark.timeout(300)
@pytest.mark.promise("commands-work-remotely")
def test_every_command_works_on_a_planner_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PlannerConfig(
        data_dir=tmp_path / "there",
        listen="127.0.0.1:0",
        api="127.0.0.1:0",
        api_rate="1000/1000",
        search="local",
        search_workers=1,
    )
    here, run, token = tmp_path / "here", tmp_path / "run", tmp_path / "token"
    run.mkdir()
    chain = write_chain(tmp_path / "chain.onnx", 1)
    monkeypatch.setenv("STAGELOOM_HOME", str(here))
    monkeypatch.delenv("STAGELOOM_PLANNER", raising=False)
    ends: dict[str, tuple[int, str]] = {}
    with closing(Planner(config)) as planner:
        World(config.data_dir, planner.store).kept("greedy")
        with PlannerClient(data_dir=config.data_dir) as local:
            made = local.call(routes.ACCESS_CREATE, AccessCreateRequest(name="admin", role=Role.ADMIN))
        token.write_text(made.token)
        for line, _ in COMMANDS:
            words = [word.format(chain=chain, run=run) for word in line.split()]
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = execute([*words, "--planner", planner.api_url, "--token-file", str(token)])
            ends[line] = code, err.getvalue()
    wrong = {line: ends[line] for line, code in COMMANDS if ends[line][0] != code}
    assert wrong == {}
    assert not here.exists()
