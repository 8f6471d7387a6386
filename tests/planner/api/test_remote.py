"""Every command that asks a planner works on one elsewhere: over TLS, with a token, without data here."""

import contextlib
import hashlib
import io
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.api.server import ApiServer
from stageloom.planner.cli.app import app, execute
from stageloom.planner.config import PlannerConfig
from stageloom.planner.enrolment.service import certificate_digest
from stageloom.planner.schema.access import AccessCreateRequest, Role
from stageloom.planner.service import Planner
from stageloom.shared.errors import StateError
from tests.e2e.networks import write_chain
from tests.planner.api.rig import unverified
from tests.planner.world import World
from tests.store.helpers import NANO
from tests.store.migrated import begin_migrated

pytestmark = pytest.mark.more

HERE_ONLY = {
    *("up", "version", "model inspect", "scheduler check"),
    *("planner install", "planner uninstall", "planner migrate"),
}
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
    (f"device label {NANO} site=a", 0),
    ("model add {chain} --name chain", 0),
    ("model list", 0),
    ("model show chain", 0),
    ("model export chain {run}/chain.onnx", 0),
    ("plan create --model diamond --scheduler greedy --name again", 0),
    ("plan list", 0),
    ("plan show greedy", 0),
    ("plan show greedy --toml", 0),
    ("plan explain greedy", 0),
    (f"plan push {NANO} greedy", 0),
    (f"plan history {NANO}", 0),
    (f"plan trace {NANO} --otlp http://127.0.0.1:9", 4),  # where no collector is
    (f"plan compare {NANO}", 2),  # nothing was tried there
    ("plan export greedy --format dot", 0),
    ("replan list", 0),
    (f"replan regimes {NANO}", 0),
    ("scheduler list", 0),
    ("scheduler compare --model diamond --scheduler greedy", 0),
    ("prediction create greedy --twin nano --rate diamond=10 --seconds 1", 0),
    ("prediction list", 0),
    ("policy train gpg --model diamond --imitation-steps 2 --episodes 0 --budget 60s --output {run}", 0),
    ("policy list", 0),
    ("policy export 00000000 {run}/none", 2),  # there is none of that digest
    ("policy check 00000000", 2),
    ("policy import {chain}", 2),  # it is no policy
    (f"policy attach {NANO} none", 0),
    (f"policy train maddpg --device {NANO} --budget 5s", 2),  # it runs no plan to learn for
    ("job list", 0),
    ("job show 0123", 2),  # there is none of that id
    ("job cancel 0123", 2),
    ("access create other", 0),
    ("access list", 0),
    ("access revoke other", 0),
    ("webhook add http://10.0.0.7/hook --allow-private --name pager", 0),
    ("webhook list", 0),
    ("webhook remove pager", 0),
    ("audit list", 0),
    ("planner trust-clock", 0),
    ("planner backup {run}/planner.tar", 0),
    ("rollout create --model diamond --name r", 0),
    ("rollout list", 0),
    ("rollout show r", 0),
    ("rollout pause r", 0),
    ("rollout resume r", 0),
    ("rollout abort r", 0),
    ("model remove chain --force", 0),
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
    begin_migrated(config.data_dir)
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


def test_a_client_that_goes_by_names_accepts_the_planners_own_certificate(tmp_path: Path) -> None:
    config = PlannerConfig(
        data_dir=tmp_path, listen="127.0.0.1:0", api="127.0.0.1:0", advertise="localhost", search="local"
    )
    begin_migrated(config.data_dir)
    with closing(Planner(config)) as planner:
        assert planner.api_url.startswith("https://localhost:")
        _, _, certificate = (tmp_path / "api.pem").read_text().partition("-----END PRIVATE KEY-----")
        context = ssl.create_default_context(cadata=certificate)
        address = ("localhost", int(planner.api_url.rpartition(":")[2]))
        with context.wrap_socket(
            socket.create_connection(address), server_hostname="localhost"
        ) as connection:
            assert connection.version() is not None


def test_an_ipv6_address_that_is_advertised_without_brackets_is_told_with_them(tmp_path: Path) -> None:
    config = PlannerConfig(
        data_dir=tmp_path, listen="127.0.0.1:0", api="127.0.0.1:0", advertise="fd00::5", search="local"
    )
    begin_migrated(config.data_dir)
    with closing(Planner(config)) as planner:
        told = (planner.api_url, planner.enrol_address, planner.endpoints.control)
        assert [one.rpartition(":")[0] for one in told] == [
            "https://[fd00::5]",
            "tls://[fd00::5]",
            "tcp://[fd00::5]",
        ]


def test_a_given_certificate_is_shown_and_the_next_connection_sees_its_renewal(tmp_path: Path) -> None:
    """1. It is that of the settings, which tokens do not pin. 2. A renewal that is half written changes
    nothing. 3. Once it is whole it is shown, without a restart."""
    certificate, key, renewed = tmp_path / "given.pem", tmp_path / "given.key", tmp_path / "renewed.pem"
    first = given(certificate, key)
    config = PlannerConfig(
        data_dir=tmp_path / "home",
        listen="127.0.0.1:0",
        api="127.0.0.1:0",
        api_certificate=str(certificate),
        api_key=str(key),
        search="local",
    )

    def shown() -> bytes:
        with unverified().wrap_socket(socket.create_connection(address)) as connection:
            return hashlib.sha256(connection.getpeercert(binary_form=True) or b"").digest()

    begin_migrated(config.data_dir)
    with closing(Planner(config)) as planner, PlannerClient(data_dir=config.data_dir) as local:
        address = ("127.0.0.1", int(planner.api_url.rpartition(":")[2]))
        made = local.call(routes.ACCESS_CREATE, AccessCreateRequest(name="admin", role=Role.ADMIN))
        assert "." not in made.token and shown() == first
        second = given(renewed, tmp_path / "renewed.key")
        renewed.replace(certificate)
        assert shown() == first
        (tmp_path / "renewed.key").replace(key)
        assert shown() == second != first
        assert not (config.data_dir / "api.pem").exists()


def given(certificate: Path, key: Path) -> bytes:
    """A certificate and its key as others make them; returns its digest."""
    digest = certificate_digest(certificate, hosts=["localhost"])
    begin, end, rest = certificate.read_text().partition("-----END PRIVATE KEY-----\n")
    key.write_text(begin + end)
    certificate.unlink()
    certificate.write_text(rest)
    return digest


def test_a_key_that_asks_for_a_password_is_refused_at_once(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    given(tmp_path / "given.pem", tmp_path / "given.key")
    key = serialization.load_pem_private_key((tmp_path / "given.key").read_bytes(), None)
    sealed = serialization.BestAvailableEncryption(b"secret")
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (tmp_path / "given.key").write_bytes(key.private_bytes(*form, sealed))
    with pytest.raises(StateError, match="cannot be used"):
        ApiServer(
            tmp_path / "api.sock",
            None,  # type: ignore[arg-type]
            certificate=(tmp_path / "given.pem", tmp_path / "given.key"),
        )
