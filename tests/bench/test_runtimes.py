"""Which sessions workers call, and how long models are timed, without a runtime."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stageloom.edge_agent.bench import runtimes
from stageloom.edge_agent.bench.model_files import Feeds, ModelUnderTest
from stageloom.edge_agent.bench.runtime_options import RuntimeOptions
from stageloom.edge_agent.bench.runtimes import load_runtime
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
