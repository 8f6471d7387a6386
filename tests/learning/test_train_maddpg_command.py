"""`stageloom policy train maddpg`: from what the store knows of a device to a policy and a plan."""

import json
import shutil
from pathlib import Path

import pytest

from stageloom.planner.cli.app import execute
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.policies import fitting_policy, newest_policy, policy_infos
from stageloom.planner.twin.device_file import parse_device
from stageloom.shared.errors import ExitCode
from stageloom.shared.ids import Digest
from stageloom.shared.plan import decode_plan
from stageloom.shared.policy.maddpg.checkpoint import decode
from tests.store.helpers import NANO
from tests.store.migrated import new_store

pytestmark = pytest.mark.more

MODELS = ["--model", "relu", "--model", "wide"]
RATES = ["--rate", "relu=300", "--rate", "wide=200"]
SHORT = ["--transitions", "20"]
ALONE = "workers = 1\nseed = 3\n"


@pytest.fixture
def home(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "home"))


def command(home: Path, *more: str, rare: str = ALONE) -> list[str]:
    """`rare`: fields of the request in a file."""
    file = home / "training.toml"
    file.write_text(rare)
    options = ["--data-dir", str(home), "--device", NANO, "--from", str(file), "--json"]
    return ["policy", "train", "maddpg", *options, *SHORT, *more]


@pytest.mark.timeout(900)  # the first time it compiles the twin, on however loaded a machine
def test_a_training_leaves_a_policy_and_a_plan(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "training"
    wanted = command(home, *MODELS, *RATES, "--output", str(out))
    assert execute(wanted) == ExitCode.OK
    said = capsys.readouterr()
    printed = json.loads(said.out)
    assert printed["ended"] == "done" and printed["transitions"] == 20
    assert set(printed["rows"]) == {"sequential", "best rival", "policy", "best plan"}
    assert "relu 300/s, wide 200/s (poisson, as given)" in said.err
    verdict = printed["verdict"]
    assert verdict["policy"] == printed["checkpoint"] and len(verdict["criteria"]) == 3
    assert not verdict["passed"], "20 transitions teach nothing"
    assert f"policy {printed['checkpoint'][:12]} did not pass its check: {verdict['reason']}" in said.err

    store = new_store(home)
    (kept,) = store.read(policy_infos)
    assert kept.digest == printed["checkpoint"] and sorted(kept.artifacts.values()) == ["relu", "wide"]
    assert kept.device_class == store.read(device_info, NANO).device_class
    assert kept.verdict is not None and kept.verdict.reason == verdict["reason"] in kept.withheld
    fitting = store.read(fitting_policy, "maddpg", kept.device_class, [Digest(one) for one in kept.artifacts])
    assert fitting == (b"", kept.withheld), "it is kept and has no say"
    body = store.read(newest_policy, "maddpg", kept.device_class)
    assert body == (out / "maddpg.checkpoint").read_bytes()
    plan = decode_plan(store.read(plan_info, printed["plan"]).wire)
    assert decode(body).space.refusal(plan, kept.device_class) == ""
    assert parse_device((out / "twin.toml").read_text(), "twin.toml").cores > 0
    assert decode(body).provenance["graphs"].keys() == kept.artifacts.keys()
    store.close()
    assert len(json.loads((out / "curves.json").read_text())) == len(printed["curves"]) > 0
    assert list((home / "trainings").iterdir()) == [], "it ended by itself: nothing is left to go on with"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ([], "nano runs no plan that would say what to learn; name the models with --model"),
        (
            MODELS,
            "counted no task of these models in its last 600 s of telemetry; say what arrives with --rate",
        ),
        pytest.param(
            [*MODELS, "--rate", "relu=3"],
            "nothing says how often tasks of wide arrive; give --rate wide=PER_S",
            marks=pytest.mark.full,  # a process that imports torch for each, as above
        ),
        pytest.param([*MODELS, "--rate", "other=3"], "the plan has no model 'other'", marks=pytest.mark.full),
        ([*MODELS, *RATES, "--budget", "soon"], "--budget 'soon' is no duration; write it like --budget 10m"),
        ([*MODELS, *RATES, "--twin", "none"], "there is no device file 'none'"),
        (
            [*MODELS, *RATES, "--transitions", "3"],
            "--transitions 3 is not acceptable: expected a number >= 20",
        ),
        (["--device", "other"], "other"),
    ],
)
def test_what_cannot_be_trained_says_why_and_what_to_do(
    home: Path, capsys: pytest.CaptureFixture[str], more: list[str], why: str
) -> None:
    assert execute(command(home, *more)) == ExitCode.USAGE
    assert why in " ".join(capsys.readouterr().err.split())
