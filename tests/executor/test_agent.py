"""An agent that was configured with another executor than onnx, as real processes."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from stageloom import Client
from stageloom.edge_agent.config import ModelFile
from tests.agent.models import ROW_SHAPE, write_tiny
from tests.agent.process import AgentProcess


@pytest.mark.full
@pytest.mark.parametrize(("executor", "package"), [("torch_cpu", "torch"), ("openvino", "openvino")])
def test_an_agent_serves_a_model_file_on_it(executor: str, package: str, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    file = write_tiny(tmp_path / "net.onnx")
    models = (ModelFile(path=str(file), name="net"),)
    rng = np.random.default_rng(7)
    session = onnxruntime.InferenceSession(str(file))
    with AgentProcess(tmp_path / "home", models=models, executor=executor) as agent:
        status = agent.until_ready()
        assert status.plan is not None
        with Client(agent.socket) as client:
            for _ in range(5):
                row = rng.normal(size=ROW_SHAPE).astype(np.float32)
                (expected,) = session.run(None, {"input": row})
                got = client.run("net", {"input": row}, timeout_s=60)["output"]
                np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
