"""A device joins over TLS: token, certificate, the process that listens."""

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from stageloom.edge_agent.config import AgentConfig
from stageloom.edge_agent.link import factory
from stageloom.edge_agent.link.connection import Membership, load_membership, new_keys, save_membership
from stageloom.edge_agent.link.join import join
from stageloom.planner.dispatch import events as ev
from stageloom.planner.enrolment.service import certificate_digest
from stageloom.planner.store.devices import add_token, enrol_device, revoke_device
from stageloom.planner.store.store import Store
from stageloom.shared.clock import ManualClock, SystemClock
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import (
    KeyRevoked,
    RefusedError,
    StateError,
    StorageError,
    TokenError,
    UnavailableError,
)
from stageloom.shared.ids import DeviceId
from stageloom.shared.keyfile import KeyPair, read_keys
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.messages.enrol import EnrolReply
from stageloom.shared.token import JoinToken, format_token
from tests.enrolment.rig import EnrolmentRig, enrolling
from tests.link.rig import Agent, wait_until
from tests.store.migrated import new_store


def _join(token: JoinToken, name: str, keys: KeyPair, *, timeout_s: float = 20.0) -> Membership:
    return join(token, DeviceId(name), keys, clock=SystemClock(), rng=Random(1), timeout_s=timeout_s)


@pytest.mark.promise("key-files-enrolment-certificate")
def test_joining_makes_a_device_and_a_used_token_is_worth_nothing(tmp_path: Path) -> None:
    with enrolling(tmp_path) as rig:
        keys, token = new_keys(), rig.token()
        member = _join(token, "new", keys)
        assert member.device == "new" and member.endpoints == rig.endpoints
        assert _join(token, "new", keys) == member, "a repeat is harmless"
        with pytest.raises(TokenError, match="token was used"):
            _join(token, "other", new_keys())
        with pytest.raises(TokenError, match="no such token"):
            _join(rig.token(b"w" * 16, known=False), "other", new_keys())
        path = tmp_path / "membership"
        save_membership(path, member)
        assert load_membership(path) == member
        with Agent(rig, "new", keys, tmp_path / "state") as agent:
            wait_until(lambda: agent.connected)


@pytest.mark.promise("key-files-enrolment-certificate")
def test_a_revoked_key_does_not_get_its_name_back_with_the_token_that_it_used(tmp_path: Path) -> None:
    """The stolen device has the old key and the old token; a replacement has the name by now."""
    name, store = DeviceId("camera-7"), new_store(tmp_path / "planner")
    with enrolling(tmp_path, enrol=lambda attempt: store.write(enrol_device, attempt)) as rig:

        def token(secret: bytes) -> JoinToken:
            store.write(add_token, digest_bytes([secret]), name, 3600.0)
            return rig.token(secret)

        stolen, its_token, replacement = new_keys(), token(b"1" * 16), new_keys()
        _join(its_token, name, stolen)
        store.write(revoke_device, name)
        rig.server.post(ev.Revoked(name))
        with pytest.raises(KeyRevoked, match="this key was revoked"):
            _join(its_token, name, stolen)
        second = token(b"2" * 16)
        for _ in range(2):
            _join(second, name, replacement)
        with pytest.raises(KeyRevoked, match="this key was revoked"):
            _join(its_token, name, stolen)
        assert [(one.member.public_key, one.member.revoked) for one in rig.server.presence()] == [
            (replacement.public, False)
        ]
    store.close()


class Camera:
    """The agent of `camera-7` at a real store's planner."""

    name = DeviceId("camera-7")

    def __init__(self, folder: Path, rig: EnrolmentRig, store: Store) -> None:
        self.home = folder / "agent"
        self._rig, self._store = rig, store

    def token(self, secret: bytes) -> str:
        """A new token for this device."""
        self._store.write(add_token, digest_bytes([secret]), self.name, 3600.0)
        return format_token(self._rig.token(secret))

    def join(self, token: str) -> None:
        """Join; the key that the agent has then is the one that the planner lets in."""
        assert factory.join_planner(AgentConfig(home=str(self.home)), token, self.name) == self.name
        (one,) = self._rig.server.presence()
        own = read_keys(self.home / factory.KEY_NAME).public
        assert (one.member.public_key, one.member.revoked) == (own, False)
        assert not (self.home / factory.NEXT_KEY_NAME).exists()

    def join_unheard(self, token: str) -> None:
        """The planner enrols a key, and its answer is lost."""
        enrol = factory._enrol

        def answer_lost(*asked: Any) -> Membership:
            enrol(*asked)
            raise UnavailableError("no answer")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(factory, "_enrol", answer_lost)
            with pytest.raises(UnavailableError, match="no answer"):
                factory.join_planner(AgentConfig(home=str(self.home)), token, self.name)

    def revoke(self) -> None:
        """The planner takes the key away."""
        self._store.write(revoke_device, self.name)
        self._rig.server.post(ev.Revoked(self.name))


