"""`stageloom policy train gpg`: from the store's models to a policy, and to a search that takes it."""

import json
from pathlib import Path

import msgspec
import pytest

from stageloom.planner.cli import train
from stageloom.planner.cli.app import execute
from stageloom.planner.costs.measured import trained_policy
from stageloom.planner.schema.training import GpgTrainingReply, MaddpgTrainingReply
from stageloom.planner.store.policies import policy_infos
from stageloom.planner.store.rows import blank_of
from stageloom.shared.errors import ExitCode
from tests.store.helpers import NANO, add_model, enrol
from tests.store.migrated import new_store

SHORT = ["--imitation-steps", "1", "--episodes", "1", "--seed", "4"]
TRAIN = ["policy", "train", "gpg"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A planner's data with one model."""
    (tmp_path / "home").mkdir()
    store = new_store(tmp_path / "home")
    add_model(store, tmp_path, "relu", operators=6)
    store.close()
    return tmp_path / "home"


@pytest.mark.more
def test_a_training_leaves_a_policy_that_searches_take_and_curves(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "training"
    few = tmp_path / "training.toml"
    few.write_text("members_max = 1\n")
    command = [*TRAIN, "--data-dir", str(home), "--output", str(out), "--json", *SHORT, "--from", str(few)]
    assert execute(command) == ExitCode.OK
    printed = json.loads(capsys.readouterr().out)
    assert printed["ended"] == "done" and printed["settings"]["seed"] == 4
    store = new_store(home)
    (kept,) = store.read(policy_infos)
    assert kept.digest == printed["checkpoint"] and list(kept.artifacts.values()) == ["relu"]
    assert trained_policy(store, "any class") == (out / "gpg.checkpoint").read_bytes()
    store.close()
    curves = json.loads((out / "curves.json").read_text())
    assert [point["step"] for point in curves] == [point["step"] for point in printed["curves"]] == [2]
    assert (out / "curves.svg").read_text().startswith("<svg")
    assert list((home / "trainings").iterdir()) == [], "it ended by itself: nothing is left to go on with"


def test_a_planner_without_models_has_nothing_to_learn_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_store(tmp_path).close()
    assert execute([*TRAIN, "--data-dir", str(tmp_path)]) == ExitCode.USAGE
    assert "stageloom model add" in capsys.readouterr().err


@pytest.mark.more
def test_costs_of_a_class_that_measured_nothing_are_not_learned(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Estimates would be kept as the class's own, and be used there in place of the packaged policy."""
    store = new_store(home)
    enrol(store)
    assert execute([*TRAIN, "--data-dir", str(home), "--device", NANO, *SHORT]) == ExitCode.USAGE
    said = " ".join(capsys.readouterr().err.split())
    assert "no operator of these models was measured" in said and "stageloom device profile nano" in said
    assert store.read(policy_infos) == []
    store.close()


def test_a_training_of_no_steps_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = ["--imitation-steps", "0", "--episodes", "0"]
    assert execute([*TRAIN, "--data-dir", str(home), *none]) == ExitCode.USAGE
    assert "nothing to train" in capsys.readouterr().err


REPLIES: dict[str, type[msgspec.Struct]] = {"gpg": GpgTrainingReply, "maddpg": MaddpgTrainingReply}
BOTH = pytest.mark.parametrize("kind", [["gpg"], ["maddpg", "--device", NANO]], ids=list(REPLIES))


@BOTH
def test_a_folder_that_nothing_can_be_written_to_is_refused_before_the_training(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: list[str],
) -> None:
    """/proc/self is there, and not even root makes a file in it."""
    monkeypatch.setattr(train, "run_job", lambda *_: pytest.fail("it was trained"))
    assert execute(["policy", "train", *kind, "--output", "/proc/self"]) == ExitCode.STORAGE
    assert "/proc/self cannot be written" in capsys.readouterr().err


@BOTH
def test_a_result_is_told_although_its_files_cannot_be_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: list[str],
) -> None:
    digest = "ab" * 32
    monkeypatch.setattr(train, "run_job", lambda *_: blank_of(REPLIES[kind[0]], checkpoint=digest))
    (tmp_path / "curves.json").mkdir()
    assert execute(["policy", "train", *kind, "--output", str(tmp_path), "--json"]) == ExitCode.STORAGE
    said = capsys.readouterr()
    assert json.loads(said.out)["checkpoint"] == digest and "curves.json" in said.err
