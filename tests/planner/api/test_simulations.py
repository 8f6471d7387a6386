"""Predictions over the API: in the search pool or the client's process, in parts, until cancelled."""

import json
from pathlib import Path

import pytest

from stageloom.planner.api import routes
from stageloom.planner.api.client import PlannerClient
from stageloom.planner.api.offline import StoreClient
from stageloom.planner.api.problem import ApiRefused
from stageloom.planner.cli.app import execute
from stageloom.planner.schema.job import JobState
from stageloom.planner.schema.plan import ArrivalRate
from stageloom.planner.schema.prediction import RECORDED_MAX, ArrivalKind, PredictionCreateRequest
from stageloom.planner.store.plans import add_plan
from stageloom.planner.twin.device_file import device_toml, load_device
from stageloom.shared.errors import ExitCode
from stageloom.shared.ids import DeviceId
from tests.planner.world import World

RATES = (ArrivalRate(model="diamond", per_s=50.0),)


@pytest.fixture(scope="module", autouse=True)
def tuned(world: World) -> None:
    world.store.write(add_plan, "tuned", world.plan("greedy"), "greedy")


def wanted(**changes: object) -> PredictionCreateRequest:
    fields: dict[str, object] = {"plan": "tuned", "twin": "nano", "rates": RATES, "seconds": 5.0, "seed": 3}
    return PredictionCreateRequest(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_pool_predicts_what_the_clients_own_process_does(
    client: PlannerClient, store_client: StoreClient
) -> None:
    there = client.call(routes.PREDICTION_CREATE, wanted())
    here = store_client.call(routes.PREDICTION_CREATE, wanted())
    assert there.predicted == here.predicted and there.predicted["diamond.arrivals_per_s"] > 0.0
    assert (there.twin, there.arrivals) == ("derived from nano", "poisson: diamond 50/s")
    assert 0 < there.number < here.number
    assert client.call(routes.PREDICTION_CREATE, wanted(seed=4, keep=False)).number == 0


def test_a_device_file_travels_as_text_and_no_path_is_read(client: PlannerClient) -> None:
    text = device_toml(load_device("tx2"))
    found = client.call(routes.PREDICTION_CREATE, wanted(twin=text, arrivals=ArrivalKind.PERIODIC))
    assert found.twin == "derived from tx2"
    with pytest.raises(ApiRefused, match=r"there is no device file '/etc/passwd\.toml'"):
        client.call(routes.PREDICTION_CREATE, wanted(twin="/etc/passwd.toml"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"plan": "missing"}, "missing"),
        ({"twin": ""}, "nothing says what device to simulate"),
        ({"rates": ()}, "nothing says what arrives"),
        ({"rates": (*RATES, *RATES)}, "diamond twice"),
        ({"recording": {"diamond": (0.0,)}}, "both --rate and --recording"),
        ({"rates": (), "recording": {}}, "holds no arrival"),
        ({"device": DeviceId("nobody")}, "nobody"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    client: PlannerClient, changes: dict[str, object], why: str
) -> None:
    with pytest.raises(ApiRefused, match=why) as refused:
        client.call(routes.PREDICTION_CREATE, wanted(**changes))
    assert refused.value.status in (404, 422)


@pytest.mark.more
def test_a_long_simulation_tells_how_far_it_is_and_ends_when_it_is_cancelled(client: PlannerClient) -> None:
    rates = (ArrivalRate(model="diamond", per_s=50.0),)
    job = client.start(routes.PREDICTION_CREATE, wanted(seconds=80_000.0, rates=rates))
    sizes = set()
    for info in client.follow(job.job):
        sizes.add(info.progress.size)
        if info.progress.done > 0:
            break
    client.cancel(job.job)
    *_, end = client.follow(job.job)
    assert end.state is JobState.CANCELLED and 50 in sizes


def test_a_recording_of_more_than_a_request_takes_is_refused_with_its_arrivals(
    client: PlannerClient, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each model has no more than it may; both together are too many."""
    file = tmp_path / "arrivals.json"
    times = [0.123456 + number for number in range(RECORDED_MAX)]
    file.write_text(json.dumps({"diamond": times, "other": times}))
    command = ["prediction", "create", "tuned", "--twin", "nano", "--recording", str(file)]
    assert execute([*command, "--data-dir", str(world.home)]) == ExitCode.USAGE
    said = f"{file} has 131072 arrivals of all models together: the body is larger than 1048576 bytes; cut it"
    assert said in capsys.readouterr().err
