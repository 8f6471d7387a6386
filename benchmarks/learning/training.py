"""Several seeds of one training side by side, each in a process of its own; what was begun goes on."""

import multiprocessing
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.learning.maddpg.train import MaddpgResult, train
from stageloom.shared.errors import UnavailableError

_LEAST_LEFT_S = 20.0


def trained(
    problem: Problem,
    settings: MaddpgSettings,
    seeds: Sequence[int],
    *,
    budget_s: float,
    folder: Path,
    told: Callable[[str], None],
) -> list[MaddpgResult]:
    """One training per seed, all at once, within about `budget_s` of this machine's time together.

    The folder keeps each training's state and result: called again it goes on where it was.

    Raises:
        UnavailableError: a training ended without a result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "problem.pickle").write_bytes(pickle.dumps((problem, settings)))
    processes = {
        seed: multiprocessing.get_context("spawn").Process(
            target=_train, args=(folder, seed, budget_s), name=f"training-{seed}"
        )
        for seed in seeds
        if not (folder / f"{seed}.trained").exists()
    }
    for process in processes.values():
        process.start()
    try:
        for seed, process in processes.items():
            process.join()
            told(f"seed {seed}: {'ended without a result' if process.exitcode else 'trained'}")
    except BaseException:
        for process in processes.values():
            process.terminate()
        raise
    found = []
    for seed in seeds:
        file = folder / f"{seed}.trained"
        if not file.exists():
            raise UnavailableError(
                f"the training with seed {seed} ended without a result", remedy=f"see {folder}; run it again"
            )
        found.append(pickle.loads(file.read_bytes()))  # written by this benchmark
    return found


def _train(folder: Path, seed: int, budget_s: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark ends its trainings itself
    problem, settings = pickle.loads((folder / "problem.pickle").read_bytes())
    state, spent = folder / f"{seed}.state", folder / f"{seed}.seconds"
    before_s = float(spent.read_text()) if spent.exists() else 0.0
    began_s = time.monotonic()

    def save(raw: bytes) -> None:
        _write(state, raw)
        _write(spent, str(before_s + time.monotonic() - began_s).encode())

    result = train(
        problem,
        settings,
        seed,
        clock=time.monotonic,
        budget_s=max(budget_s, before_s + _LEAST_LEFT_S),
        state=state.read_bytes() if state.exists() else None,
        spent_s=before_s,
        save=save,
    )
    _write(folder / f"{seed}.trained", pickle.dumps(result))


def _write(path: Path, raw: bytes) -> None:
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_bytes(raw)
    fresh.replace(path)
