"""Where the agent of this machine keeps its state and listens, for itself and for applications."""

import os
from pathlib import Path

from stageloom.edge_agent.ingest.channel import SOCKET_NAME

HOME_VARIABLE = "STAGELOOM_AGENT_HOME"
SOCKET_VARIABLE = "STAGELOOM_AGENT_SOCKET"


def default_home() -> Path:
    """`$STAGELOOM_AGENT_HOME`, else `var/agent` below the working directory."""
    return Path(os.environ.get(HOME_VARIABLE) or "var/agent")


def runtime_directory(home: Path) -> Path:
    """Holds the socket; only the owner may enter it."""
    return home / "run"


def socket_of(home: Path) -> Path:
    """The socket of the agent that uses `home`."""
    return runtime_directory(home) / SOCKET_NAME


def default_socket() -> Path:
    """`$STAGELOOM_AGENT_SOCKET`, else the socket in the default home."""
    chosen = os.environ.get(SOCKET_VARIABLE)
    return Path(chosen) if chosen else socket_of(default_home())
