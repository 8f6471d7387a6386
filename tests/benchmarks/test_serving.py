"""Servers as contestants: what they are sent, who is compared, and a mix from its models to its figures."""

import json
import math
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks.serving import rivals
from benchmarks.serving.contestants import STAGELOOM, LitServer, ServerSetting
from benchmarks.serving.environments import SERVERS
from benchmarks.serving.rivals import ServersMeasurement, best_settings
from benchmarks.slo.one_mix import QUICK, MixEffort, MixResult
from stageloom.edge_agent.bench.capacity import WindowCounts
from stageloom.edge_agent.bench.contest import CapacityFound, Contest
from stageloom.edge_agent.bench.contestant import ContestantSetting, TimedTask
from stageloom.edge_agent.bench.load import WindowResult, rate_index
from stageloom.edge_agent.bench.model_files import ModelUnderTest, prepare
from tests.agent.models import write_tiny


def _carries(per_s: float) -> CapacityFound:
    return CapacityFound({rate_index(per_s): [WindowCounts(np.array([9]), np.array([9]))]})


def test_settings_of_a_server_come_from_the_one_that_carries_most() -> None:
    found = {"litserve_1x1": _carries(5.0), "litserve_2x1": _carries(9.0), "mlserver_2x2": _carries(20.0)}
    assert best_settings(found, "litserve") == ["litserve_2x1", "litserve_1x1"]
    assert best_settings(found, "mlserver") == ["mlserver_2x2"]
    assert best_settings(found, STAGELOOM) == []


def test_a_setting_whose_search_was_cut_short_comes_before_one_that_carries_less_than_it_may() -> None:
    """At 18 a second it failed, and below it nothing was tried when time was up."""
    late = [WindowCounts(np.array([9]), np.array([0]))]
    known = CapacityFound(_carries(9.0).samples | {rate_index(9.0) + 1: late})
    found = {"litserve_1x1": known, "litserve_2x1": CapacityFound({rate_index(18.0): late})}
    assert best_settings(found, "litserve", QUICK.rough_search)[0] == "litserve_2x1"
    assert best_settings(found, "litserve")[0] == "litserve_1x1"


class PlayedContest(Contest):
    """Servers that carry so many tasks a second; the first windows of two settings are far too good."""

    carried: ClassVar = dict(stageloom=40.0, rival_1x1=8.0, rival_1x2=10.0, rival_2x1=20.0, rival_2x2=10.0)

    def enter(self, settings: Iterable[ContestantSetting]) -> None:
        self._processes = {one.name: None for one in settings}  # type: ignore[misc]

    def leave(self, names: Iterable[str]) -> None:
        """Nothing was started."""

    def window(self, name: str, rate_per_s: float, number: int) -> WindowResult:
        lucky = number == 0 and name in ("rival_1x2", "rival_2x2")
        in_time = rate_per_s <= (24.0 if lucky else self.carried[name])
        return WindowResult(np.zeros(50, np.int64), np.full(50, 0.001), np.full(50, in_time))


def test_a_rival_s_best_setting_is_found_where_those_that_led_at_first_fall_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rivals, "Contest", PlayedContest)
    one = object.__new__(ServersMeasurement)
    one.name, one.result, one._effort, one._times_folder = "tiny", MixResult(), MixEffort(900.0), ""
    one._models, one._weights = [SimpleNamespace(name="tiny")], [1.0]  # type: ignore[list-item]
    one._deadlines, one.pythons = {"tiny": 1.0}, {"rival": sys.executable}
    for name, answer in (("_first_per_s", 10.0), ("_until_s", math.inf)):
        monkeypatch.setattr(one, name, lambda *_, answer=answer: answer)
    rows = one.run().rows
    (ratio,) = [row for row in rows if row["part"] == "ratio"]
    assert (ratio["rival"], ratio["value"]) == ("rival_2x1", pytest.approx(2.0, rel=0.1))
    windows = {row["server"]: row["windows"] for row in rows if row["part"] == "capacity"}
    assert windows["rival_1x1"] < 2 * one._effort.most_windows <= windows["rival_2x1"]


def test_rivals_are_pinned_to_one_version_each() -> None:
    assert set(SERVERS) == {"litserve", "mlserver"}
    assert all("==" in requirement for pins in SERVERS.values() for requirement in pins)


@pytest.fixture
def model(tmp_path: Path) -> ModelUnderTest:
    return prepare("tiny", write_tiny(tmp_path / "source.onnx"), {}, tmp_path / "models")


@pytest.fixture
def heard() -> Iterator[tuple[int, list[bytes]]]:
    """The port of a server that keeps what it is sent and refuses every second request, and what it kept."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200 if len(bodies) % 2 else 504)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *given: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1], bodies
        server.shutdown()
        thread.join()


def test_litserve_is_sent_names_types_shapes_and_bytes(
    model: ModelUnderTest, heard: tuple[int, list[bytes]]
) -> None:
    port, bodies = heard
    setting = ServerSetting("litserve_1x1", "litserve")
    rival = setting.make([model])
    assert isinstance(rival, LitServer)
    ended: list[bool] = []
    answered = threading.Semaphore(0)

    def keep(task: TimedTask, completed: bool) -> None:
        ended.append(completed)
        answered.release()

    rival.ended, rival.port = keep, port
    feeds = model.feeds(1)[0]
    for number in range(2):
        rival.submit(TimedTask(number, 0, 0.0), feeds)
        assert answered.acquire(timeout=20.0)
    rival.submit(TimedTask(2, 0, 0.0, due_s=0.0), feeds)
    assert answered.acquire(timeout=20.0)
    rival.stop()
    assert ended == [True, False, False]  # answered, refused, given up before it was sent
    assert len(bodies) == 2
    head, _, elements = bodies[0].partition(b"\n")
    name, inputs = json.loads(head)
    (given,) = inputs
    assert (name, given[0]) == ("tiny", model.inputs[0].name)
    sent = np.frombuffer(elements, given[1]).reshape(given[2])
    assert np.array_equal(sent, feeds[given[0]])


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_mix_is_served_over_grpc_and_a_rival_that_does_not_start_is_absent(
    model: ModelUnderTest, tmp_path: Path
) -> None:
    effort = replace(QUICK, window_s=0.05, highest_per_s=200.0)
    one = ServersMeasurement("tiny", [model], (1.0,), effort, times_folder=str(tmp_path))
    one.pythons = dict.fromkeys(SERVERS, sys.executable)  # which has none of them
    found = one.run()
    (capacity,) = [row for row in found.rows if row["part"] == "capacity"]
    assert capacity["server"] == STAGELOOM
    assert capacity["grid_per_s"] > 0.0
    assert {row["server"] for row in found.rows if row["part"] == "absent"} == {
        "litserve_2x1",
        "mlserver_2x1",
    }
    json.dumps(found.rows, allow_nan=False)
