"""Which sessions workers call, and how long models are timed, without a runtime."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from stageloom.edge_agent.bench import runtimes
from stageloom.edge_agent.bench.model_files import Feeds, ModelUnderTest
from stageloom.edge_agent.bench.runtime_options import RuntimeOptions
from stageloom.edge_agent.bench.runtimes import load_runtime, service_times_s
from stageloom.shared.ids import Digest

MODELS = [ModelUnderTest(name, Path(), Path(), Digest(""), ()) for name in ("a", "b")]


def numbered_sessions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sessions that are opened from now on answer with their number; threads of each."""
    opened: list[int] = []

    def call(path: Path, threads: int, *, spinning: bool) -> Callable[[Feeds], object]:
        number = len(opened)
        opened.append(threads)
        return lambda feeds: number

    monkeypatch.setattr(runtimes, "onnxruntime_call", call)
    return opened


@pytest.mark.parametrize(
    ("workers", "threads", "sessions"), [(1, 4, 1), (2, 2, 2), (4, 1, 1), (0, 0, 1), (0, 1, 1), (0, 2, 1)]
)
def test_workers_of_several_threads_have_sessions_of_their_own(
    workers: int, threads: int, sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All callers of a session share its helper threads."""
    opened = numbered_sessions(monkeypatch)
    runtime = load_runtime(RuntimeOptions(workers=workers, threads=threads), MODELS)
    assert opened == [threads] * sessions * len(MODELS)
    for model in range(len(MODELS)):
        called = {runtime.run(worker, model, {}) for worker in range(workers or len(MODELS))}
        assert called == set(range(model * sessions, (model + 1) * sessions))


@dataclass
class SlowRuntime:
    """In the place of a runtime: calls take some time of a clock that nothing else moves."""

    call_s: float
    now_s: float = 0.0
    calls: int = 0

    def clock(self) -> float:
        return self.now_s

    def run(self, worker: int, model: int, feeds: Feeds) -> object:
        self.calls += 1
        self.now_s += self.call_s
        return None


@pytest.mark.parametrize(
    ("call_s", "most_calls", "most_s"), [(0.001, 420, 0.42), (0.05, 24, 1.2), (0.2, 8, 1.6), (2.0, 2, 4.0)]
)
def test_a_slow_model_is_not_timed_for_minutes(
    call_s: float, most_calls: int, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison times each model with each runtime for each number of threads before it begins."""
    slow = SlowRuntime(call_s)
    monkeypatch.setattr(runtimes, "load_runtime", lambda options, models: slow)
    monkeypatch.setattr(ModelUnderTest, "feeds", lambda self, count: [{}] * count)
    found = service_times_s(MODELS[:1], RuntimeOptions(), 0.4, slow.clock)
    assert found == {"a": pytest.approx(call_s)}
    assert slow.calls <= most_calls and slow.now_s <= most_s + call_s / 2


def test_a_slow_model_takes_no_looks_from_a_quick_one(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = SlowRuntime(2.0), SlowRuntime(0.001)

    def clock() -> float:
        return slow.now_s + quick.now_s

    monkeypatch.setattr(
        runtimes, "load_runtime", lambda options, models: slow if models[0].name == "a" else quick
    )
    monkeypatch.setattr(ModelUnderTest, "feeds", lambda self, count: [{}] * count)
    service_times_s(MODELS, RuntimeOptions(), 0.4, clock)
    assert slow.calls == 2 and quick.now_s == pytest.approx(0.4, abs=0.01)