@pytest.fixture
def camera(tmp_path: Path) -> Iterator[Camera]:
    """It joined, and its key was revoked."""
    store = new_store(tmp_path / "planner")
    with enrolling(tmp_path, enrol=lambda attempt: store.write(enrol_device, attempt)) as rig:
        camera = Camera(tmp_path, rig, store)
        camera.join(camera.token(b"1" * 16))
        camera.revoke()
        yield camera
    store.close()


def test_a_join_with_a_new_key_can_be_repeated_after_its_answer_was_lost(camera: Camera) -> None:
    token = camera.token(b"2" * 16)
    camera.join_unheard(token)
    camera.join(token)


def test_a_device_joins_again_though_the_key_of_a_join_without_an_answer_was_revoked_too(
    camera: Camera,
) -> None:
    token = camera.token(b"2" * 16)
    camera.join_unheard(token)
    camera.revoke()
    with pytest.raises(TokenError, match="used by another device"):
        camera.join(token)
    camera.join(camera.token(b"3" * 16))


@pytest.mark.promise("device-tells-secret-certificate")
def test_another_certificate_is_named_with_its_remedy_and_is_not_told_the_secret(tmp_path: Path) -> None:
    with enrolling(tmp_path) as rig:
        token = replace(rig.token(), certificate=bytes(32))
        with pytest.raises(UnavailableError) as refused:
            _join(token, "d", new_keys())
        assert str(refused.value) == (
            f"{token.enrol} shows another certificate than the token names; "
            "make a new token on the planner that runs there"
        )
        assert set(rig.store.tokens.values()) == {""}


@pytest.mark.parametrize("code", [RefusalCode.RATE, RefusalCode.INTERNAL])
def test_a_planner_that_says_to_try_again_is_asked_again_until_time_is_up(
    monkeypatch: pytest.MonkeyPatch, code: RefusalCode
) -> None:
    at = "tcp://127.0.0.1:1"
    token = JoinToken(bytes(32), bytes(16), at, at, at, "tls://127.0.0.1:1", bytes(32))
    refused, clock = Refused(code=code, reason="try again"), ManualClock()
    answers: list[EnrolReply | Refused] = [refused, refused, EnrolReply(device=DeviceId("new"))]

    def joined() -> Membership:
        return join(token, DeviceId("new"), new_keys(), clock=clock, rng=Random(1), sleep=clock.advance)

    monkeypatch.setattr("stageloom.edge_agent.link.join.ask", lambda *_: answers.pop(0))
    assert joined().device == "new"
    monkeypatch.setattr("stageloom.edge_agent.link.join.ask", lambda *_: refused)
    with pytest.raises(RefusedError, match="try again"):
        joined()
    assert clock.monotonic_s() > 5.0, "of the ten seconds that it has"


def test_a_port_where_nobody_listens_is_named(tmp_path: Path) -> None:
    with enrolling(tmp_path) as rig:
        token = rig.token()
    with pytest.raises(UnavailableError, match="no answer from tls://127"):
        _join(token, "d", new_keys(), timeout_s=0.5)


@pytest.mark.promise("stranger-gets-zeromq-socket")
def test_a_listener_that_is_killed_is_started_again(tmp_path: Path) -> None:
    with enrolling(tmp_path) as rig:
        pid = wait_until(lambda: rig.enrolment.pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: rig.enrolment.pid not in (None, pid))
        assert _join(rig.token(), "new", new_keys()).device == "new"


@pytest.mark.promise("stranger-gets-zeromq-socket")
def test_the_listener_ends_with_its_planner(tmp_path: Path) -> None:
    with enrolling(tmp_path) as rig:
        pid = wait_until(lambda: rig.enrolment.pid)
        _join(rig.token(), "new", new_keys())
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.promise("stranger-gets-zeromq-socket")
def test_the_listener_knows_neither_zeromq_nor_a_database(tmp_path: Path) -> None:
    with enrolling(tmp_path) as rig:
        _join(rig.token(), "new", new_keys())
        mapped = Path(f"/proc/{rig.enrolment.pid}/maps").read_text()
    assert "_ssl" in mapped
    for library in ("zmq", "sqlite", "sqlalchemy", "numpy", "cryptography"):
        assert library not in mapped


@pytest.mark.promise("key-files-enrolment-certificate")
def test_the_certificate_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "enrolment.pem"
    old = os.umask(0)
    try:
        digest = certificate_digest(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert certificate_digest(path) == digest and len(digest) == 32


@pytest.mark.promise("key-files-enrolment-certificate")
def test_a_certificate_that_others_could_read_or_that_is_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "enrolment.pem"
    certificate_digest(path)
    path.chmod(0o640)
    with pytest.raises(StorageError, match="mode 0640"):
        certificate_digest(path)
    path.chmod(0o600)
    path.write_text("")
    with pytest.raises(StateError, match="holds no certificate; remove it"):
        certificate_digest(path)
