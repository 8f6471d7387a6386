"""Where metrics are told, and what the process that tells them is given."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Final

import msgspec
from msgspec import Struct

from stageloom.edge_agent.loop import Loop
from stageloom.edge_agent.serving.keeper import ServerKeeper
from stageloom.edge_agent.serving.settings import Address, check_guarded, require_packages
from stageloom.shared.errors import SettingError
from stageloom.shared.metrics import PACKAGE
from stageloom.shared.module_command import module_command

_NEEDED: Final = (PACKAGE, "httptools", "starlette", "uvicorn")


class MetricsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[agent.metrics]`. An empty address: metrics are neither counted nor told."""

    listen: Address = ""
    tokens: str = ""  # file of mode 0600 with one bearer token a line; empty: none is asked for
    certificate: str = ""  # PEM file for TLS; empty: no TLS
    key: str = ""  # PEM file of its key; empty: it is in the certificate's file
    open: bool = False  # beyond this machine without TLS or tokens


class MetricsConfig(Struct, frozen=True, kw_only=True):
    """What the process is told when it starts."""

    settings: MetricsSettings
    socket: str  # of the agent
    agent: int  # its process id: without this parent there is nothing to tell
    report: int  # descriptor of a socket of packets: the address that was bound, or why the process ends
    log_level: str = "INFO"


def decode_metrics(text: str) -> MetricsConfig:
    """What the keeper's command says.

    Raises:
        SettingError: it is something else.
    """
    try:
        return msgspec.json.decode(text, type=MetricsConfig)
    except msgspec.MsgspecError as error:
        raise SettingError(f"this process is started by the agent: {error}") from error


def check_metrics(settings: MetricsSettings) -> None:
    """Refuse what cannot work or would let strangers in.

    Raises:
        SettingError, StorageError: as `check_guarded`; or packages are missing.
    """
    check_guarded("metrics", [settings.listen] if settings.listen else [], settings)
    if settings.listen:
        require_packages("telling metrics", "metrics", _NEEDED)


def metrics_keeper(
    loop: Loop,
    settings: MetricsSettings,
    socket: Path,
    note: Callable[[str, str], None],
    rng: Random,
    log_level: str = "INFO",
) -> ServerKeeper:
    """Of the process that tells the metrics of the agent that listens at `socket`."""

    def command(report: int) -> Sequence[str]:
        config = MetricsConfig(
            settings=settings,
            socket=str(socket.absolute()),
            agent=os.getpid(),
            report=report,
            log_level=log_level,
        )
        return module_command("stageloom.edge_agent.metrics", msgspec.json.encode(config).decode())

    return ServerKeeper(loop, "metrics", command if settings.listen else None, note, rng)
