"""A training's process: what it is asked, what it tells, how it ends; and the state that it goes on from."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from stageloom.planner.learning.gpg import stored
from stageloom.planner.learning.gpg.trainer import GpgSettings
from stageloom.planner.learning.kept_run import FOLDER, KEPT_S, LOCK_FILE, forget_run, held_run
from stageloom.planner.learning.messages import (
    Trained,
    TrainingFailed,
    TrainingMessage,
    TrainingStep,
    TrainingTask,
)
from stageloom.planner.schema.training import GpgTrainingRequest
from stageloom.planner.store.store import Store
from stageloom.shared.errors import ExitCode, RefusedError
from stageloom.shared.search.costs import CostTable
from tests.store.helpers import add_model

pytestmark = pytest.mark.more

SHORT = GpgTrainingRequest(imitation_steps=2, episodes=1, members_max=1, seed=4)
LONG = GpgTrainingRequest(imitation_steps=5000, episodes=0, members_max=1)
QUICK = partial(
    GpgSettings, updates=1, blocks_per_update=2, validation_blocks=2, validate_every=1, patience=99
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A planner's data with one model."""
    home = tmp_path / "home"
    home.mkdir()
    made = Store(home)
    add_model(made, tmp_path, "relu", operators=6)
    yield made
    made.close()


def interrupt(step: TrainingStep) -> None:
    if step.done == 2:
        raise KeyboardInterrupt


