"""Which link an agent gets, and how it joins a planner.

In the home: `device.key` (both CURVE keys, 0600), `membership` (the planner and our name), `link.state`.
An agent whose key or membership cannot be read still serves what it served last; its status says why it is
offline.
"""

import logging
import secrets
import socket
from pathlib import Path
from random import SystemRandom
from typing import Final

import msgspec

from stageloom.edge_agent.config import AgentConfig
from stageloom.edge_agent.lifecycle.core import Lifecycle
from stageloom.edge_agent.lifecycle.manager import PlanManager
from stageloom.edge_agent.lifecycle.session import LinkConfig
from stageloom.edge_agent.lifecycle.shell import LifecycleShell, NoLink
from stageloom.edge_agent.lifecycle.statefile import load_state
from stageloom.edge_agent.link.client import ClientConfig, LinkClient
from stageloom.edge_agent.link.connection import Membership, load_membership, new_keys, save_membership
from stageloom.edge_agent.machine.device import device_class
from stageloom.edge_agent.store import ArtifactStore
from stageloom.shared.clock import SystemClock
from stageloom.shared.durable_file import sync_directory
from stageloom.shared.errors import KeyRevoked, SettingError, StateError, StorageError
from stageloom.shared.ids import DeviceId
from stageloom.shared.keyfile import KeyPair, read_keys, write_keys
from stageloom.shared.messages.base import DeviceName
from stageloom.shared.token import JoinToken, parse_token
from stageloom.shared.version import __version__

_log = logging.getLogger(__name__)

STATE_NAME: Final = "link.state"
KEY_NAME: Final = "device.key"
NEXT_KEY_NAME: Final = "device.key.next"  # after a revocation, until the planner has taken it
MEMBERSHIP_NAME: Final = "membership"


def connect_planner(config: AgentConfig, plans: PlanManager) -> tuple[LifecycleShell, list[str]]:
    """The link of an agent that serves what a planner desires, and what was wrong with the state on disk.

    Raises:
        SettingError: it has joined no planner and has nothing to serve.
    """
    home = config.home_path
    environment = device_class()
    link = LinkConfig(
        boot=secrets.randbits(62) | 1,
        agent_version=__version__,
        local_wait_s=config.local_wait_s,
    )
    state, problem = load_state(home / STATE_NAME)
    identity, why = _identity(home)
    problems = [text for text in (problem, why) if text]
    core = Lifecycle(state, config=link, plans=plans)
    path, present = home / STATE_NAME, ArtifactStore(home / "artifacts").present()
    if identity is not None:
        keys, membership = identity
        client = LinkClient(
            ClientConfig(
                folder=home,
                keys=keys,
                membership=membership,
                boot=link.boot,
                spool_bytes=config.spool_bytes,
                spool_age_s=config.spool_age_s,
            )
        )
        client.start()
        host = LifecycleShell(
            core, client, path, environment=environment, present=present, problem=problem or ""
        )
        return host, problems
    lost = home / f"{STATE_NAME}.corrupt"
    if state.last_good is None and state.desired is None and not problems and lost.exists():
        # It had something to serve: ending at every start would be a boot loop that nobody sees.
        problems = [f"nothing to serve since {lost} was set aside; join a planner again, or remove that file"]
    elif state.last_good is None and state.desired is None and not problems:
        raise SettingError(
            "this agent has joined no planner and has no model to serve",
            remedy="run `stageloom-agent join TOKEN`, or give models with `run --model FILE`",
        )

    alone = NoLink("not_joined", why or "run `stageloom-agent join TOKEN` to join a planner")
    return LifecycleShell(core, alone, path, environment=environment, present=present), problems


def _identity(home: Path) -> tuple[tuple[KeyPair, Membership] | None, str]:
    """Keys and membership, None if this device never joined; or why they cannot be used."""
    try:
        membership = load_membership(home / MEMBERSHIP_NAME)
        return (None, "") if membership is None else ((read_keys(home / KEY_NAME), membership), "")
    except (StateError, StorageError) as error:
        _log.error("the agent stays offline: %s", error)
        return None, str(error)


def join_planner(config: AgentConfig, token: str, name: str | None) -> str:
    """Enrol this machine and write down where it belongs; returns its name in the fleet.

    The key pair is made once. A key that the planner has revoked is given up for a new one; that lies on disk
    before it is sent, and is sent first from then on, so that a join whose answer was lost can be repeated.

    Raises:
        TokenError: the token is malformed, wrong, used or expired.
        RefusedError, UnavailableError: the planner says no, or does not answer.
        SettingError: `name` cannot be a device's name.
        StorageError: the key cannot be written, or is readable by others.
    """
    parsed = parse_token(token)
    home = config.home_path
    device = _device_name(name)
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{home} cannot be made: {error.strerror}", remedy="choose another with STAGELOOM_AGENT_HOME"
        ) from error
    own, following = home / KEY_NAME, home / NEXT_KEY_NAME
    if not own.exists():
        write_keys(own, new_keys())
    try:
        # Where the planner has taken the following key, it would say of the other that the token was used.
        membership = _enrol(parsed, device, read_keys(following if following.exists() else own))
    except KeyRevoked:
        following.unlink(missing_ok=True)  # it is the one that was revoked
        write_keys(following, new_keys())
        membership = _enrol(parsed, device, read_keys(following))
    if following.exists():
        following.replace(own)
        sync_directory(home)
    save_membership(home / MEMBERSHIP_NAME, membership)
    return membership.device


def _enrol(token: JoinToken, device: DeviceName, keys: KeyPair) -> Membership:
    from stageloom.edge_agent.link.join import (
        join,
    )  # TLS: some MiB that an agent which only serves has no use for

    return join(
        token,
        DeviceId(device),
        keys,
        clock=SystemClock(),
        rng=SystemRandom(),
        agent_version=__version__,
        device_class=device_class(),
    )


def _device_name(name: str | None) -> DeviceName:
    wanted = name if name is not None else socket.gethostname().partition(".")[0]
    try:
        return msgspec.convert(wanted, DeviceName)
    except msgspec.ValidationError as error:
        raise SettingError(
            f"{wanted!r} cannot be a device's name", remedy="give one of letters, digits, . _ - by --name"
        ) from error
