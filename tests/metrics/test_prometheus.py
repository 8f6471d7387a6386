"""Debian's Prometheus scrapes an agent and a planner, and every panel and alert has its data."""

import json
import re
import shutil
import ssl
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import yaml

from stageloom import Client
from stageloom.edge_agent.metrics.settings import MetricsSettings
from stageloom.edge_agent.reporting.status import AgentStatus
from stageloom.edge_agent.serving.settings import ServingSettings
from tests.agent.conftest import eventually
from tests.e2e.fleet import Device, Fleet
from tests.e2e.networks import ROW_SHAPE, write_chain
from tests.metrics.deployed import EXAMPLE, RULES, panel_queries
from tests.planner.api.rig import unverified

_LISTENING = re.compile(r'^(?=.*msg="Listening on").*\baddress="?([^\s"]+)', re.MULTILINE)


class Prometheus:
    """A server on a port of its own choice; it is asked through its HTTP API."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        file, log = folder / "prometheus.yml", folder / "prometheus.log"
        file.write_text(yaml.safe_dump(config))
        command = [
            "prometheus",
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            "--web.listen-address=127.0.0.1:0",
        ]
        with log.open("w") as opened:
            self.process = subprocess.Popen(command, stderr=opened, stdout=opened)
        eventually(lambda: _LISTENING.search(log.read_text()), "it listens", within_s=30.0)
        found = _LISTENING.search(log.read_text())
        assert found is not None
        self._address = found[1]
        eventually(self._is_ready, "it is ready", within_s=30.0)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=20):
                return True
        except urllib.error.HTTPError:
            return False

    def ask(self, path: str, **query: str) -> Any:
        """The data of an answer."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return found["data"]

    def values(self, expression: str) -> list[float]:
        """The value of each series now."""
        return [float(one["value"][1]) for one in self.ask("query", query=expression)["result"]]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def _config(agent: str, planner: str, folder: Path) -> dict[str, Any]:
    """The example configuration with other addresses, and quicker."""
    config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    config["global"] = {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    of_agent, of_planner = config["scrape_configs"]
    of_agent["static_configs"][0]["targets"] = [agent]
    of_planner["static_configs"][0]["targets"] = [planner]
    of_planner["authorization"]["credentials_file"] = str(folder / "stageloom.token")
    of_planner["tls_config"]["ca_file"] = str(folder / "planner.pem")
    for job in (of_agent, of_planner):
        job["scrape_interval"], job["scrape_timeout"] = "500ms", "500ms"
    return config


@contextmanager
def _system(folder: Path) -> Iterator[tuple[Fleet, Device, AgentStatus]]:
    """A planner whose API other machines reach, and a device that it gave a plan, with metrics."""
    fleet = Fleet(folder / "fleet", start=False)
    fleet.config.write_text(fleet.config.read_text() + 'api = "127.0.0.1:0"\n')
    fleet.start()
    try:
        file = write_chain(folder / "alpha.onnx", 1)
        fleet.do("model", "add", str(file), "--name", "alpha")
        fleet.make_plan("alpha", "--model", "alpha", "--partition", "base")
        with Device(fleet, "edge", folder).join() as device:
            agent = device.start(
                metrics=MetricsSettings(listen="127.0.0.1:0"), serving=ServingSettings(http="127.0.0.1:0")
            )
            device.run("alpha")
            status = agent.until(lambda status: status.metrics and status.metrics.http, "metrics are told")
            served = agent.until(
                lambda status: status.serving and status.serving.http, "HTTP is served"
            ).serving
            assert served is not None
            _body(f"http://{served.http}/v2/health/live")
            yield fleet, device, status
    finally:
        fleet.close()


def _body(url: str, token: str = "") -> str:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    context: ssl.SSLContext | None = unverified() if url.startswith("https") else None
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, context=context, timeout=20) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize(
    "line",
    [
        'ts=1 level=info component=web msg="Listening on" address=127.0.0.1:9090',
        'time=1 level=INFO msg="Listening on" component=web address="127.0.0.1:9090" tls=false',
        'time=1 address=127.0.0.1:9090 level=INFO msg="Listening on"',
    ],
)
def test_address_is_found_wherever_a_version_logs_it(line: str) -> None:
    first = 'ts=0 msg="Start listening for connections" address=127.0.0.1:0'
    found = _LISTENING.search(f"{first}\n{line}\n")
    assert found is not None and found[1] == "127.0.0.1:9090"


@pytest.mark.full
@pytest.mark.promise("metrics-scraped-both-sides")
@pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed (apt-get install prometheus)",
)
def test_prometheus_scrapes_both_sides_and_every_panel_has_data(tmp_path: Path) -> None:
    with _system(tmp_path) as (fleet, device, status):
        assert status.metrics is not None and status.serving is not None
        served = f"http://{status.serving.http}/v2/health/live"
        fleet.ask(
            "access",
            "create",
            "prometheus",
            "--role",
            "viewer",
            "--output",
            str(tmp_path / "stageloom.token"),
        )
        certificate = (fleet.home / "api.pem").read_text()
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        (tmp_path / "planner.pem").write_text(
            begin + certificate.partition(begin)[2].partition(end)[0] + end + "\n"
        )
        planner_url = fleet.planner.ready["api"]
        config = _config(status.metrics.http, urlsplit(planner_url).netloc, tmp_path)
        prometheus = Prometheus(tmp_path, config)
        try:
            eventually(lambda: prometheus.values("up") == [1.0, 1.0], "both are scraped", within_s=60.0)
            fleet.make_plan("searched", "--model", "alpha", "--scheduler", "ios")
            lacking = dict(enumerate(panel_queries()))

            with Client(device.running.socket) as client:
                row = np.ones(ROW_SHAPE, np.float32)

                def complete() -> bool:
                    _body(served)
                    for _ in range(50):
                        client.run("alpha", {"input": row})
                    for number, (_, expression) in list(lacking.items()):
                        if not all(map(isnan, prometheus.values(expression))):  # which a graph leaves out
                            del lacking[number]
                    return not lacking

                try:
                    eventually(complete, "every panel has data", within_s=60.0)
                except AssertionError as error:
                    error.add_note(f"without data: {lacking}")
                    raise
            rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
            assert {rule["health"] for rule in rules} <= {"ok", "unknown"}, rules
            assert not [rule["name"] for rule in rules if rule["state"] == "firing"]
        finally:
            prometheus.close()
        token = (tmp_path / "stageloom.token").read_text().strip()
        for url, bearer in ((f"http://{status.metrics.http}", ""), (planner_url, token)):
            done = subprocess.run(
                ["promtool", "check", "metrics"],
                input=_body(f"{url}/metrics", bearer),
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
