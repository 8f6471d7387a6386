"""Trainings over the API: a job with a process of its own, which ends with its best so far."""

from pathlib import Path

import pytest

from stageloom.planner.api import routes
from stageloom.planner.api.access import Principal
from stageloom.planner.api.client import PlannerClient, result
from stageloom.planner.api.context import ApiCall, ApiContext
from stageloom.planner.api.handlers.trainings import train_maddpg
from stageloom.planner.api.jobs import Jobs
from stageloom.planner.api.offline import StoreClient
from stageloom.planner.api.problem import ApiRefused
from stageloom.planner.schema.access import Role
from stageloom.planner.schema.job import JobState
from stageloom.planner.schema.policy import PolicyExportRequest
from stageloom.planner.schema.training import GpgTrainingRequest, MaddpgTrainingRequest
from stageloom.planner.service import Planner
from stageloom.planner.store.policies import policy_infos
from stageloom.shared.clock import SystemClock
from stageloom.shared.errors import RefusedError
from stageloom.shared.ids import DeviceId
from tests.planner.world import World
from tests.store.helpers import NANO


@pytest.mark.timeout(300)
@pytest.mark.more
def test_a_training_that_is_cancelled_keeps_the_best_so_far(
    world: World, client: PlannerClient, tmp_path: Path
) -> None:
    request = GpgTrainingRequest(imitation_steps=5000, episodes=0, members_max=1)
    job = client.start(routes.TRAIN_GPG, request)
    for info in client.follow(job.job):
        assert info.state is JobState.RUNNING, info.problem
        if info.progress.done:
            break
    client.cancel(job.job)
    *_, end = client.follow(job.job)
    reply = result(routes.TRAIN_GPG, end)
    assert reply.ended == "interrupted" and 0 < reply.steps < 5000 and len(reply.curves) == 1
    assert list(reply.models.values()) == ["diamond"]
    assert [info.digest for info in world.store.read(policy_infos)] == [reply.checkpoint]
    size = client.download(
        routes.POLICY_EXPORT, PolicyExportRequest(policy=reply.checkpoint), tmp_path / "gpg.checkpoint"
    )
    assert size == (tmp_path / "gpg.checkpoint").stat().st_size > 1000


def test_what_cannot_be_trained_is_refused_before_a_process_starts(
    world: World, client: PlannerClient, store_client: StoreClient
) -> None:
    for request, why in (
        (GpgTrainingRequest(imitation_steps=0, episodes=0), "nothing to train"),
        (GpgTrainingRequest(models=("missing",)), "missing"),
        (GpgTrainingRequest(device=DeviceId("nobody")), "nobody"),
    ):
        with pytest.raises(ApiRefused, match=why):
            client.start(routes.TRAIN_GPG, request)
    with pytest.raises(ApiRefused, match="nobody"):
        client.start(routes.TRAIN_MADDPG, MaddpgTrainingRequest(device=DeviceId("nobody")))


def test_only_an_admin_has_the_planner_join_another_cluster(world: World, api_planner: Planner) -> None:
    api = ApiContext(
        reader=world.store, clock=SystemClock(), jobs=Jobs(SystemClock()), config=api_planner.config
    )
    request = MaddpgTrainingRequest(device=NANO, ray_address="elsewhere:6379")
    with pytest.raises(RefusedError, match="only an admin"):
        train_maddpg(api, request, ApiCall(Principal("someone", Role.OPERATOR, "10.0.0.1")))
    assert train_maddpg(api, request, ApiCall(Principal("local", Role.ADMIN, "local"))) is not None
