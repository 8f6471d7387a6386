"""The first plan of the three networks that the papers measure: legal at once and small on the wire.

Width and image size change neither the graphs nor the plan's bytes, so quarter-width networks stand for all.
"""

import zlib

import pytest

from stageloom.shared.bound import bind
from stageloom.shared.plan import decode_plan
from stageloom.shared.search.compose import Combination, ModelChoice, compose
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