class Worker:
    """The process, begun with a task."""

    def __init__(self, store: Store, request: GpgTrainingRequest, missing: str = "") -> None:
        run = "from stageloom.planner.learning.worker import main; main()"
        if missing:
            run = f"import sys; sys.modules[{missing!r}] = None; {run}"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", run], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin is not None
        task = TrainingTask(data_dir=str(store.data_dir), gpg=request)
        self.process.stdin.write(msgspec.json.encode(task) + b"\n")
        self.process.stdin.flush()

    def messages(self) -> Iterator[TrainingMessage]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield msgspec.json.decode(line, type=TrainingMessage)

    def end(self) -> int:
        """Its stdin ends, as when the planner is gone; returns its exit code."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        code = self.process.wait(30)
        self.process.stdout.close()
        return code


def test_it_tells_how_far_it_is_and_ends_with_the_best_so_far_on_sigint(store: Store) -> None:
    worker = Worker(store, LONG)
    messages = worker.messages()
    step = next(told for told in messages if isinstance(told, TrainingStep) and told.done)
    assert step.size == 5000 and step.text == "imitation"
    worker.process.send_signal(signal.SIGINT)
    *_, last = messages
    assert isinstance(last, Trained) and last.gpg is not None
    assert last.gpg.ended == "interrupted" and last.gpg.steps < 5000
    assert last.policy == "gpg" and last.provenance["steps"] == last.gpg.steps
    assert worker.process.wait(30) == 0
    worker.end()
    assert list((store.data_dir / FOLDER).iterdir()), "the same request would go on"


def test_it_ends_with_its_planner(store: Store) -> None:
    worker = Worker(store, LONG)
    next(told for told in worker.messages() if isinstance(told, TrainingStep) and told.done)
    assert worker.end() == 1


def test_a_package_that_is_missing_is_named_with_the_extra_that_has_it(store: Store) -> None:
    worker = Worker(store, SHORT, missing="torch")
    *_, last = worker.messages()
    assert isinstance(last, TrainingFailed)
    assert last.problem.exit_code == ExitCode.BACKEND
    assert "torch cannot be imported" in last.problem.detail and "stageloom[learn]" in last.problem.remedy
    worker.process.wait(30)
    worker.end()


@pytest.mark.promise("seed-gives-policy-interrupted")
def test_the_same_request_goes_on_where_it_was_interrupted_and_ends_as_if_it_had_not_been(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "GpgSettings", QUICK)

    def quietly(step: TrainingStep) -> None:
        """Nobody looks."""

    def kept_and_forgotten() -> Trained:
        left = stored.train_stored(store, SHORT, quietly)
        forget_run(Path(left.run))
        return left

    whole = kept_and_forgotten()
    runs = store.data_dir / FOLDER
    assert list(runs.iterdir()) == [], "it ended by itself"
    first = stored.train_stored(store, SHORT, interrupt)
    assert first.gpg is not None and (first.gpg.ended, first.gpg.steps) == ("interrupted", 2)
    (kept,) = runs.iterdir()
    other = stored.train_stored(store, msgspec.structs.replace(SHORT, seed=5), quietly)
    assert other.gpg is not None and other.gpg.resumed_steps == 0 and kept.exists() and first.run == ""
    forget_run(Path(other.run))
    again = kept_and_forgotten()
    assert again.gpg is not None and (again.gpg.ended, again.gpg.resumed_steps) == ("done", 1)
    assert again.checkpoint == whole.checkpoint != other.checkpoint
    assert list(runs.iterdir()) == []


@pytest.mark.promise("seed-gives-policy-interrupted")
def test_it_goes_on_with_the_same_blocks_in_whatever_order_its_models_are_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "GpgSettings", QUICK)
    add_model(store, tmp_path, "longer", operators=9)
    one, other = (
        msgspec.structs.replace(SHORT, models=names) for names in (("relu", "longer"), ("longer", "relu"))
    )
    whole = stored.train_stored(store, one, lambda _: None)
    forget_run(Path(whole.run))
    stored.train_stored(store, one, interrupt)
    again = stored.train_stored(store, other, lambda _: None)
    assert again.gpg is not None and (again.gpg.ended, again.gpg.resumed_steps) == ("done", 1)
    assert whole.gpg is not None and again.gpg.curves == whole.gpg.curves


def test_a_run_goes_on_with_the_costs_that_it_began_with(tmp_path: Path) -> None:
    """Until something is learned on them, newer ones are as good."""
    first, newer, newest = (CostTable(fresh_since_us=at_us) for at_us in (1, 2, 3))
    assert stored._as_begun(tmp_path, first) == first
    assert stored._as_begun(tmp_path, newer) == newer
    (tmp_path / stored.STATE_FILE).write_bytes(b"")
    assert stored._as_begun(tmp_path, newest) == newer


def test_a_run_that_is_over_is_there_until_the_planner_has_kept_its_result(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planner that is killed between the two, or whose disk is full, would have lost both."""
    monkeypatch.setattr(stored, "GpgSettings", QUICK)
    left = stored.train_stored(store, SHORT, lambda _: None)
    again = stored.train_stored(store, SHORT, lambda _: None)
    assert again.gpg is not None and again.gpg.resumed_steps > 0 and again.checkpoint == left.checkpoint
    assert again.run == left.run
    forget_run(Path(left.run))
    assert not Path(left.run).exists()


def test_a_run_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    with held_run(tmp_path, {"seed": 1}) as folder:
        with pytest.raises(RefusedError, match="runs already"), held_run(tmp_path, {"seed": 1}):
            pass
        with held_run(tmp_path, {"seed": 2}) as other:
            assert other != folder
    with held_run(tmp_path, {"seed": 1}) as again:
        assert again == folder
        forget_run(again)
        assert folder.exists(), "a run that has begun anew since stays"
    forget_run(folder)
    assert not folder.exists() and other.exists()


def test_a_run_that_nobody_went_on_with_is_deleted(tmp_path: Path) -> None:
    with held_run(tmp_path, {"seed": 1}) as old:
        pass
    long_ago_s = time.time() - KEPT_S - 60.0
    os.utime(old / LOCK_FILE, (long_ago_s, long_ago_s))
    with held_run(tmp_path, {"seed": 2}) as young:
        pass
    with held_run(tmp_path, {"seed": 3}):
        assert young.exists() and not old.exists()
