"""Models served by an agent process and asked through its client, beside onnxruntime on the file itself."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import tomli_w

from stageloom.edge_agent.config import SETTINGS_NAME, TABLE
from stageloom.edge_agent.ingest.channel import socket_of
from stageloom.edge_agent.ingest.client import Client
from stageloom.edge_agent.verify.standards import MAX_DIFFERENCE, MAX_TOLERANCE, relative_difference
from stageloom.shared.errors import StageloomError, UnavailableError

_START_S = 240.0
_POLL_S = 0.1
_RESULT_S = 60.0
_NOISE_FACTOR = 10.0
_TASKS = 2
_QUIET = MAX_TOLERANCE / _NOISE_FACTOR  # so much may onnxruntime differ from itself on a task's inputs

Feeds = Mapping[str, Any]


@dataclass(frozen=True)
class Served:
    """A model to serve: what applications call it, its file, and how its inputs are pinned."""

    name: str
    path: Path
    shapes: Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Answer:
    """How far served outputs are from onnxruntime's, and how far they may be."""

    difference: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """Within what onnxruntime itself allows."""
        return self.difference <= self.allowed


@contextlib.contextmanager
def agent(models: Sequence[Served], home: Path) -> Iterator[Client]:
    """A client of `stageloom-agent run` once it serves all `models`; the agent ends with the block.

    Raises:
        UnavailableError: the agent ended or did not serve in time.
    """
    home.mkdir(parents=True)
    settings = {
        "replicas": 1,
        "models": [{"name": m.name, "path": str(m.path), "shapes": dict(m.shapes)} for m in models],
    }
    (home / SETTINGS_NAME).write_text(tomli_w.dumps({TABLE: settings}))
    log = home / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "stageloom.edge_agent", "run", "--home", str(home)],
            stdout=sink,
            stderr=sink,
        )
    try:
        with _connected(process, home, {model.name for model in models}, log) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


def _connected(process: subprocess.Popen[bytes], home: Path, names: set[str], log: Path) -> Client:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        client = _try_connecting(home)
        if client is not None:
            if names <= client.models().keys():
                return client
            client.close()
        time.sleep(_POLL_S)
    lines = log.read_text(errors="replace").splitlines() or ["it said nothing"]
    raise UnavailableError(f"the agent does not serve: {lines[-1]}")


def _try_connecting(home: Path) -> Client | None:
    try:
        return Client(socket_of(home))
    except UnavailableError:
        return None


def ask(client: Client, model: Served, draws: Iterable[Feeds]) -> Answer:
    """The worst of some tasks, all submitted at once, on the inputs of `draws` that say most.

    The bound is the difference that `verify` allows, or ten times what onnxruntime's own optimisations make
    of the same inputs, as far as `verify` goes: a quantised model rounds a value up or down by that noise.

    Raises:
        StageloomError: a task was refused or failed.
    """
    cases = telling_cases(OwnNoise(model.path), draws)
    futures = [client.submit(model.name, dict(case.feeds)) for case in cases]
    answers = []
    for case, future in zip(cases, futures, strict=True):
        served = future.result(timeout=_RESULT_S)
        if served.keys() != case.expected.keys():
            raise StageloomError(f"{model.name} answers {sorted(served)}, not {sorted(case.expected)}")
        allowed = min(max(MAX_DIFFERENCE, _NOISE_FACTOR * case.noise), MAX_TOLERANCE)
        answers.append(Answer(_difference(served, case.expected), allowed))
    return max(answers, key=lambda answer: answer.difference / answer.allowed)


@dataclass(frozen=True)
class Case:
    """One input, what onnxruntime makes of the file with it, and how far it differs from itself."""

    feeds: Feeds
    expected: Mapping[str, Any]
    noise: float

    @property
    def tells(self) -> bool:
        """Whether something wrong would show: no saturated head has left only noise, or nothing but zeros."""
        return self.noise <= _QUIET and all(
            value.any() for value in self.expected.values() if value.dtype.kind == "f"
        )


class OwnNoise:
    """onnxruntime on a file, with and without its optimisations."""

    def __init__(self, path: Path) -> None:
        self._optimised = _session(path, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL)
        self._plain = _session(path, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)

    def case(self, feeds: Feeds) -> Case:
        """What it makes of one input."""
        expected = _run(self._optimised, feeds)
        return Case(feeds, expected, _difference(_run(self._plain, feeds), expected))


def telling_cases(own: OwnNoise, draws: Iterable[Feeds]) -> list[Case]:
    """The first inputs that tell something; the least noisy of all where there are not enough."""
    cases: list[Case] = []
    for feeds in draws:
        cases.append(own.case(feeds))
        if sum(case.tells for case in cases) == _TASKS:
            break
    return sorted(cases, key=lambda case: (not case.tells, case.noise))[:_TASKS]


def _session(path: Path, level: onnxruntime.GraphOptimizationLevel) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _run(session: onnxruntime.InferenceSession, feeds: Feeds) -> dict[str, Any]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def _difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    return max(relative_difference(found[name], expected[name]) for name in expected)
