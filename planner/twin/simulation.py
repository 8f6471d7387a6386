"""A simulation in parts, each of which any process can run: the state between two of them is bytes.

The parts end at fixed moments of the simulated time, so equal seeds give equal figures, however many parts
one call runs and wherever it does.
"""

import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stageloom.planner.twin.arrivals import Process
from stageloom.planner.twin.reference import Twin
from stageloom.planner.twin.replay import figures
from stageloom.planner.twin.times import StepTimes
from stageloom.planner.twin.window import SAMPLE_EVERY_S, join, usual_samples
from stageloom.shared.bound import BoundPlan

PARTS: Final = 50


@dataclass(frozen=True, slots=True)
class Simulation:
    """A plan on a simulated device, with what arrives there for so long."""

    bound: BoundPlan
    times: StepTimes
    arrivals: Mapping[str, Process]
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class SimulatedParts:
    """`done` of `PARTS`: the twin after them, pickled, and what happened in those that the last call ran."""

    done: int
    twin: bytes
    windows: bytes


def begun(simulation: Simulation) -> SimulatedParts:
    """The beginning of a simulation."""
    twin = Twin(simulation.times, simulation.arrivals, seed=simulation.seed)
    twin.deploy(simulation.bound)
    return SimulatedParts(0, pickle.dumps(twin), b"")


def advanced(before: SimulatedParts, seconds: float, wall_s: float) -> SimulatedParts:
    """Run parts of a simulation of `seconds` for about `wall_s`, at least one."""
    began_s = time.monotonic()
    twin: Twin = pickle.loads(before.twin)  # what `begun` or this function made
    done, windows = before.done, []
    every_s = min(SAMPLE_EVERY_S, seconds / PARTS)  # as often as a device, and once in each part
    while done < PARTS:
        done += 1
        part_s = seconds * done / PARTS - twin.now_s
        samples = usual_samples(part_s, begin_s=twin.now_s, every_s=every_s)
        windows.append(twin.run(part_s, sample_at_s=samples))
        if time.monotonic() - began_s >= wall_s:
            break
    return SimulatedParts(done, pickle.dumps(twin), pickle.dumps(windows))


def figures_of(windows: Sequence[bytes]) -> dict[str, float]:
    """The figures of all parts together, from their `SimulatedParts.windows`."""
    return figures(join([window for part in windows for window in pickle.loads(part)]))
