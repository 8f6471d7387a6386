"""The first plan of the three networks that the papers measure: legal at once and small on the wire.

Width and image size change neither the graphs nor the plan's bytes, so quarter-width networks stand for all.
"""

import random
import zlib
from itertools import pairwise

import pytest

from stageloom.shared.bound import bind
from stageloom.shared.graph import Graph
from stageloom.shared.partition import Axis, Split
from stageloom.shared.plan import CombinedBlock, Member, ModelPlan, Plan, Resource, decode_plan
from stageloom.shared.search.compose import Combination, ModelChoice, compose
from stageloom.shared.split_graph import derive
from stageloom.shared.split_schedule import split_schedule
from tests.executor.models import artifact_of

NETWORKS = ["inception_v3", "resnet50", "squeezenet"]


@pytest.mark.promise("plan-three-networks-takes")
@pytest.mark.parametrize("combination", list(Combination))
@pytest.mark.parametrize("partition", ["whole", "paper", "base"])
@pytest.mark.parametrize("scheduler", ["sequential", "greedy"])
def test_plan_of_three_networks_fits_one_kibibyte(
    scheduler: str, partition: str, combination: Combination
) -> None:
    artifacts = {name: artifact_of(name) for name in NETWORKS}
    choices = [
        ModelChoice(name=name, artifact=artifact.digest, graph=artifact.graph, partition=partition)
        for name, artifact in artifacts.items()
    ]
    plan = compose(choices, scheduler=scheduler, combination=combination, members_max=3)
    assert min(len(plan.wire), len(zlib.compress(plan.wire, 9))) <= 1024
    again = decode_plan(plan.wire, plan.digest)
    bind(again, {artifact.digest: artifact.graph for artifact in artifacts.values()})
    assert again == plan


KEY_SHARE = 0.95
"""Of a model's work: the operators that do it are those that EOP splits (its section 3.3)."""


def split_choice(graph: Graph, rng: random.Random, share: float) -> tuple[Split, ...]:
    """The operators that do so much of the work, each split on rows or channels at a random boundary."""
    by_work = sorted(range(len(graph.operators)), key=lambda op: -graph.operators[op].flop)
    total, done, chosen = sum(operator.flop for operator in graph.operators), 0, []
    for op in by_work:
        if done >= share * total:
            break
        done += graph.operators[op].flop
        chosen.append(op)
    splits = []
    for op in sorted(chosen):
        shape = graph.tensors[graph.operators[op].outputs[0]].shape
        axis = rng.choice((Axis.CHANNELS, Axis.ROWS)) if len(shape) == 4 and shape[2] > 1 else Axis.CHANNELS
        extent = shape[1] if axis is Axis.CHANNELS else shape[2]
        splits.append(Split(op, op, axis, rng.randint(1, extent - 1)))
    return tuple(splits)


@pytest.mark.promise("plan-three-networks-takes")
@pytest.mark.parametrize("share", [KEY_SHARE, 1.0])
@pytest.mark.parametrize("base", [False, True])
def test_plan_of_three_networks_whose_key_operators_are_split_fits_one_kibibyte(
    share: float, base: bool
) -> None:
    rng = random.Random(0)
    artifacts = [artifact_of(name) for name in NETWORKS]
    models, combined = [], []
    for number, artifact in enumerate(artifacts):
        splits = split_choice(artifact.graph, rng, share)
        derived = derive(artifact.graph, splits)
        cuts = artifact.graph.base_cuts if base else ()
        borders = (0, *derived.cuts(cuts), len(derived.origins))
        combined += [
            CombinedBlock((Member(number, 0, block),), split_schedule(derived.origins[start:stop]))
            for block, (start, stop) in enumerate(pairwise(borders))
        ]
        models.append(ModelPlan(name=NETWORKS[number], artifact=artifact.digest, cuts=cuts, splits=splits))
    plan = Plan(
        models=tuple(models),
        combined=tuple(combined),
        resources=(Resource(cores=(0,)), Resource(cores=(1,))),
        lane_resources=(0,),
    )
    assert sum(len(model.splits) for model in models) > 90
    assert min(len(plan.wire), len(zlib.compress(plan.wire, 9))) <= 1024
    again = decode_plan(plan.wire, plan.digest)
    bind(again, {artifact.digest: artifact.graph for artifact in artifacts})
    assert again == plan
