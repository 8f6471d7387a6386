"""Training on the twin: what the toy stands for in the other tests is there in the real one."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from stageloom.planner.learning.maddpg.work import Collect, Evaluate, collect, evaluate
from stageloom.planner.twin.arrivals import Poisson
from stageloom.planner.twin.device_file import load_device
from stageloom.planner.twin.reference import TwinDevices
from tests.learning.maddpg.toy import SMALL, problem

TWINS = TwinDevices(
    load_device("nano"),
    problem().costs,
    {"left": Poisson(rate_per_s=35.0), "right": Poisson(rate_per_s=25.0)},
    compiled=False,
)
WHERE = replace(problem(), make_device=TWINS)
ALONE = (0.0, 0.0, 0.1, 0.4, 0.6, 0.9)


def test_a_worker_elsewhere_collects_the_same() -> None:
    """The problem goes over as bytes, also after it was used here."""
    work = Collect(number=0, seed=5, steps=3, rows=(ALONE,), noise=0.1)
    here = collect(WHERE, WHERE.table(), SMALL, work)
    there = pickle.loads(pickle.dumps(WHERE))
    found = collect(there, there.table(), SMALL, pickle.loads(pickle.dumps(work)))
    for name in ("states", "actions", "figures", "following"):
        assert (getattr(found, name) == getattr(here, name)).all()
    assert (here.figures[:, 1] > 0.0).all() and np.isfinite(here.figures).all()


def test_progress_and_queues_reach_the_state() -> None:
    found = collect(WHERE, WHERE.table(), SMALL, Collect(number=0, seed=5, steps=4, rows=(ALONE,)))
    rows = found.following.reshape(4, 2, 6)
    assert set(np.unique(rows[:, :, :4])) == {0.0, 1.0}
    assert np.allclose(np.sinh(rows[:, :, 4:]).sum(axis=2), 0.0, atol=1e-3)  # deviations from the mean
    assert (rows[:, :, 4:] != 0.0).any()


@pytest.mark.full
def test_the_compiled_twin_gives_the_same_figures_of_a_plan_of_single_blocks() -> None:
    """Where every step has one member it does not matter whether its program was ready."""
    work = Evaluate(number=0, name="alone", seeds=(1, 2), steps=3, row=ALONE)
    slow = evaluate(WHERE, WHERE.table(), SMALL, work)
    fast = replace(WHERE, make_device=replace(TWINS, compiled=True))
    found = evaluate(fast, fast.table(), SMALL, work)
    assert found.throughput_per_s == pytest.approx(slow.throughput_per_s, rel=1e-9)
    assert found.p99_s == pytest.approx(slow.p99_s, rel=1e-6)
