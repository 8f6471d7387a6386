"""A small model under every scheduler: stages and streams give the outputs of the whole model."""

import pytest

from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.verify.check import verify_artifact
from stageloom.shared.errors import ExitCode
from stageloom.shared.search.registry import schedulers
from tests.executor.models import artifact_of


@pytest.mark.parametrize("schedule", sorted(schedulers()))
def test_squeezenet_agrees_under_every_scheduler(schedule: str) -> None:
    report = verify_artifact(artifact_of("squeezenet"), schedule, OnnxExecutor(), repeats=3)
    assert report.exit_code is ExitCode.OK
    assert report.difference <= 1e-4
    assert report.sensitivity > 1e-2
