"""The process that serves: who is let in, what a client may take, how it comes and goes with the agent."""

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from stageloom.edge_agent.reporting.status import AgentStatus
from stageloom.edge_agent.serving import __main__ as process
from stageloom.edge_agent.serving.settings import ServingConfig, ServingSettings, check_settings
from stageloom.shared.errors import SettingError, StorageError
from tests.agent.conftest import eventually
from tests.agent.process import AgentProcess
from tests.serving.served import Triton, rows, serving_agent, write_certificate

TOKEN = "0123456789abcdef0123456789abcdef"
WAIT_S = 5.0


def _port(agent: AgentProcess) -> int:
    serving = agent.now().serving
    assert serving is not None
    return int(serving.http.rpartition(":")[2])


def _ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): v for name, v in headers.items()})
        answer = connection.getresponse()
        found = answer.read()
        return answer.status, json.loads(found) if found else None
    finally:
        connection.close()


def test_what_may_wait_bounds_requests_over_either_transport(tmp_path: Path) -> None:
    with serving_agent(tmp_path, waiting_bytes=1 << 16) as agent:
        serving = agent.now().serving
        assert serving is not None
        for kind in ("http", "grpc"):
            client = Triton(kind, getattr(serving, kind))
            with pytest.raises(InferenceServerException, match="too many bytes of requests are waiting"):
                client.infer(rows(100))
            client.infer(rows(50))
            client.close()


def test_unknown_path_and_method_are_answered_as_errors(agent: AgentProcess) -> None:
    assert _ask(_port(agent), "GET", "/v3") == (404, {"error": "there is no GET /v3"})
    status, _ = _ask(_port(agent), "DELETE", "/v2/models/tiny")
    assert status in (404, 405)


def test_body_larger_than_the_model_takes_is_refused_before_it_is_read(agent: AgentProcess) -> None:
    port, path = _port(agent), "/v2/models/divider/infer"
    status, found = _ask(port, "POST", path, b"", Content_Length=str(1 << 40))
    assert status == 413
    assert "larger than" in found["error"]

    def chunks() -> Any:
        for _ in range(64):
            yield b" " * (64 << 10)

    try:
        status, found = _ask(port, "POST", path, chunks())
    except (BrokenPipeError, ConnectionResetError):
        return  # it hung up while we were sending
    assert status == 413


def test_compressed_body_that_grows_too_large_is_refused(agent: AgentProcess) -> None:
    import gzip

    bomb = gzip.compress(b" " * (32 << 20))
    port, path = _port(agent), "/v2/models/divider/infer"
    assert _ask(port, "POST", path, bomb, Content_Encoding="gzip")[0] == 413
    assert _ask(port, "POST", path, b"no gzip", Content_Encoding="gzip")[0] == 400
    assert _ask(port, "POST", path, bomb[:-9], Content_Encoding="gzip")[0] in (400, 413)
    assert _ask(port, "POST", path, b"", Content_Encoding="br")[0] == 501


@pytest.mark.parametrize("length", ["-1", "1e3", "x", "9" * 30, "²"])
def test_header_length_that_is_no_number_is_refused(length: str, agent: AgentProcess) -> None:
    headers = {"Inference_Header_Content_Length": length}
    if not length.isascii():
        headers = {"Inference_Header_Content_Length": length.encode().decode("latin-1")}
    status, found = _ask(_port(agent), "POST", "/v2/models/tiny/infer", b"{}", **headers)
    assert status == 400
    assert "error" in found


def test_not_a_number_is_not_written_as_json(agent: AgentProcess) -> None:
    one = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [0, 1]}
    body = json.dumps({"inputs": [one]})
    status, found = _ask(_port(agent), "POST", "/v2/models/divider/infer", body)
    assert status == 500
    assert "NaN or infinity" in found["error"]
    body = json.dumps({"inputs": [one | {"data": [[4, 1]]}], "id": "a"})
    assert _ask(_port(agent), "POST", "/v2/models/divider/infer", body) == (
        200,
        {
            "id": "a",
            "model_name": "divider",
            "model_version": "3",
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [0.25, 1.0]}],
        },
    )


def test_two_lengths_of_one_body_are_refused(agent: AgentProcess) -> None:
    with socket.create_connection(("127.0.0.1", _port(agent)), 20) as client:
        client.sendall(
            b"POST /v2/repository/index HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        assert client.recv(4096).startswith(b"HTTP/1.1 400")


@pytest.mark.promise("serving-comes-and-goes")
@pytest.mark.more
def test_tokens_connections_and_a_new_life(tmp_path: Path) -> None:
    """Without a token nothing is told; the connection above the limit is closed; a process that dies is
    started again, and the agent's status and its journal tell so."""
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(f"{TOKEN}\n")
    with serving_agent(tmp_path, tokens=str(tokens), connections=2) as agent:
        port = _port(agent)
        assert _ask(port, "GET", "/v2")[0] == 401
        assert _ask(port, "GET", "/v2", Authorization="Bearer wrong")[0] == 401
        assert _ask(port, "GET", "/v2", Authorization=f"Bearer {TOKEN}")[0] == 200
        _tokens_over_grpc(agent)
        with (
            socket.create_connection(("127.0.0.1", port), 20),
            socket.create_connection(("127.0.0.1", port), 20),
            socket.create_connection(("127.0.0.1", port), 20) as third,
        ):
            with pytest.raises(ConnectionError):
                if not third.recv(1):
                    raise ConnectionResetError
        before = agent.now().serving
        assert before is not None
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)

        def again(status: AgentStatus) -> bool:
            now = status.serving
            return now is not None and now.restarts == 1 and bool(now.http) and now.pid != before.pid

        status = agent.until(again, "it was started again")
        assert status.serving is not None
        assert status.serving.last_exit == "signal 9"
        assert any("serving" in problem and "signal 9" in problem for problem in status.problems)
        pid = status.serving.pid
        assert agent.stop() == 0
        assert pid is not None
        assert not Path(f"/proc/{pid}").exists()


