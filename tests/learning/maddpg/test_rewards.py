"""Equation 2 and what goes into it."""

from math import exp, log, log1p

import numpy as np
import pytest

from stageloom.planner.learning.maddpg.replay import FIGURES_BEFORE_LATENCY, Normaliser, step_figures
from stageloom.planner.learning.maddpg.settings import Gain, MaddpgSettings, Scale
from stageloom.shared.engine.stats import Counts, ModelQueue, QueueSnapshot
from tests.learning.maddpg.toy import served, window_of

PLAIN = MaddpgSettings(latency=Scale.PLAIN, log_variance=False, superblock_penalty=0.1)
# utilisation, throughput, variance, latency of two models
ROWS = np.array([[0.2, 10.0, 1.0, 0.5, 3.0], [0.6, 30.0, 5.0, 1.5, 1.0]])
UNIT = Normaliser(np.zeros(4), np.ones(4))


def glance(*queued: int) -> QueueSnapshot:
    queues = tuple(ModelQueue(f"m{at}", 0, tasks, 0.0, 1, 0) for at, tasks in enumerate(queued))
    return QueueSnapshot(0.0, None, None, queues)


def test_agent_0_is_paid_for_the_mean_latency_and_each_other_for_its_own_models() -> None:
    """a = b = 0.4, c = 0.2: exp(0.4 * 0.2 - 0.4 * l - 0.2 * 1) with l = (0.5 + 3) / 2, 0.5, 3."""
    found = UNIT.rewards(ROWS[:1], np.zeros(1), PLAIN)
    assert found[0].tolist() == pytest.approx([exp(0.08 - 0.4 * late - 0.2) for late in (1.75, 0.5, 3.0)])


def test_z_scores_are_those_of_the_rows_that_they_were_taken_from() -> None:
    """Two rows: each figure is one deviation above or below the mean."""
    scores = Normaliser.of(ROWS, PLAIN).scores(ROWS, PLAIN)
    assert scores.tolist() == pytest.approx(np.array([[-1, -1, -1, 1], [1, 1, 1, -1]]))


def test_a_figure_that_never_changed_counts_nothing() -> None:
    rows = np.repeat(ROWS[:1], 3, axis=0)
    assert abs(Normaliser.of(rows, PLAIN).scores(rows, PLAIN)).max() < 1e-9


def test_a_figure_that_hardly_changed_at_first_makes_no_reward_that_is_endless_later() -> None:
    """A device that was always busy, and idles once: a training's weights became NaN after it."""
    busy = np.array([[1.0 - 1e-9 * at, 10.0, 1.0, 0.5 + at, 3.0 + at] for at in range(4)])
    idle = np.array([[0.3, 10.0, 0.0, 0.5, 3.0]])
    for gone in (idle, 2.0 - idle):
        rewards = Normaliser.of(busy, PLAIN).rewards(gone, np.zeros(1), PLAIN)
        assert np.isfinite(rewards).all() and rewards.max() <= exp(5.0)


def test_variance_enters_as_log1p_and_latency_by_its_logarithm() -> None:
    scores = UNIT.scores(ROWS[:1], MaddpgSettings())
    assert scores[0].tolist() == pytest.approx([0.2, log1p(1.0), log(0.5), log(3.0)])


def test_throughput_may_stand_for_utilisation() -> None:
    normaliser = Normaliser(np.array([8.0, 0.0, 0.0, 0.0]), np.ones(4))
    assert normaliser.scores(ROWS[:1], MaddpgSettings(gain=Gain.THROUGHPUT))[0, 0] == 2.0


def test_blocks_beyond_h_cost_their_share_of_the_penalty() -> None:
    found = UNIT.rewards(np.repeat(ROWS[:1], 2, axis=0), np.array([0.0, 0.5]), PLAIN)
    assert found[1].tolist() == pytest.approx((found[0] * 0.95).tolist())


def test_figures_of_a_window() -> None:
    """Queues of (2, 0) and (6, 4) tasks at 0.1 s and 0.2 s a task: work (0.2, 0) and (0.6, 0.8)."""
    window = window_of(
        2.0,
        (
            served(8, Counts(completed=3, expired=1), (0.5, 1.5, 1.0)),
            served(4, Counts(completed=1), (9.0,)),
        ),
        0.75,
        (glance(2, 0), glance(6, 4)),
    )
    utilisation, throughput_per_s, variance, *latency_s = step_figures(window, (0.1, 0.2))
    assert utilisation == 0.75
    assert throughput_per_s == 2.0
    assert variance == pytest.approx((0.1**2 + 0.1**2) / 2)
    assert latency_s == [1.0, 9.0]


def test_a_queue_that_is_never_served_is_slow_and_not_quick() -> None:
    """10 tasks wait on average and 5 came in 2 s: Little's law says 4 s each."""
    window = window_of(2.0, (served(5, Counts(), ()),), 0.0, (glance(8), glance(12)))
    assert step_figures(window, (1.0,))[FIGURES_BEFORE_LATENCY:] == (4.0,)
