"""What a learned policy costs on the device: from samples to actions, and on to a plan's decision.

    python -m benchmarks.policy [--quick] [--json]

MADDPG's actors (500-128, ReLU) for three models with TOP's block counts: Inception V3 13, ResNet-50 5,
SqueezeNet 12; n = 10 samples. `forward_*`: samples to actions, numpy on one thread; `decide_*`: on to
combined blocks and launch intervals, superblocks split. Times do not depend on what the weights are, so they
are drawn; every call sees other samples.
"""

import argparse
import sys
from random import Random

import numpy as np

from benchmarks.one_thread import in_one_thread
from benchmarks.runner import Report, percentile, progress, run, timed_s
from stageloom.shared.digest import digest_of
from stageloom.shared.policy.gpg.network import Floats
from stageloom.shared.policy.maddpg.decide import decide
from stageloom.shared.policy.maddpg.network import MaddpgNetwork, state_of
from stageloom.shared.policy.maddpg.space import ModelSpace, Space
from stageloom.shared.policy.plain import Load
from stageloom.shared.policy.queues import PolicySample

BLOCKS = {"inception_v3": 13, "resnet50": 5, "squeezenet": 12}
"""Blocks of TOP's table II."""

HIDDEN = (500, 128)
LOADS = tuple(
    Load(model=name, arrivals_per_s=rate, service_s=0.004, queued=0)
    for name, rate in zip(BLOCKS, (30.0, 60.0, 120.0), strict=True)
)


def space() -> Space:
    """TOP's three models on one device."""
    models = tuple(
        ModelSpace(artifact=digest_of([name]), cuts=tuple(range(1, count))) for name, count in BLOCKS.items()
    )
    return Space(device_class="benchmark", models=models, members_max=4)


def drawn(where: Space, random: np.random.Generator) -> MaddpgNetwork:
    """Actors of the sizes that are trained, with weights of the size that training begins with."""
    arrays: dict[str, Floats] = {}
    for agent, outputs in enumerate(where.agents):
        sizes = (where.state_width, *HIDDEN, outputs)
        for layer in range(3):
            bound = sizes[layer] ** -0.5
            shape = (sizes[layer + 1], sizes[layer])
            arrays[f"actor.{agent}.{layer}.weight"] = random.uniform(-bound, bound, shape).astype(np.float32)
            arrays[f"actor.{agent}.{layer}.bias"] = np.zeros(shape[0], np.float32)
    return MaddpgNetwork(arrays, where.agents)


def samples(where: Space, random: Random) -> tuple[PolicySample, ...]:
    """What a trigger's ring may hold: some blocks busy, queues of some tenths of a second."""
    return tuple(
        PolicySample(
            tuple(tuple(int(random.random() < 0.3) for _ in range(one.blocks)) for one in where.models),
            tuple(random.gauss(0.0, 0.2) for _ in where.models),
        )
        for _ in range(where.samples)
    )


def measure(report: Report, options: argparse.Namespace) -> None:
    in_one_thread("benchmarks.policy")
    time_forward(report, 500 if options.quick else 5000)


def time_forward(report: Report, repeats: int) -> None:
    where = space()
    network = drawn(where, np.random.default_rng(0))
    random = Random(0)
    seen = [samples(where, random) for _ in range(64)]
    figures: dict[str, float] = {}
    progress("timing")
    works = (
        lambda ring: network.actions(state_of(where, ring)),
        lambda ring: decide(where, network, ring, LOADS),
    )
    times = timed_s(works, lambda number: seen[number % len(seen)], repeats, warm_up=repeats // 10)
    for name, taken_s in zip(("forward", "decide"), times, strict=True):
        for percent in (50, 99):
            figures[f"{name}_p{percent}_ms"] = percentile(taken_s, percent) * 1e3
    row = {
        "models": len(where.models),
        "state": where.state_width,
        "actions": where.action_width,
        "weights": sum(values.size for values in network.arrays.values()),
        "threads": 1,
        "repeats": repeats,
    }
    report.add(figures, [row])


if __name__ == "__main__":
    sys.exit(run(measure, ["numpy"]))
