"""Random graphs, axes and boundaries: the halves of an operator, joined, are the operator."""

import random

import numpy as np
import pytest

from stageloom.edge_agent.executor.executors import Executors
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.shared.artifact import open_artifact
from stageloom.shared.errors import ExecutorError
from stageloom.shared.importer.pipeline import import_here
from stageloom.shared.importer.process import ARTIFACT_NAME, ImportLimits
from stageloom.shared.partition import Axis, Split
from tests.executor.installed import installed
from tests.executor.models import random_inputs, reference
from tests.executor.split_cases import (
    TOLERANCE,
    SplitSubject,
    joined_of,
    random_splits,
    split_plan,
    values_for,
    whole_of,
    worst_difference,
    write_model,
)
from tests.executor.split_graphs import random_net
from tests.scratch import scratch

FEW = 20
SOME = range(8, 200)
MANY = [pytest.param(seed, marks=pytest.mark.full) for seed in range(FEW, 400)]


def subject_of(seed: int) -> SplitSubject:
    """A random graph as an artifact."""
    folder = scratch()
    path = write_model(folder, random_net(seed).SerializeToString())
    import_here(path, {}, folder, ImportLimits(), lambda line: None)
    return SplitSubject.of(open_artifact(folder / ARTIFACT_NAME))


@pytest.mark.promise("split-operator-is-the-operator")
@pytest.mark.parametrize("seed", [*range(FEW), *MANY])
def test_halves_of_random_operators_joined_are_the_operators(seed: int) -> None:
    subject = subject_of(seed)
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    for op in range(len(subject.artifact.graph.operators)):
        inputs = values_for(subject.artifact.graph, subject.inputs(op, op), numbers)
        for axis in subject.reader.axes(op):
            wanted = whole_of(subject.parts, (op,), inputs)
            quanta = (axis.extent - 1) // axis.quantum
            for boundary in {axis.quantum * rng.randint(1, quanta) for _ in range(3)}:
                split = Split(op, op, axis.axis, boundary)
                assert worst_difference(joined_of(subject.parts, split, inputs), wanted) < TOLERANCE, split


@pytest.mark.parametrize("seed", [*range(FEW), *MANY])
def test_halves_of_random_chains_joined_are_the_chains(seed: int) -> None:
    subject = subject_of(seed)
    numbers = np.random.default_rng(seed)
    for split in random_splits(subject, random.Random(seed)):
        inputs = values_for(subject.artifact.graph, subject.inputs(split.first, split.last), numbers)
        wanted = whole_of(subject.parts, tuple(range(split.first, split.last + 1)), inputs)
        assert worst_difference(joined_of(subject.parts, split, inputs), wanted) < TOLERANCE, split


@pytest.mark.promise("split-operator-is-the-operator")
@pytest.mark.parametrize("seed", [*range(FEW), *MANY])
def test_what_the_rules_refuse_an_executor_refuses_and_all_else_runs(seed: int) -> None:
    """Any boundary of any operator: either a violation is told, or the halves are the operator."""
    subject = subject_of(seed)
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    graph = subject.artifact.graph
    for op, operator in enumerate(graph.operators):
        shape = graph.tensors[operator.outputs[0]].shape
        for axis in Axis:
            split = Split(op, op, axis, rng.randint(1, max(shape)))
            inputs = values_for(graph, subject.inputs(op, op), numbers)
            if subject.reader.violations([split]):
                with pytest.raises(ExecutorError):
                    joined_of(subject.parts, split, inputs)
            else:
                wanted = whole_of(subject.parts, (op,), inputs)
                assert worst_difference(joined_of(subject.parts, split, inputs), wanted) < TOLERANCE, split


@pytest.mark.parametrize("executor", ["onnx", "torch_cpu"])
@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(n, marks=pytest.mark.full) for n in range(8, 200))]
)
def test_a_random_model_of_which_every_operator_is_split_is_the_model(seed: int, executor: str) -> None:
    subject = subject_of(seed)
    artifact = subject.artifact
    splits = random_splits(subject, random.Random(seed))
    plan = split_plan(artifact, splits, executors=(executor, executor))
    inputs = random_inputs(artifact.graph, seed)
    with InProcessEngine(Executors(installed)) as engine:
        engine.activate(engine.load(plan, {artifact.digest: artifact}))
        got = engine.submit("m", inputs).result(60.0)
    wanted = reference(artifact, inputs, list(got))
    for name, array in got.items():
        norm = max(float(np.linalg.norm(wanted[name])), 1e-6)
        assert float(np.linalg.norm(array - wanted[name])) / norm < TOLERANCE, name
