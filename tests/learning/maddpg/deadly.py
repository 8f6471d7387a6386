"""Devices whose making kills the process: what an out-of-memory killer does to a rollout actor."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from stageloom.planner.learning.maddpg.course import FRESH_SEED, VALIDATION_SEED
from tests.learning.maddpg.toy import ToyDevice

EPISODE, VALIDATION, FRESH = "episode", "validation", "fresh"


@dataclass(frozen=True)
class DeadlyDevices:
    """Makes toys. Who makes one for a kind of work that a file in `deaths` names is killed; the file goes."""

    deaths: Path

    def __call__(self, seed: int) -> ToyDevice:
        kind = FRESH if seed >= FRESH_SEED else VALIDATION if seed >= VALIDATION_SEED else EPISODE
        for file in self.deaths.glob(f"{kind}*"):
            try:
                file.unlink()
            except FileNotFoundError:
                continue  # another worker died of it
            os.kill(os.getpid(), signal.SIGKILL)
        return ToyDevice(0.6, seed)


def deaths(folder: Path, *kinds: str) -> DeadlyDevices:
    """Devices that kill once for each of these kinds of work."""
    folder.mkdir()
    for number, kind in enumerate(kinds):
        (folder / f"{kind}{number}").touch()
    return DeadlyDevices(folder)
