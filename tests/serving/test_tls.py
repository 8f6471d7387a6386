"""HTTP and gRPC with TLS and tokens, from end to end: tritonclient with its own options for both."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from tritonclient.utils import InferenceServerException

from stageloom import Client
from stageloom.edge_agent.metrics.settings import MetricsSettings, check_metrics
from stageloom.edge_agent.serving import grpc_api, http_server
from stageloom.edge_agent.serving.body import WaitingBytes
from stageloom.edge_agent.serving.grpc_api import GrpcServer
from stageloom.edge_agent.serving.http_server import HttpServer, listen_on
from stageloom.edge_agent.serving.settings import ServingSettings, check_settings, tls_context
from stageloom.shared.errors import SettingError
from tests.serving.served import rows, serving_agent, write_certificate

TOKEN = "a-token-of-thirty-two-characters-"
WAIT_S = 10.0


def _over_http(address: str, trusted: Path | None) -> Any:
    def context() -> ssl.SSLContext:
        return ssl.create_default_context(cafile=trusted)

    return tritonclient.http.InferenceServerClient(address, ssl=True, ssl_context_factory=context)


def _over_grpc(address: str, trusted: Path | None) -> Any:
    roots = None if trusted is None else str(trusted)
    return tritonclient.grpc.InferenceServerClient(address, ssl=True, root_certificates=roots)


@pytest.mark.promise("serving-lets-in-only")
def test_tls_and_tokens_from_end_to_end(tmp_path: Path) -> None:
    """Who has the certificate and a token gets answers; who lacks a token is told, as Triton would; who does
    not trust the certificate, or speaks without TLS, gets nothing."""
    certificate, key = write_certificate(tmp_path)
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"{TOKEN}\n")
    settings = {"tokens": str(tokens), "certificate": str(certificate), "key": str(key)}
    with serving_agent(tmp_path, **settings) as agent, Client(agent.socket) as native:
        serving = agent.now().serving
        assert serving is not None
        expected = np.concatenate([native.run("tiny", {"input": one[None]})["output"] for one in rows(64)])
        makers: list[tuple[Any, Callable[[str, Path | None], Any], str]] = [
            (tritonclient.http, _over_http, serving.http),
            (tritonclient.grpc, _over_grpc, serving.grpc),
        ]
        for module, connect, address in makers:
            with connect(address, certificate) as client:
                _serves_who_has_a_token(module, client, expected)
            with (
                connect(address, None) as stranger,
                pytest.raises(Exception, match=r"(?i)certificate|connect"),
            ):
                stranger.is_server_live({"authorization": f"Bearer {TOKEN}"})
            with module.InferenceServerClient(address) as plain, pytest.raises(Exception):  # noqa: B017
                plain.is_server_live({"authorization": f"Bearer {TOKEN}"})


def _serves_who_has_a_token(module: Any, client: Any, expected: Any) -> None:
    given = module.InferInput("input", [64, 3, 8, 8], "FP32")
    given.set_data_from_numpy(rows(64))
    calls: list[Callable[..., Any]] = [
        lambda **options: client.get_server_metadata(**options),
        lambda **options: client.infer("tiny", [given], **options),
        lambda **options: client.get_system_shared_memory_status(**options),
    ]
    for call in calls:
        for headers in (None, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}):
            with pytest.raises(InferenceServerException, match="bearer token is missing or wrong") as refused:
                call(headers=headers)
            assert refused.value.status() in ("401", "StatusCode.UNAUTHENTICATED")
        assert call(headers={"authorization": f"Bearer {TOKEN}"}) is not None
    answer = client.infer("tiny", [given], headers={"authorization": f"Bearer {TOKEN}"})
    assert np.array_equal(answer.as_numpy("output"), expected)


def _unusable(kind: str, folder: Path) -> tuple[Path, Path]:
    """A certificate and a key that cannot be used with it."""
    certificate, key = write_certificate(folder)
    match kind:
        case "another's key":
            other = folder / "other"
            other.mkdir()
            _, key = write_certificate(other)
        case "no certificate":
            certificate.write_text("-----BEGIN CERTIFICATE-----\n")
        case "no key":
            key.write_bytes(certificate.read_bytes())
        case "a passphrase":
            secret = load_pem_private_key(key.read_bytes(), None)
            form = BestAvailableEncryption(b"secret")
            key.write_bytes(secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, form))
    return certificate, key


@pytest.fixture
def _short_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEAD_S", 0.05)
    monkeypatch.setattr(grpc_api, "_HANDSHAKE_S", 0.05)


def _closed_by_server(address: tuple[str, int]) -> bool:
    """Connect, say nothing and wait."""
    with socket.create_connection(address, WAIT_S) as silent:
        try:
            return not silent.recv(1)
        except ConnectionError:
            return True
        except TimeoutError:
            return False


async def _no_application(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nothing is asked")


@pytest.mark.usefixtures("_short_handshakes")
def test_over_http_a_handshake_takes_no_longer_than_a_head(tmp_path: Path) -> None:
    tls = tls_context(*map(str, write_certificate(tmp_path)))

    async def run() -> bool:
        listening = listen_on("127.0.0.1", 0)
        server = HttpServer(_no_application, listening, tls, 8)
        await server.start()
        try:
            return await asyncio.to_thread(_closed_by_server, listening[0].getsockname())
        finally:
            await server.stop()

    assert asyncio.run(run())


@pytest.mark.usefixtures("_short_handshakes")
def test_over_grpc_a_handshake_has_a_limit(tmp_path: Path) -> None:
    certificate, key = (file.read_bytes() for file in write_certificate(tmp_path))
    verbs: Any = None
    server = GrpcServer(verbs, frozenset(), "127.0.0.1:0", 1 << 20, WaitingBytes(1 << 20), (certificate, key))
    port = server.start()
    try:
        assert _closed_by_server(("127.0.0.1", port))
    finally:
        server.stop()


@pytest.mark.parametrize("kind", ["another's key", "no certificate", "no key", "a passphrase"])
def test_certificate_and_key_that_cannot_be_used_are_refused_before_anything_starts(
    kind: str, tmp_path: Path
) -> None:
    certificate, key = map(str, _unusable(kind, tmp_path))
    with pytest.raises(SettingError, match="cannot be used for TLS"):
        check_settings(ServingSettings(grpc="127.0.0.1:0", certificate=certificate, key=key))
    with pytest.raises(SettingError, match="cannot be used for TLS"):
        check_metrics(MetricsSettings(listen="127.0.0.1:0", certificate=certificate, key=key))
