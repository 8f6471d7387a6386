"""The policies that `make demo` adopts: how they are trained, and how many different answers they give.

    python -m examples.demo.policies train [--width 1] [--seed 0] [--budget 60]
    python -m examples.demo.policies answers

Trained is MADDPG on the twin of a two-core CPU, over the demo's models. Nothing measured on the machine that
trains enters: the twin is `policy/cpu_2_cores.toml` with the roofline's operator times, arrivals are Poisson,
in the demo's proportions, at 1.1 of what that device serves with every block alone. So the policy is for the
twin's device class; the demo adopts it for the machine it runs on.

Answers are a policy's combined blocks and launch actions over random states. A state is drawn sample by
sample: every block busy or not by a fair coin, every queue's deviation normal around 0, with a scale between
1 ms and 10 s of work that is drawn once per state, uniform in its logarithm. Those are far more different
than what one device goes through. A policy that answers all alike is a plan.
"""

import argparse
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from random import Random

import numpy as np

from benchmarks import zoo
from examples.demo.story import FIRST, MODELS, POLICIES, WEIGHTS
from stageloom.planner.learning.maddpg.course import TrainingProgress
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.learning.maddpg.settings import MaddpgSettings
from stageloom.planner.learning.maddpg.train import MaddpgResult, train
from stageloom.planner.twin.arrivals import Poisson
from stageloom.planner.twin.device_file import DeviceFile, load_device
from stageloom.planner.twin.reference import TwinDevices
from stageloom.planner.twin.times import StepTimes
from stageloom.shared.bound import bind
from stageloom.shared.digest import digest_bytes
from stageloom.shared.plan import QueuePlan
from stageloom.shared.policy.gpg.network import Floats
from stageloom.shared.policy.maddpg.actions import combine_blocks
from stageloom.shared.policy.maddpg.checkpoint import MaddpgCheckpoint, decode, encode
from stageloom.shared.policy.maddpg.network import state_of
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.policy.queues import PolicySample
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.interface import Limits
from stageloom.shared.text import counted

DEVICE = POLICIES / "cpu_2_cores.toml"
LOAD = 1.1  # of the capacity: what a burst is like, which is when the policy is asked
MEMBERS_MAX = 3  # H: all models
SETTINGS = MaddpgSettings(actors=(64, 32), transitions=1200)
QUEUE = QueuePlan(max_tasks=4096)  # deep enough that a queue that grows is seen to grow
STATES = 2000
SCALES_S = (1e-3, 10.0)


def choices(width: float, folder: Path) -> list[ModelChoice]:
    """The demo's models, written, imported, and cut as in the demo's first plan."""
    partition = FIRST[FIRST.index("--partition") + 1]
    return [
        ModelChoice(
            name=name, artifact=artifact.digest, graph=artifact.graph, partition=partition, queue=QUEUE
        )
        for name, artifact in zoo.artifacts(MODELS, folder, width=width).items()
    ]


def problem_of(device: DeviceFile, models: list[ModelChoice]) -> Problem:
    """Block combination and launch intervals of the demo's first plan, one step at a time."""
    costs = CostTable(rates=device.rates())
    template = compose(models, costs=costs)
    graphs = {model.artifact: model.graph for model in models}
    times, bound = StepTimes(device, costs).of_plan(bind(template, graphs)), bind(template, graphs)
    task_s = [
        fsum(
            times.step(index, 1, (1,)).seconds
            for index, block in enumerate(bound.combined)
            if block.members[0].model == model
        )
        for model in range(len(models))
    ]
    scale = LOAD / fsum(weight * seconds for weight, seconds in zip(WEIGHTS, task_s, strict=True))
    rates = {model.name: weight * scale for model, weight in zip(models, WEIGHTS, strict=True)}
    return Problem.of(
        template,
        device_class=f"twin {device.name}",
        graphs=graphs,
        costs=costs,
        arrivals_per_s=list(rates.values()),
        make_device=TwinDevices(
            device, costs, {name: Poisson(rate_per_s=rate) for name, rate in rates.items()}
        ),
        members_max=MEMBERS_MAX,
        limits=Limits(),  # groups as long as they come: every border between sessions costs on a CPU
    )


def trained(width: float, seed: int, budget_s: float) -> tuple[bytes, MaddpgResult]:
    """The checkpoint, with where it is from, and the training."""

    def told(progress: TrainingProgress) -> None:
        policy, best = progress.policy.throughput_per_s, progress.best.throughput_per_s
        print(
            f"{progress.transitions} transitions: policy {policy:.2f}/s, best plan {best:.2f}/s", flush=True
        )

    with tempfile.TemporaryDirectory() as folder:
        problem = problem_of(load_device(str(DEVICE)), choices(width, Path(folder)))
        done = train(problem, SETTINGS, seed, clock=time.process_time, budget_s=budget_s, on_progress=told)
    found = decode(done.checkpoint)
    about = {
        "command": f"python -m examples.demo.policies train --width {width:g} --seed {seed}",
        "device_file": {"name": DEVICE.name, "digest": digest_bytes([DEVICE.read_bytes()])},
        "load": LOAD,
        "train_s": round(done.train_s, 1),
    }
    return encode(
        MaddpgCheckpoint(found.space, found.network, found.book, {**found.provenance, **about})
    ), done


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


def print_answers() -> None:
    for file in sorted(POLICIES.glob("*.checkpoint")):
        found = answers(decode(file.read_bytes()))
        limits = zip(found.launch_least, found.launch_most, strict=True)
        launch = ", ".join(f"{least:.4f} to {most:.4f}" for least, most in limits)
        print(f"{file.name}: {STATES} states, {counted(found.combinations, 'combination')}")
        print(f"  the commonest: {found.commonest} states; launch actions {launch}")


def print_training(width: float, seed: int, budget_s: float) -> None:
    body, done = trained(width, seed, budget_s)
    file = POLICIES / f"width-{width:g}.checkpoint"
    file.write_bytes(body)
    scores = {**done.seeds_worth, "policy": done.policy_worth, "best plan": done.plan_worth}
    for name, score in scores.items():
        print(f"{name:<20} {score.throughput_per_s:8.2f}/s  p99 {1000 * score.p99_s:8.1f} ms")
    print(f"{file}: {len(body)} bytes, {digest_bytes([body])}, {done.transitions} transitions, {done.ended}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo.policies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("train", "answers"))
    parser.add_argument("--width", type=float, default=1.0, help="of the networks: 1, or 0.25 for --quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of processor time")
    given = parser.parse_args()
    if given.what == "answers":
        print_answers()
    else:
        print_training(given.width, given.seed, given.budget)


if __name__ == "__main__":
    main()
