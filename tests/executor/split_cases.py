"""Splits for tests: halves of one operator against the whole of it, and seeded plans that split all."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from stageloom.edge_agent.executor.onnx.cache import SessionKey, ValuesSession
from stageloom.edge_agent.executor.onnx.executor import open_session
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.onnx.program import JoinRun
from stageloom.edge_agent.executor.onnx.session_executor import HalfSession, join_halves
from stageloom.edge_agent.executor.slot_store import Values
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.errors import ExecutorError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import TensorId
from stageloom.shared.importer.splittable import SplitReader
from stageloom.shared.operator_parts import SplitAxis
from stageloom.shared.partition import Split
from stageloom.shared.plan import CombinedBlock, ExecutorOptions, Member, ModelPlan, Plan, Resource
from stageloom.shared.split_graph import derive, split_dimension
from stageloom.shared.split_schedule import split_schedule

TOLERANCE = 1e-4
LEAST_SENSITIVITY = 1e-2
Opener = Callable[[SessionKey, ModelParts], ValuesSession]


def boundaries(axis: SplitAxis) -> list[int]:
    """The first quantum, the middle, the last quantum, and 1 where that is one."""
    quanta = (axis.extent - 1) // axis.quantum
    chosen = {1, (quanta + 1) // 2, quanta}
    return sorted({max(1, number) * axis.quantum for number in chosen})


def values_for(graph: Graph, tensors: Sequence[TensorId], rng: np.random.Generator) -> Values:
    """Random tensors; integers and truth values where a graph has such."""
    made: Values = {}
    for tensor in tensors:
        described = graph.tensors[tensor]
        kind = np.dtype(described.dtype)
        if kind.kind == "f":
            made[tensor] = rng.standard_normal(described.shape).astype(kind)
        else:
            made[tensor] = rng.integers(0, 2, described.shape).astype(kind)
    return made


def whole_of(
    parts: ModelParts, ops: tuple[int, ...], inputs: Values, open_any: Opener = open_session
) -> Values:
    """What operators make of their inputs in one session."""
    values = dict(inputs)
    open_any(SessionKey(parts.artifact.digest, ops, 1, 1), parts).run(values)
    return {t: values[t] for t in parts.artifact.graph.operators[ops[-1]].outputs}


def joined_of(parts: ModelParts, split: Split, inputs: Values, open_any: Opener = open_session) -> Values:
    """What both halves of a split make, joined.

    Raises:
        ExecutorError: a half cannot be made.
    """
    graph = parts.artifact.graph
    dim = split_dimension(graph, split)
    if dim is None:
        raise ExecutorError("there is no such axis")
    ops = tuple(range(split.first, split.last + 1))
    outputs = graph.operators[split.last].outputs
    rows = tuple((t, TensorId(10_000 + t), TensorId(20_000 + t)) for t in outputs)
    made: Values = {}
    for second in (False, True):
        key = SessionKey(parts.artifact.digest, ops, 1, 1, half=(dim, split.boundary, second))
        opened = open_any(key, parts)
        session = HalfSession(opened, parts.half(ops, 1, (dim, split.boundary, second)).reads, outputs)
        values = dict(inputs)
        session.run(values)
        made |= {row[2 if second else 1]: values[row[0]] for row in rows}
    join_halves(JoinRun(dim, rows), made)
    return {tensor: made[tensor] for tensor in outputs}


def worst_difference(got: Values, wanted: Values) -> float:
    """Norm of the difference over the norm of the reference, the largest of all; inf for other shapes."""
    worst = 0.0
    for tensor, reference in wanted.items():
        if got[tensor].shape != reference.shape or not np.isfinite(got[tensor].astype(np.float64)).all():
            return float("inf")
        apart = np.linalg.norm(got[tensor].astype(np.float64) - reference.astype(np.float64))
        norm = float(np.linalg.norm(reference.astype(np.float64)))
        worst = max(worst, float(apart) / norm if norm else float(apart))
    return worst


@dataclass(frozen=True)
class SplitSubject:
    """An artifact with what reads its nodes."""

    artifact: Artifact
    reader: SplitReader
    parts: ModelParts

    @classmethod
    def of(cls, artifact: Artifact) -> "SplitSubject":
        return cls(artifact, SplitReader(artifact), ModelParts(artifact))

    def inputs(self, first: int, last: int) -> tuple[TensorId, ...]:
        """What operators `first` to `last` read from outside."""
        operators = self.artifact.graph.operators[first : last + 1]
        made = {t for operator in operators for t in operator.outputs}
        return tuple(dict.fromkeys(t for operator in operators for t in operator.inputs if t not in made))

    def signatures(self) -> Iterator[tuple[object, int]]:
        """Per operator that may be split what distinguishes it from others, and its number."""
        for op in range(len(self.artifact.graph.operators)):
            if self.reader.axes(op):
                run = self.reader.nodes(op, op)
                yield (
                    tuple(
                        (
                            node.kind,
                            tuple(sorted(node.attributes.items(), key=lambda pair: pair[0])),
                            tuple(run.shapes.get(name, ()) for name in node.inputs),
                        )
                        for node in run.nodes
                    ),
                    op,
                )


def random_splits(
    subject: SplitSubject, rng: random.Random, cuts: Sequence[int] = (), longest: int = 4
) -> tuple[Split, ...]:
    """Every operator that may be split is, at a random boundary; some in chains of up to `longest`."""
    splits: list[Split] = []
    count = len(subject.artifact.graph.operators)
    op = 0
    while op < count:
        last, axes = op, subject.reader.axes(op)
        wanted = rng.randint(1, longest)
        while axes and last + 1 < count and last + 1 - op < wanted and last + 1 not in cuts:
            longer = subject.reader.axes(op, last + 1) if _chains(subject, op, last + 1) else ()
            if not longer:
                break
            last, axes = last + 1, longer
        if axes:
            axis = rng.choice(axes)
            boundary = axis.quantum * rng.randint(1, (axis.extent - 1) // axis.quantum)
            splits.append(Split(op, last, axis.axis, boundary))
        op = last + 1
    return tuple(splits)


def _chains(subject: SplitSubject, first: int, last: int) -> bool:
    """Whether nothing but the operators between reads what all but the last of them make."""
    graph, inside = subject.artifact.graph, set(range(first, last + 1))
    return all(
        graph.consumers[t] and t not in graph.outputs and set(graph.consumers[t]) <= inside
        for op in range(first, last)
        for t in graph.operators[op].outputs
    )


def split_plan(
    artifact: Artifact,
    splits: tuple[Split, ...],
    cuts: tuple[int, ...] = (),
    *,
    executors: tuple[str, str] = ("onnx", "onnx"),
    resources: tuple[Resource, Resource] = (Resource(), Resource()),
    batch: int = 1,
) -> Plan:
    """One model, each block by itself; halves on resources 0 and 1, the lane on 0."""
    derived = derive(artifact.graph, splits)
    borders = (0, *derived.cuts(cuts), len(derived.graph.operators))
    combined = tuple(
        CombinedBlock((Member(0, 0, block),), split_schedule(derived.origins[start:stop]))
        for block, (start, stop) in enumerate(pairwise(borders))
    )
    own, beside = executors
    if own != beside:
        resources = (resources[0], replace(resources[1], executor=1))
    return Plan(
        models=(ModelPlan(name="m", artifact=artifact.digest, splits=splits, cuts=cuts, batch=batch),),
        combined=combined,
        executor=ExecutorOptions(name=own),
        further_executors=(ExecutorOptions(name=beside),) if own != beside else (),
        resources=resources,
        lane_resources=(0,),
    )


def bound_split(artifact: Artifact, plan: Plan) -> BoundPlan:
    """The plan joined with its artifact's graph."""
    return bind(plan, {artifact.digest: artifact.graph})


def write_model(folder: Path, content: bytes) -> Path:
    """A model's file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    path.write_bytes(content)
    return path
