"""What the agent notes of a server's process that ends: a real one, which the test does not start again."""

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from stageloom.edge_agent.loop import Loop
from stageloom.edge_agent.metrics.settings import MetricsSettings, metrics_keeper
from stageloom.edge_agent.serving.keeper import ServerKeeper, serving_keeper
from stageloom.edge_agent.serving.settings import ServingSettings
from tests.serving.served import write_certificate


def _noted(make: Callable[..., ServerKeeper], settings: Any, agent_socket: Path) -> str:
    """What is noted when the process ends for the first time."""
    loop = Loop()
    notes: list[str] = []

    def note(name: str, text: str) -> None:
        notes.append(text)
        loop.stop()

    with contextlib.closing(loop):
        keeper = make(loop, settings, agent_socket, note, Random(0))
        keeper.start()
        loop.run()
        assert keeper.status is not None
        assert keeper.status.last_exit in notes[0]
        keeper.stop()
    return notes[0]


def test_an_address_that_another_has_is_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        noted = _noted(metrics_keeper, MetricsSettings(listen=address), tmp_path / "none")
    assert f"exit code 4 ({address} is in use; choose another address)" in noted


def test_an_address_of_another_machine_is_not_in_use(tmp_path: Path) -> None:
    noted = _noted(metrics_keeper, MetricsSettings(listen="192.0.2.1:9464"), tmp_path / "none")
    assert "192.0.2.1:9464 cannot be served" in noted
    assert "in use" not in noted


def test_an_agent_that_does_not_answer_is_no_address_in_use(tmp_path: Path) -> None:
    noted = _noted(serving_keeper, ServingSettings(http="127.0.0.1:0"), tmp_path / "none")
    assert "exit code 4 (" in noted
    assert "in use" not in noted


def test_a_certificate_that_was_damaged_meanwhile_is_named(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    certificate.write_text("damaged")
    settings = MetricsSettings(listen="127.0.0.1:0", certificate=str(certificate), key=str(key))
    noted = _noted(metrics_keeper, settings, tmp_path / "none")
    assert f"exit code 2 ({certificate} with {key} cannot be used for TLS" in noted
