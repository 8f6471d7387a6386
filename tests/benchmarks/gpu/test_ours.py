"""Our executor's plans as rows: on a simulated device, what loading one shows of its operators."""

from functools import partial

import pytest

from benchmarks.gpu.ours import LoadedCandidate, ResidentExecutor
from benchmarks.gpu.plans import Knowledge, model_candidates, sequential_candidate
from stageloom.edge_agent.executor.torch.builder import Effort
from tests.benchmarks.gpu.tiny import subject_of
from tests.executor.torch.simulated import SimulatedGraphDevice

pytestmark = pytest.mark.more


def test_what_loading_a_plan_shows_of_operators_reaches_the_schedulers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = partial(Effort, warm_runs=1, laps=1, launches_per_lap=1, product_side=16)
    monkeypatch.setattr("benchmarks.gpu.ours.Effort", quick)
    device = partial(SimulatedGraphDevice, 1)
    monkeypatch.setattr("stageloom.edge_agent.executor.torch.executor.CudaGraphDevice", device)
    subject, executor = subject_of("squeezenet"), ResidentExecutor()
    first = sequential_candidate(subject, Knowledge("torch_cuda", "fp32"))
    loaded = LoadedCandidate(executor, first, [subject])
    ((answered, logits),) = loaded.step()
    assert answered is subject and subject.error_of(logits) < 1e-4
    known = Knowledge("torch_cuda", "fp32", {subject.name: executor.natures(loaded.key)})
    operators = subject.artifact.graph.operators
    assert len(known.natures[subject.name]) > len(operators) / 2, "others run as part of these"
    profiles = known.profiles([subject])
    assert profiles is not None and len(profiles) == len(operators)
    assert {candidate.name for candidate in model_candidates(subject, known)} >= {
        "ours sequential",
        "ours opara",
    }
    executor.close()
