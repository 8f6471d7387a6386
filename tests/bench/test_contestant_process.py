"""What a contestant's process does and its handle expects, without a process."""

import signal
from collections.abc import Iterator

import numpy as np
import pytest

from stageloom.edge_agent.bench.contestant_process import why_it_cannot_serve
from stageloom.edge_agent.bench.model_files import Feeds
from stageloom.edge_agent.bench.rival_threads import Runtime, ThreadedRival
from stageloom.edge_agent.bench.termination import ended_politely
from stageloom.edge_agent.bench.window_run import WindowRunner

FEEDS: list[list[Feeds]] = [[{"x": np.zeros(1)}], [{"x": np.zeros(1)}]]


class Failing:
    """A runtime that takes the models and cannot run some of them."""

    def __init__(self, models: tuple[int, ...]) -> None:
        self._models = models

    def run(self, worker: int, model: int, feeds: Feeds) -> object:
        if model in self._models:
            raise MemoryError("no room for activations")
        return None


def warmed_up(runtime: Runtime) -> tuple[str, str]:
    """Why it cannot serve, and the problem that it tells."""
    rival, runner = ThreadedRival(lambda: runtime, 2, workers=1), WindowRunner(FEEDS)
    try:
        return why_it_cannot_serve(rival, runner, [0, 1]), rival.problem
    finally:
        rival.stop()


def test_a_contestant_whose_warm_up_completes_nothing_cannot_serve_for_that_reason() -> None:
    reason = "MemoryError: no room for activations"
    assert warmed_up(Failing((0, 1))) == (reason, reason)


def test_a_contestant_that_fails_at_one_model_serves_and_tells_the_error() -> None:
    assert warmed_up(Failing((1,))) == ("", "MemoryError: no room for activations")
    assert warmed_up(Failing(())) == ("", "")


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def ending(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that ends a program, with what it does by default."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_a_closed_terminal_ends_a_comparison_as_sigterm_does(ending: signal.Signals) -> None:
    with pytest.raises(SystemExit) as ended, ended_politely():
        signal.raise_signal(ending)
    assert ended.value.code == 128 + ending
    assert signal.getsignal(ending) is signal.SIG_DFL


def test_under_nohup_a_comparison_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_politely():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
