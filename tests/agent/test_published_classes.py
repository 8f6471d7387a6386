"""Every class of published files, served by a real agent and asked through its client."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stageloom import Client
from stageloom.edge_agent.config import ModelFile
from tests.agent.process import AgentProcess
from tests.importer.classes import CLASSES, Sample
from tests.importer.models import run

pytestmark = pytest.mark.more

HALF_TOLERANCE = 2e-3


def _write(folder: Path) -> dict[str, Sample]:
    samples = {name: make() for name, make in CLASSES.items() if name not in ("new_file", "dead_nodes")}
    for name, sample in samples.items():
        (folder / f"{name}.onnx").write_bytes(sample.model.SerializeToString())
    return samples


@pytest.mark.promise("whatever-onnxruntime-runs-pinned")
def test_an_agent_serves_every_class_of_published_files(tmp_path: Path) -> None:
    """Scalars, inputs without an element, odd names, states, control flow: through shared memory and back."""
    samples = _write(tmp_path)
    files = tuple(
        ModelFile(
            path=str(tmp_path / f"{name}.onnx"),
            name=name,
            shapes={n: tuple(dims) for n, dims in sample.shapes.items()},
        )
        for name, sample in samples.items()
    )
    rng = np.random.default_rng(3)
    with AgentProcess(tmp_path / "home", models=files, replicas=1) as agent:
        with Client(agent.socket_when_ready()) as client:
            infos = client.models()
            for name, sample in samples.items():
                feeds: dict[str, Any] = {}
                for tensor in infos[name].inputs:
                    low, high = sample.ranges.get(tensor.name, (0, 1))
                    drawn: Any = rng.integers(low, high, tensor.shape, endpoint=True)
                    if tensor.dtype.startswith("float"):
                        drawn = rng.standard_normal(tensor.shape)
                    feeds[tensor.name] = np.asarray(drawn, tensor.dtype)
                served = client.submit(name, feeds).result(timeout=20.0)
                own = {value.name for value in sample.model.graph.input}
                expected = run(sample.model, {n: a for n, a in feeds.items() if n in own}, optimise=True)
                assert served.keys() == expected.keys(), name
                for output, array in expected.items():
                    tolerance = HALF_TOLERANCE if array.dtype == np.float16 else 1e-5
                    assert served[output].dtype == array.dtype and served[output].shape == array.shape
                    np.testing.assert_allclose(served[output], array, tolerance, tolerance, err_msg=name)
