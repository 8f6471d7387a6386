"""`stageloom train maddpg`: from what the store knows of a device to a policy and a plan in the store."""

import json
import shutil
from pathlib import Path

import pytest

from stageloom.planner.cli.app import execute
from stageloom.planner.cluster import search_pool
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.policies import kept_policies, newest_policy
from stageloom.planner.store.store import Store
from stageloom.planner.twin.device_file import parse_device
from stageloom.shared.errors import ExitCode
from stageloom.shared.plan import decode_plan
from stageloom.shared.policy.maddpg.checkpoint import decode
from tests.learning.pools import InlinePool
from tests.store.helpers import NANO, add_model, enrol

MODELS = ["--model", "relu", "--model", "wide"]
RATES = ["--rate", "relu=300", "--rate", "wide=200"]
SHORT = ["--transitions", "20", "--workers", "1", "--seed", "3"]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A planner's data with two models and a device that ran nothing yet."""
    home = tmp_path_factory.mktemp("template") / "home"
    home.mkdir()
    store = Store(home)
    add_model(store, home.parent, "relu", operators=6)
    add_model(store, home.parent, "wide", operators=8)
    enrol(store)
    store.close()
    return home


@pytest.fixture
def home(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "home"))


def command(home: Path, *more: str) -> list[str]:
    return ["train", "maddpg", "--data-dir", str(home), "--device", NANO, "--json", *SHORT, *more]


@pytest.mark.timeout(900)  # the first time it compiles the twin, on however loaded a machine
def test_a_training_leaves_a_policy_and_a_plan_and_goes_on_where_it_was(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_pool, "AnytimePool", InlinePool)
    out = tmp_path / "training"
    wanted = command(home, *MODELS, *RATES, "--output", str(out))
    assert execute(wanted) == ExitCode.OK
    said = capsys.readouterr()
    printed = json.loads(said.out)
    assert printed["ended"] == "done" and printed["transitions"] == 20
    assert set(printed["rows"]) == {"sequential", "best rival", "policy", "best plan"}
    assert "relu 300/s, wide 200/s (poisson, as given)" in said.err

    store = Store(home)
    with store.database.read() as session:
        (kept,) = kept_policies(session, "maddpg")
    assert kept.digest == printed["checkpoint"] and sorted(kept.artifacts.values()) == ["relu", "wide"]
    assert kept.device_class == store.read(device_info, NANO).device_class and len(kept.curves) > 0
    body = store.read(newest_policy, "maddpg", kept.device_class)
    assert body == (out / "maddpg.checkpoint").read_bytes()
    plan = decode_plan(store.read(plan_info, printed["plan"]).wire)
    assert decode(body).space.refusal(plan, kept.device_class) == ""
    assert parse_device((out / "twin.toml").read_text(), "twin.toml").cores > 0
    assert decode(body).provenance["graphs"].keys() == kept.artifacts.keys()
    store.close()

    assert execute(wanted) == ExitCode.OK  # nothing is left but to look at the best again
    said = capsys.readouterr()
    assert "going on after" in said.err
    assert json.loads(said.out)["checkpoint"] == printed["checkpoint"]
    assert execute([*wanted, "--seed", "4"]) == ExitCode.USAGE
    assert "is a run with other seed; name another --output" in capsys.readouterr().err
    other = command(home, *MODELS, "--rate", "relu=30", "--rate", "wide=200", "--output", str(out))
    assert execute([*other, "--twin", "nano"]) == ExitCode.USAGE
    assert "is a run with other members_max, twin, rate; name another --output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ([], "nano runs no plan that would say what to learn; name the models with --model"),
        (
            MODELS,
            "counted no task of these models in its last 600 s of telemetry; say what arrives with --rate",
        ),
        (
            [*MODELS, "--rate", "relu=3"],
            "nothing says how often tasks of wide arrive; give --rate wide=PER_S",
        ),
        ([*MODELS, "--rate", "other=3"], "the plan has no model 'other'"),
        ([*MODELS, *RATES, "--budget", "soon"], "--budget 'soon' is no duration; write it like --budget 10m"),
        ([*MODELS, *RATES, "--twin", "none"], "there is no device file 'none'"),
        (["--device", "other"], "other"),
    ],
)
def test_what_cannot_be_trained_says_why_and_what_to_do(
    home: Path, capsys: pytest.CaptureFixture[str], more: list[str], why: str
) -> None:
    assert execute(command(home, *more)) == ExitCode.USAGE
    assert why in " ".join(capsys.readouterr().err.split())
