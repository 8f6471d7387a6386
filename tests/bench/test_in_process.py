"""Times of models whose process dies, without a process."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
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

    def submit(self, function: Callable[..., Any], models: Sequence[ModelUnderTest], *_: Any) -> Future[Any]:
        done: Future[Any] = Future()
        given = [models] if isinstance(models, ModelUnderTest) else models
        if any(one.name == "deadly" for one in given):
            done.set_exception(BrokenProcessPool("a process died"))
        else:
            done.set_result({one.name: 0.5 for one in given})
        return done


def test_of_models_whose_process_dies_each_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "_process", MortalPool)
    found = measure_service_s(MODELS, RuntimeOptions(), 0.4)
    assert found == {"quick": 0.5, "deadly": "it ended its process", "slow": 0.5}


def test_a_model_that_ends_the_process_that_asks_for_precisions_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_process, "_process", MortalPool)
    with pytest.raises(ExecutorError, match="as it loaded model 'deadly'"):
        openvino_reduces(MODELS[1])
