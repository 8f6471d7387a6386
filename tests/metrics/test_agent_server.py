"""Who may scrape an agent, and what a real one tells."""

import asyncio
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from stageloom import Client
from stageloom.edge_agent.config import ModelFile
from stageloom.edge_agent.metrics.scrape import AGENT_METRICS, ask_figures
from stageloom.edge_agent.metrics.server import metrics_application
from stageloom.edge_agent.metrics.settings import MetricsSettings, check_metrics
from stageloom.edge_agent.serving.keeper import ServingStatus
from stageloom.edge_agent.serving.protocol import SERVICE, message
from stageloom.edge_agent.serving.settings import ServingSettings
from stageloom.shared.errors import SettingError, UnavailableError
from stageloom.shared.metrics import MetricKind
from tests.agent.conftest import eventually
from tests.agent.models import ROW_SHAPE, write_tiny
from tests.agent.process import AgentProcess

TOKEN = "0123456789abcdef0123456789abcdef"


def _ask(scrape: Any, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, bytes]:
    """An answer of the application, without a socket."""
    application = metrics_application(scrape, frozenset({TOKEN} if "authorization" in headers else ()))
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }

    async def run() -> None:
        await application(scope, receive, send)

    asyncio.run(run())
    return sent[0]["status"], sent[1]["body"]


def _away(accept: str) -> tuple[bytes, str]:
    raise UnavailableError("no agent answers")


def test_what_is_asked_decides_the_answer() -> None:
    def echo(accept: str) -> tuple[bytes, str]:
        return accept.encode(), "text/plain"

    assert _ask(echo, accept="text/x") == (200, b"text/x")
    assert _ask(echo, path="/")[0] == 404
    assert _ask(echo, method="POST")[0] == 405
    assert _ask(echo, authorization=f"Bearer {TOKEN}") == (200, b"")
    assert _ask(echo, authorization=f"Bearer {TOKEN}x")[0] == 401
    assert _ask(echo, authorization="", path="/")[0] == 401
    assert _ask(_away) == (503, b"no agent answers")


def test_address_beyond_this_machine_needs_tls_and_tokens_or_consent(tmp_path: Path) -> None:
    check_metrics(MetricsSettings())
    check_metrics(MetricsSettings(listen="127.0.0.1:0"))
    check_metrics(MetricsSettings(listen="0.0.0.0:0", open=True))
    with pytest.raises(SettingError, match=r"metrics\.certificate and metrics\.tokens"):
        check_metrics(MetricsSettings(listen="0.0.0.0:9100"))
    with pytest.raises(SettingError, match="no address"):
        check_metrics(MetricsSettings(listen="9100"))


def _ask_for_models(served: ServingStatus) -> None:
    """Twice whether the server lives, and over both protocols for a model that is not there."""
    for _ in range(2):
        with urllib.request.urlopen(f"http://{served.http}/v2/health/live") as answer:
            assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{served.http}/v2/models/none")
    with grpc.insecure_channel(served.grpc) as channel:
        ask = channel.unary_unary(
            f"/{SERVICE}/ModelMetadata",
            request_serializer=message("ModelMetadataRequest").SerializeToString,
            response_deserializer=message("ModelMetadataResponse").FromString,
        )
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            ask(message("ModelMetadataRequest")(name="none"), timeout=20)


@pytest.mark.promise("metrics-scraped-both-sides")
def test_scrape_of_a_running_agent_tells_every_metric_and_what_its_tasks_came_to(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(TOKEN)
    model = ModelFile(path=str(write_tiny(tmp_path / "tiny.onnx")), name="tiny")
    settings = MetricsSettings(listen="127.0.0.1:0", tokens=str(tokens))
    home, serving = tmp_path / "home", ServingSettings(http="127.0.0.1:0", grpc="127.0.0.1:0")
    with AgentProcess(home, models=(model,), executor="onnx", metrics=settings, serving=serving) as agent:
        status = agent.until(lambda status: status.ready and status.metrics and status.metrics.http, "both")
        status = agent.until(lambda status: status.serving and status.serving.grpc, "requests are taken")
        assert status.metrics is not None and status.serving is not None
        url = f"http://{status.metrics.http}/metrics"
        with Client(agent.socket) as client:
            for _ in range(40):
                client.run("tiny", {"input": np.zeros(ROW_SHAPE, np.float32)})
        agent.until(lambda status: status.queues, "the engine told its statistics")
        _ask_for_models(status.serving)
        eventually(lambda: len(ask_figures(agent.socket).requests) == 3, "the requests are told of")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url)
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request) as answer:
            families = {family.name: family for family in parse(answer.read().decode())}
        figures = ask_figures(agent.socket)
        assert agent.stop() == 0
        with pytest.raises(OSError):
            urllib.request.urlopen(url)
    for spec in AGENT_METRICS:
        name = spec.name.removesuffix("_total") if spec.kind is MetricKind.COUNTER else spec.name
        assert families[name].type == spec.kind.value, spec.name
        assert families[name].documentation == spec.about
        labels = {*families[name].samples[0].labels} - {"le"}
        assert labels == set(spec.labels)
    values = {
        (one.name, one.labels.get("outcome", "")): one.value
        for family in families.values()
        for one in family.samples
        if "le" not in one.labels
    }
    assert values["stageloom_tasks_total", "completed"] == 40
    assert values["stageloom_task_latency_seconds_count", ""] == 40
    assert values["stageloom_task_queueing_seconds_count", ""] == 40
    latency_s, queueing_s = (
        values[f"stageloom_task_{name}_seconds_sum", ""] for name in ("latency", "queueing")
    )
    assert 0 < queueing_s < latency_s < 40
    assert {(one.protocol, one.method): one.statuses for one in figures.requests} == {
        ("http", "live"): {"200": 2},
        ("http", "metadata"): {"404": 1},
        ("grpc", "ModelMetadata"): {"NOT_FOUND": 1},
    }
    assert values["stageloom_agent_applications", ""] == 1  # HTTP and gRPC
    assert values["stageloom_engine_process_resident_memory_bytes", ""] > 1 << 20
    assert figures.models[0].model == "tiny"
