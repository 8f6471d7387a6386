"""Which executors a machine has and which cores, as doctor and the planner are told."""

import os

import pytest

from stageloom.edge_agent.machine import control_groups
from stageloom.edge_agent.machine.control_groups import usable_cores
from stageloom.edge_agent.machine.doctor import executors_check
from stageloom.edge_agent.machine.executors import (
    OnnxFacts,
    TorchFacts,
    core_ranges,
    executor_problems,
    machine_facts,
    problems_of,
)
from stageloom.shared.messages.telemetry import CoreRange, Row, decode_row, encode_row

ONNX, TORCH = OnnxFacts(present=True), TorchFacts("2.8.0")
ONNX_GPU, TORCH_GPU = OnnxFacts(True, True, "13.0"), TorchFacts("2.8.0", "13.0")


@pytest.mark.parametrize(
    ("onnx", "torch", "gpus", "openvino", "usable"),
    [
        (ONNX, TORCH, [], True, {"onnx", "openvino", "torch_cpu"}),
        (ONNX, TorchFacts(), [], False, {"onnx"}),
        (OnnxFacts(), TorchFacts(), [], True, {"openvino"}),
        (ONNX_GPU, TORCH_GPU, [], False, {"onnx", "torch_cpu"}),
        (ONNX_GPU, TORCH_GPU, ["a GPU"], False, {"onnx", "torch_cpu", "onnx_cuda", "torch_cuda"}),
        (ONNX, TORCH, ["a GPU"], False, {"onnx", "torch_cpu"}),
    ],
)
def test_an_executor_is_usable_where_its_packages_and_its_gpu_are(
    onnx: OnnxFacts, torch: TorchFacts, gpus: list[str], openvino: bool, usable: set[str]
) -> None:
    problems = problems_of(onnx, torch, gpus, twice=False, openvino=openvino)
    assert {name for name, problem in problems.items() if not problem} == usable


def test_two_runtimes_that_overwrite_each_other_can_run_nothing() -> None:
    problems = problems_of(ONNX_GPU, TORCH, ["a GPU"], twice=True, openvino=False)
    assert "break each other" in problems["onnx"] and "break each other" in problems["onnx_cuda"]


def test_cores_are_told_as_ranges() -> None:
    assert core_ranges([]) == [] and core_ranges([3]) == [(3, 3)]
    assert core_ranges([5, 0, 1, 7, 2]) == [(0, 2), (5, 5), (7, 7)]


def test_doctor_names_executors_and_cores_and_why_not_the_others() -> None:
    found = executors_check({"onnx": "", "openvino": "", "torch_cuda": "there is no GPU"}, [0, 1, 4])
    assert (found.result, found.detail) == (
        "ok",
        "onnx, openvino on cores 0-1, 4; not torch_cuda: there is no GPU",
    )
    assert executors_check({"onnx": "onnxruntime is not installed"}, [0]).result == "fail"


def test_a_planner_is_told_the_executor_that_the_agent_is_set_to_first_and_it_fits_a_row() -> None:
    facts = machine_facts("openvino", 3)
    assert facts.executors[0].name == "openvino" and facts.intra_op_threads == 3
    assert {one.name: one.problem for one in facts.executors} == {**executor_problems(), "null": ""}
    cores = {core for one in facts.cores for core in range(one.first, one.last + 1)}
    assert cores == set(usable_cores())
    assert decode_row(encode_row(Row(1, facts))).data == facts
    assert machine_facts("null", 1).executors[0].name == "null"


def test_with_a_quota_a_planner_is_told_as_many_cores_as_it_pays_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 5, 7})
    monkeypatch.setattr(control_groups, "cpu_quota", lambda root: 2.5)
    assert machine_facts("onnx", 1).cores == (CoreRange(2, 3),)
