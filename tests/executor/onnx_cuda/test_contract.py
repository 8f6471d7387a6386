"""The contract of all executors that compute, on simulated streams; see tests/executor/test_contract.py."""

import pytest

from tests.executor.contract import cases
from tests.executor.contract.cases import SCHEDULES, Case
from tests.executor.onnx_cuda.simulated import simulated
from tests.executor.test_contract import QUICK, SLOW, TRIO, ZOO, agrees, subject

_OFTEN = {("googlenet", "ios"), ("googlenet", "random_streams"), ("squeezenet_bypass", "merged")}


def _agrees(case: Case, repeats: int, seed: int = 0) -> None:
    executor = simulated(seed)
    try:
        agrees(executor, case, repeats)
    finally:
        executor.close()


@pytest.mark.promise("sessions-several-streams-give")
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(name, schedule, marks=[] if (name, schedule) in _OFTEN else SLOW)
        for name in sorted({*ZOO, *QUICK})
        for schedule in SCHEDULES
    ],
)
def test_every_block_border_equals_the_whole_model(name: str, schedule: str) -> None:
    _agrees(cases.alone(subject(name), schedule, "onnx_cuda"), 3)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["merged", "random_stages"])
def test_rows_of_a_padded_batch_equal_single_runs(schedule: str) -> None:
    for case in cases.batches(subject("squeezenet_bypass"), schedule, "onnx_cuda"):
        _agrees(case, 2)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["merged", "opara", "random_stages"])
def test_every_mask_of_a_combined_block_equals_the_whole_models(schedule: str) -> None:
    for seed, case in enumerate(cases.masks([subject(name) for name in TRIO], schedule, "onnx_cuda")):
        _agrees(case, 2, seed)


@pytest.mark.full
def test_replicas_in_one_combined_block_keep_their_instances_apart() -> None:
    _agrees(cases.replicas(subject("googlenet"), "merged", "onnx_cuda"), 5)
