"""Times of models whose process dies, without a process."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from stageloom.edge_agent.bench import in_process
from stageloom.edge_agent.bench.in_process import measure_service_s, openvino_reduces
from stageloom.edge_agent.bench.model_files import ModelUnderTest
from stageloom.edge_agent.bench.runtime_options import RuntimeOptions
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import Digest

NAMES = ("quick", "deadly", "slow")
MODELS = [ModelUnderTest(name, Path(), Path(), Digest(""), ()) for name in NAMES]


class MortalPool:
    """In the place of a pool of one process, which the model `deadly` ends."""

    def __enter__(self) -> "MortalPool":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing runs."""

    def submit(
        self, function: Callable[..., Any], models: Sequence[ModelUnderTest] = (), *_: Any
    ) -> Future[Any]:
        done: Future[Any] = Future()
        if not models or any(one.name == "deadly" for one in models):
            done.set_exception(BrokenProcessPool("a process died"))
        else:
            done.set_result({one.name: 0.5 for one in models})
        return done


def test_of_models_whose_process_dies_each_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "_process", MortalPool)
    found = measure_service_s(MODELS, RuntimeOptions(), 0.4)
    assert found == {"quick": 0.5, "deadly": "it ended its process", "slow": 0.5}


class PoolHere(MortalPool):
    """In the place of a pool of one process: it runs what it is given here."""

    def submit(self, function: Callable[..., Any], *given: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*given))
        return done


@pytest.mark.skipif(find_spec("openvino") is None, reason="openvino is not installed")
@pytest.mark.parametrize("able", [True, False])
def test_for_its_precisions_openvino_is_asked_and_loads_no_model(
    able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it may not read the first of them, or none."""
    monkeypatch.setattr(in_process, "_process", PoolHere)
    monkeypatch.setattr("stageloom.edge_agent.executor.openvino.executor.computes_bf16", lambda: able)
    assert openvino_reduces() is able


def test_a_process_that_ends_as_it_asks_for_precisions_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "_process", MortalPool)
    with pytest.raises(ExecutorError, match="OpenVINO ended its process as it was asked"):
        openvino_reduces()
