"""Subjects and the plans that are made of them."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from benchmarks import zoo
from benchmarks.gpu.networks import MODELS, oracle
from benchmarks.gpu.plans import (
    GROUP_STREAMS,
    SEQUENTIAL,
    Knowledge,
    blocks_of,
    mix_candidates,
    model_candidates,
    on_own_streams,
    stages_beside,
    whole,
)
from benchmarks.gpu.rivals import MIX
from stageloom.edge_agent.executor.cuda.streams import MAX_STREAMS, Nature
from stageloom.shared.artifact import open_artifact
from stageloom.shared.bound import bind
from stageloom.shared.ids import OpId
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits
from stageloom.shared.plan import IssueOrder
from stageloom.shared.schedule import Schedule, StreamSchedule
from tests.benchmarks.gpu.tiny import SIZE, WIDTH, subject_of


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "squeezenet" else pytest.mark.full) for name in MODELS]
)
def test_artifacts_made_without_onnxruntime_are_the_importers(name: str, tmp_path: Path) -> None:
    zoo.write(name, tmp_path / "model.onnx", width=WIDTH, size=SIZE)
    import_here(tmp_path / "model.onnx", {}, tmp_path, ImportLimits(), lambda line: None)
    assert subject_of(name).artifact.graph == open_artifact(tmp_path / ARTIFACT_NAME).graph


@pytest.mark.parametrize("name", MODELS)
def test_the_oracle_is_onnxruntimes_answer(name: str) -> None:
    subject = subject_of(name)
    session = onnxruntime.InferenceSession(subject.artifact.onnx_bytes(), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {session.get_inputs()[0].name: subject.image})
    assert subject.error_of(logits) < 1e-4


def test_the_oracle_depends_on_the_image() -> None:
    subject = subject_of("squeezenet")
    model = zoo.build("squeezenet", width=WIDTH, size=SIZE)
    other = oracle(model, subject.image[..., ::-1].copy())
    assert subject.error_of(other) > 0.01
    assert subject.error_of(np.full_like(other, np.nan)) == float("inf")


@pytest.mark.parametrize("name", MODELS)
def test_every_policy_is_a_legal_plan(name: str) -> None:
    subject = subject_of(name)
    found = model_candidates(subject, Knowledge("torch_cpu", "fp32"))
    names = [one.name for one in found]
    assert names[0] == SEQUENTIAL and len(set(names)) == len(names) >= 3
    for one in found:
        bind(one.plan, {subject.artifact.digest: subject.artifact.graph})


def test_mixed_plans_are_legal_and_keep_to_the_group_streams() -> None:
    subjects = [subject_of(name) for name in MODELS]
    known = Knowledge("torch_cuda", "fp32")
    chosen: dict[str, Schedule] = {}
    for subject in subjects:
        staged = [one for one in model_candidates(subject, known) if one.name.startswith("ours ios")]
        chosen[subject.name] = staged[0].plan.combined[0].schedule
    found = mix_candidates(subjects, known, chosen)
    graphs = {one.artifact.digest: one.artifact.graph for one in subjects}
    assert {one.subject for one in found} == {MIX}
    assert "ours ios, stages beside" in {one.name for one in found}
    for one in found:
        bind(one.plan, graphs)
        schedule = one.plan.combined[0].schedule
        if isinstance(schedule, StreamSchedule):
            wide = one.plan.executor.issue is IssueOrder.SCHEDULE
            most = MAX_STREAMS if wide else GROUP_STREAMS
            assert max(launch.stream for launch in schedule.launches) < most


def test_independent_members_are_launched_by_turns() -> None:
    graph = whole([subject_of("squeezenet")] * 3)
    schedule = on_own_streams(graph, 2)
    assert [one.stream for one in schedule.launches[:6]] == [0, 1, 0, 0, 1, 0]
    assert sorted(one.op for one in schedule.launches) == list(range(graph.size))


def test_stages_beside_need_stages_of_every_member() -> None:
    graph = whole([subject_of("squeezenet")])
    assert stages_beside([on_own_streams(graph)], graph) is None


def test_measured_times_reach_the_costs_and_demands_reach_opara() -> None:
    subject = subject_of("squeezenet")
    size = len(subject.artifact.graph.operators)
    natures = {
        OpId(op): Nature(seconds=1e-6 * (1 + op), memory_bound=op % 2 == 0, demand=0.5) for op in range(size)
    }
    known = Knowledge("torch_cpu", "fp32", {subject.name: natures})
    costs = known.costs([subject], 0.5)
    assert costs.measured_s[subject.artifact.digest, OpId(0)] == pytest.approx(3e-6)
    profiles = known.profiles([subject])
    assert profiles is not None and [own.memory_intensive for own in profiles[:2]] == [True, False]
    assert profiles[0].demand == 0.5
    assert known.profiles([subject, subject_of("resnet50")]) is None
    assert len(blocks_of(subject)) > 3
