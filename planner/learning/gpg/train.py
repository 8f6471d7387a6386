"""A training run from beginning to end: resume, curves, the best policy as a checkpoint."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stageloom.planner.learning.gpg.blocks import Drawing
from stageloom.planner.learning.gpg.settings import Settings
from stageloom.planner.learning.gpg.trainer import Progress, Trainer
from stageloom.shared.errors import InputError
from stageloom.shared.ids import Digest
from stageloom.shared.policy.gpg.checkpoint import Checkpoint, encode

Told = Callable[[Trainer], None]


@dataclass(frozen=True)
class Trained:
    """What a run leaves."""

    checkpoint: bytes
    history: tuple[Progress, ...]
    train_s: float
    steps: int
    ended: str  # "done", "no better for a while", "time", "interrupted"


def train(
    drawing: Drawing,
    settings: Settings,
    *,
    names: Mapping[Digest, str],
    costs: str,
    told: Told = lambda trainer: None,
    time_limit_s: float | None = None,
    state: Path | None = None,
) -> Trained:
    """Train until done, the time is up, or Ctrl-C, and keep the best policy of all validations.

    `names` are the models by digest and `costs` the cost model, both for the record. `state` is where the run
    is kept after every validation; one that is there goes on. Within the time limit a seed gives the same
    policy on the same machine, interrupted or not.

    Raises:
        InputError: `state` is of a run with other settings or models.
    """
    torch.set_num_threads(1)  # the matrices are small: a second thread costs more than it brings
    began_s = time.monotonic()
    trainer = Trainer(drawing, settings)
    about = {"settings": _plain(settings), "models": sorted(drawing.models), "costs": costs}
    if state is not None and state.exists():
        _restore(trainer, state, about)
    ended = "done"
    validated = len(trainer.history)
    try:
        while not trainer.done:
            trainer.advance()
            told(trainer)
            if state is not None and len(trainer.history) > validated:
                validated = len(trainer.history)
                _save(trainer, state, about)
            if time_limit_s is not None and time.monotonic() - began_s > time_limit_s:
                ended = "time"
                break
    except KeyboardInterrupt:
        ended = "interrupted"
    if not trainer.history:
        trainer.validate()
    if ended == "done" and trainer.step < settings.steps:
        ended = "no better for a while"
    train_s = time.monotonic() - began_s
    provenance = {
        **about,
        "models": dict(sorted(names.items())),
        "steps": trainer.step,
        "validation_ratio": trainer.best_ratio,
        "ended": ended,
        "versions": {"torch": torch.__version__.split("+")[0], "numpy": np.__version__},
    }
    raw = encode(Checkpoint(trainer.best, provenance))
    return Trained(raw, tuple(trainer.history), train_s, trainer.step, ended)


def _plain(settings: Settings) -> dict[str, Any]:
    return {**asdict(settings), "reward": settings.reward.value}


def _save(trainer: Trainer, path: Path, about: Mapping[str, Any]) -> None:
    """Whole or not at all: a run that is killed while it writes goes on from the last validation."""
    part = path.with_name(path.name + ".part")
    torch.save({"about": dict(about), **trainer.saved()}, part)
    part.replace(path)


def _restore(trainer: Trainer, path: Path, about: Mapping[str, Any]) -> None:
    try:
        saved = torch.load(path, weights_only=True)
        if saved["about"] != about:
            raise InputError(
                f"{path} is a run with other settings or models", remedy="name another file, or delete it"
            )
        trainer.restore(saved)
    except InputError:
        raise
    except Exception as error:  # torch raises what its unpickler meets
        raise InputError(
            f"{path} is no training run: {str(error)[:120]}", remedy="name another file, or delete it"
        ) from error
