"""Atoms: whatever the mask, what runs is made of sessions that a loaded plan has."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from stageloom.edge_agent.executor.onnx.program import CombinedPrograms
from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.bound import BoundPlan
from stageloom.shared.launch_list import Barrier
from stageloom.shared.plan import ExecutorOptions, Member
from stageloom.shared.schedule import Schedule
from tests.executor.contract.schedules import (
    bound_of,
    graph_of,
    merged,
    plan_of,
    random_stages,
    random_streams,
)
from tests.executor.models import artifact_of

NAMES = ("squeezenet_bypass", "googlenet", "squeezenet")
Draw = Callable[[CombinedGraph, Random], Schedule]


def three_models(draw: Draw, seed: int, barrier: Barrier) -> BoundPlan:
    artifacts = [artifact_of(name) for name in NAMES]
    members, whole = [Member(model, 0, 0) for model in range(3)], [()] * 3
    schedule = draw(graph_of(artifacts, whole, members), Random(seed))
    return bound_of(plan_of(artifacts, whole, [members], [schedule], barrier=barrier), artifacts)


def masks() -> Iterator[tuple[int, dict[int, int]]]:
    for mask in range(1, 2 ** len(NAMES)):
        yield mask, dict.fromkeys(bits(mask), 1)


@pytest.mark.promise("mask-runs-sessions-loaded")
@pytest.mark.parametrize("draw", [random_streams, random_stages, lambda graph, _: merged(graph)])
def test_every_mask_runs_on_the_sessions_of_a_loaded_plan(draw: Draw) -> None:
    for seed, barrier in product(range(5), Barrier):
        bound = three_models(draw, seed, barrier)
        programs = CombinedPrograms(bound, 0)
        held = set(programs.keys(dict.fromkeys(range(len(NAMES)), 1)))
        for mask, bucket_of in masks():
            for sessions in programs.program(mask, bucket_of).sessions:
                assert held.issuperset(sessions), (seed, barrier, mask)


def test_the_sessions_of_a_mask_compute_each_of_its_operators_once() -> None:
    bound = three_models(random_streams, 0, Barrier.FULL)
    programs = CombinedPrograms(bound, 0)
    for mask, bucket_of in masks():
        run = [
            (key.artifact, op)
            for sessions in programs.program(mask, bucket_of).sessions
            for key in sessions
            for op in key.ops
        ]
        assert len(run) == len(set(run)) == sum(len(bound.models[m].graph.operators) for m in bits(mask))


@pytest.mark.parametrize(
    ("threads", "replicas", "lanes", "copies"), [(1, 2, 2, 1), (2, 2, 2, 2), (2, 3, 2, 2), (2, 1, 2, 1)]
)
def test_replicas_in_several_lanes_have_sessions_of_their_own_where_these_have_threads(
    threads: int, replicas: int, lanes: int, copies: int
) -> None:
    """All callers of a session share its helpers: two lanes of two threads would compute on three."""
    artifact = artifact_of("squeezenet")
    groups = [[Member(0, replica, 0)] for replica in range(replicas)]
    plan = plan_of([artifact], [()], groups, replicas=replicas, lanes=lanes)
    options = ExecutorOptions(name="onnx", intra_op_threads=threads)
    bound = bound_of(replace(plan, executor=options), [artifact])
    keys = {key for index in range(replicas) for key in CombinedPrograms(bound, index).keys({0: 1})}
    assert {key.copy for key in keys} == set(range(copies)) and len(keys) == copies
