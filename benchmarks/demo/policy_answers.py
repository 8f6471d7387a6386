"""How many different answers a policy gives: its combined blocks and launch actions over random states.

    python -m benchmarks.demo.policy_answers [FILE...] [--states 2000] [--seed 0]

A state is drawn sample by sample: every block busy or not by a fair coin, every queue's deviation normal
around 0, with a scale between 1 ms and 10 s of work that is drawn once per state, uniform in its logarithm.
Those are far more different than what one device goes through. A policy that answers all alike is a plan.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.demo.story import POLICIES
from stageloom.shared.policy.gpg.network import Floats
from stageloom.shared.policy.maddpg.actions import combine_blocks
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, decode
from stageloom.shared.policy.maddpg.network import state_of
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.policy.queues import PolicySample
from stageloom.shared.text import counted

STATES = 2000
SCALES_S = (1e-3, 10.0)


@dataclass(frozen=True)
class Answers:
    combinations: int  # different sets of combined blocks
    commonest: int  # states that were answered with the commonest of them
    launch_least: Floats  # per model, of the launcher's actions in [0, 1] [W]
    launch_most: Floats  # [W]


def random_state(space: Space, random: Random) -> tuple[PolicySample, ...]:
    low, high = np.log(SCALES_S)
    scale_s = float(np.exp(random.uniform(low, high)))
    return tuple(
        PolicySample(
            tuple(tuple(random.randrange(2) for _ in range(model.blocks)) for model in space.models),
            tuple(random.gauss(0.0, scale_s) for _ in space.models),
        )
        for _ in range(space.samples)
    )


def answers(policy: MaddpgCheckpoint, states: int = STATES, seed: int = 0) -> Answers:
    """Ask the policy about that many states."""
    space, random = policy.space, Random(seed)
    rows = [
        policy.network.actions(state_of(space, random_state(space, random))) for _ in range(states)
    ]  # [states][action_width]
    combined = Counter(combine_blocks(space, row[space.num_models :].tolist()).combined for row in rows)
    launch = np.stack(rows)[:, : space.num_models]
    return Answers(len(combined), max(combined.values()), launch.min(axis=0), launch.max(axis=0))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo.policy_answers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="*", type=Path, default=sorted(POLICIES.glob("*.checkpoint")))
    parser.add_argument("--states", type=int, default=STATES)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    for file in given.files:
        found = answers(decode(file.read_bytes()), given.states, given.seed)
        launch = ", ".join(
            f"{least:.4f} to {most:.4f}"
            for least, most in zip(found.launch_least, found.launch_most, strict=True)
        )
        print(f"{file.name}: {given.states} states, {counted(found.combinations, 'combination')}")
        print(f"  the commonest: {found.commonest} states; launch actions {launch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