def _tokens_over_grpc(agent: AgentProcess) -> None:
    serving = agent.now().serving
    assert serving is not None
    with tritonclient.grpc.InferenceServerClient(serving.grpc) as client:
        with pytest.raises(InferenceServerException, match="bearer token"):
            client.get_server_metadata()
        client.get_server_metadata(headers={"authorization": f"Bearer {TOKEN}"})
        one = tritonclient.grpc.InferInput("input", [1, 3, 8, 8], "FP32").set_data_from_numpy(rows(1))
        with pytest.raises(InferenceServerException, match="bearer token"):
            client.infer("tiny", [one])


@pytest.mark.promise("serving-comes-and-goes")
def test_death_of_the_agent_ends_the_process(tmp_path: Path) -> None:
    with serving_agent(tmp_path) as agent:
        serving = agent.now().serving
        assert serving is not None
        agent.kill()
        stat = Path(f"/proc/{serving.pid}/stat")
        eventually(lambda: not stat.exists() or ") Z " in stat.read_text(), "it has ended")


def test_the_process_ends_both_servers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. It serves over both transports. 2. It is told to end. 3. While gRPC ends, HTTP begins to."""
    http_ends = threading.Event()
    seen: list[bool] = []

    class PlayedHttp:
        def __init__(self, application: Any, listening: list[socket.socket], *_: Any) -> None:
            self._listening = listening

        async def start(self) -> None: ...

        async def stop(self) -> None:
            for bound in self._listening:
                bound.close()
            http_ends.set()

    class PlayedGrpc:
        def __init__(self, *_: Any) -> None: ...

        def start(self) -> int:
            return 8001

        def stop(self) -> None:
            seen.append(http_ends.wait(WAIT_S))

    service = SimpleNamespace(in_threads=lambda: None, close=lambda: None)
    monkeypatch.setattr(process, "InferenceService", lambda *_: service)
    monkeypatch.setattr(process, "HttpServer", PlayedHttp)
    monkeypatch.setattr(process, "GrpcServer", PlayedGrpc)
    ours, report = os.pipe()
    settings = ServingSettings(http="127.0.0.1:0", grpc="127.0.0.1:0")
    config = ServingConfig(settings=settings, socket="none", agent=os.getpid(), report=report)

    async def run() -> None:
        serving = asyncio.create_task(process.serve(config))
        await asyncio.to_thread(os.read, ours, 4096)  # it serves
        signal.raise_signal(signal.SIGTERM)
        await serving

    asyncio.run(run())
    os.close(ours)
    os.close(report)
    assert seen == [True]


@pytest.mark.promise("serving-lets-in-only")
def test_address_beyond_this_machine_needs_tls_and_tokens_or_to_be_opened(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(TOKEN)
    certificate, key = map(str, write_certificate(tmp_path))
    for address in ("0.0.0.0:0", "[::]:0", "example.org:80"):
        for given in (
            ServingSettings(http=address),
            ServingSettings(http=address, tokens=str(tokens)),
            ServingSettings(grpc=address, certificate=certificate, key=key),
        ):
            with pytest.raises(SettingError, match="by anybody"):
                check_settings(given)
        check_settings(ServingSettings(grpc=address, open=True))
        check_settings(ServingSettings(http=address, tokens=str(tokens), certificate=certificate, key=key))
    for address in ("127.0.0.1:0", "[::1]:0", "localhost:0"):
        check_settings(ServingSettings(http=address))


def test_tokens_that_cannot_be_read_are_to_be_made_the_agents_accounts(tmp_path: Path) -> None:
    """What `sudo` made of mode 0600 is root's: the mode alone does not help a service."""
    with pytest.raises(StorageError, match="the agent's account as its owner"):
        check_settings(ServingSettings(http="127.0.0.1:0", tokens=str(tmp_path / "tokens")))


def test_tokens_that_others_can_read_or_guess_are_refused(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o644)
    tokens.write_text(TOKEN)
    with pytest.raises(StorageError):
        check_settings(ServingSettings(http="127.0.0.1:0", tokens=str(tokens)))
    tokens.chmod(0o600)
    tokens.write_text("short\n")
    with pytest.raises(SettingError, match="fewer than 16"):
        check_settings(ServingSettings(http="127.0.0.1:0", tokens=str(tokens)))
