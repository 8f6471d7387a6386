"""Situations that a person would name, each played over many seeds with a clear course of events."""

from pathlib import Path

import pytest

from stageloom.shared.messages.control import Activation, Autonomy, DeviceState, Origin
from tests.sim import world
from tests.sim.agent import SPOOL_BYTES
from tests.sim.faults import Faults
from tests.sim.library import MODELS, SOUND, KnownPlan, Nature
from tests.sim.network import DOWN, UP
from tests.sim.world import Pace, World

SEEDS = range(8)
ROUGH = Faults(loss=0.2, repeat=0.2, delay_s=0.5, store=0.1, disk=0.05)
DAY_S = 86_400.0


def sound(made: World, count: int) -> list[KnownPlan]:
    """Plans that hold what they promise."""
    plans = [plan for plan in made.plans if plan.bound is not None][:count]
    for plan in plans:
        made.natures[plan.digest] = SOUND
    return plans


@pytest.mark.promise("desired-changed-twice-while")
@pytest.mark.parametrize("seed", SEEDS)
def test_desired_changed_twice_while_away(seed: int) -> None:
    """A level, not a message.

    1. The device commits `a`, and is gone.
    2. `b` and then `c` are pushed.
    3. It comes back and commits `c`; it never ran `b`.
    """
    with world.world(seed, ROUGH) as made:
        a, b, c = sound(made, 3)
        made.begin()
        made.push(a)
        made.until(30.0)
        made.converge()
        assert made.agent.core.report().active == a.digest
        made.agent.crash(away_s=20.0)
        made.until(made.now_s + 6.0)
        made.push(b)
        made.until(made.now_s + 6.0)
        made.push(c)
        made.until(made.now_s + 9.0)
        made.converge()
        state = made.agent.core.state
        assert state.state is DeviceState.COMMITTED
        assert made.agent.core.report().active == c.digest
        assert b.digest not in made.watch.memory(made.agent).recorded


@pytest.mark.parametrize("seed", SEEDS)
def test_a_device_that_has_nothing_to_report_agrees_with_a_database_that_has_no_report(seed: int) -> None:
    """Revision 0 counts as stored: the first of a new device may be lost, or be younger than a backup."""
    with world.world(seed, Faults(store=1.0)) as made:
        made.begin()
        made.until(made.faults_end_s)
        made.converge()


@pytest.mark.promise("desired-changed-twice-while")
@pytest.mark.parametrize("seed", SEEDS)
def test_restored_database_starts_an_epoch_and_converges(seed: int) -> None:
    """A backup from before the last change.

    1. The device commits `a`; the database is copied; it commits `b`.
    2. The copy takes the database's place.
    3. The planner learns from the device that it is behind: it desires `a` anew, in a later epoch.
    4. The device commits that, and a push after it gets through as well.
    """
    with world.world(seed, ROUGH) as made:
        a, b, c = sound(made, 3)
        made.begin()
        made.push(a)
        made.until(30.0)
        made.converge()
        backup = made.store.snapshot()
        made.push(b)
        made.converge()
        assert made.agent.core.report().active == b.digest
        before = made.member.desired
        made.backup = backup
        made.planner_stops()
        made.restore()
        made.until(made.now_s + 5.0)
        made.converge()
        after = made.member.desired
        assert before is not None
        assert after is not None
        assert after.epoch > before.epoch
        assert after.generation > before.generation
        assert made.agent.core.report().active == a.digest
        made.push(c)
        made.converge()
        assert made.agent.core.report().active == c.digest


@pytest.mark.more
@pytest.mark.promise("rolled-back-device-reports")
@pytest.mark.parametrize(
    "nature",
    [Nature(fails_tasks=True), Nature(crashes_after_s=0.1), Nature(crashes_after_s=1.0)],
    ids=["fails tasks", "crashes at once", "crashes later"],
)
@pytest.mark.parametrize("seed", range(6))
def test_a_rolled_back_device_never_reports_up_to_date(seed: int, nature: Nature) -> None:
    """Every report on the way is looked at by `watch`.

    1. The device commits `a`; `b`, which is bad, is pushed.
    2. The device rolls back, and says that `b` was seen and `a` runs.
    3. It is killed, and says the same again.
    """
    with world.world(seed, ROUGH) as made:
        a, b = sound(made, 2)
        made.natures[b.digest] = nature
        made.begin()
        made.push(a)
        made.until(30.0)
        made.converge()
        made.push(b)
        made.converge()
        for _ in range(2):
            member = made.member
            assert member.report is not None
            assert member.report.state is DeviceState.ROLLED_BACK
            assert (member.report.seen, member.report.active) == (b.digest, a.digest)
            made.agent.crash()
            made.until(made.now_s + 4.0)
            made.converge()


def in_a_trial(made: World) -> tuple[KnownPlan, KnownPlan]:
    """The device runs the first plan, and a trial of the second, which is better, has begun."""
    a, b = [plan for plan in made.plans if plan.bound is not None and len(plan.needs) == MODELS][:2]
    made.natures[a.digest], made.natures[b.digest] = SOUND, Nature(speed=1.5)
    made.begin()
    made.push(a)
    made.until(30.0)
    made.converge()
    made.push(b, Activation.TRIAL)
    while made.agent.core.state.state is not DeviceState.TRIAL:
        made.until(made.now_s + 0.05)
    return a, b


@pytest.mark.parametrize("seed", range(10))
def test_a_crash_at_any_moment_of_a_trial_rejects_the_plan_for_good(seed: int) -> None:
    """The candidate may be what stopped the agent.

    1. The device runs `a`, and a trial of `b`, which is better, has begun.
    2. The agent is killed somewhere in it, before the verdict.
    3. It starts on `a` and reports `b` as rejected, after another kill too.
    """
    with world.world(seed, Faults()) as made:
        a, b = in_a_trial(made)
        made.until(made.now_s + made.rng.random() * 2.0)
        assert made.agent.core.state.state is DeviceState.TRIAL
        for _ in range(2):
            made.agent.crash()
            made.until(made.now_s + 4.0)
            made.converge()
            report = made.member.report
            assert report is not None
            assert report.state is DeviceState.REJECTED
            assert (report.seen, report.active) == (b.digest, a.digest)


@pytest.mark.promise("desired-changed-twice-while")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_local_plan_gives_way_to_a_newer_desired_one(seed: int) -> None:
    """Planned on the device while the planner was away, and overtaken.

    1. `a` wins a trial, then the device commits `b` by order; it may re-plan by itself.
    2. The network is gone. A trigger asks for `a`, which is proven: it runs, of origin local.
    3. The planner, which knows nothing of that, desires `c`.
    4. The network is back: the device reports what it ran, and commits `c`.
    """
    with world.world(seed, Faults(delay_s=0.2, repeat=0.2)) as made:
        _, a = in_a_trial(made)
        made.converge()
        b, c = [plan for plan in sound(made, 4) if plan.digest != a.digest][:2]
        made.push(b, autonomy=Autonomy.PROVEN)
        made.converge()
        made.network.cut((UP, DOWN), 40.0)
        made.until(made.now_s + 8.0)
        made.agent.alarm(a)
        made.until(made.now_s + 10.0)
        report = made.agent.core.report()
        assert (report.active, report.origin, report.local_counter) == (a.digest, Origin.LOCAL, 1)
        made.push(c)
        made.until(made.now_s + 25.0)
        made.converge()
        report = made.agent.core.report()
        assert report.state is DeviceState.COMMITTED
        assert (report.active, report.origin) == (c.digest, Origin.PLANNER)


def folder_bytes(folder: Path) -> int:
    """Everything that lies in it."""
    return sum(path.stat().st_size for path in folder.iterdir())


def offline_for_days(seed: int, days: float) -> tuple[World, int]:
    """A device that measures every two minutes and has no network for days; the largest its spool became."""
    pace = Pace(
        tick_s=60.0, planner_tick_s=60.0, heartbeat_s=60.0, dead_s=240.0, measure_s=120.0, task_s=3600.0
    )
    with world.world(seed, Faults(wall_jump=0.001), pace) as made:
        made.faults_end_s = days * DAY_S
        made.begin()
        made.until(600.0)
        made.network.cut((UP, DOWN), days * DAY_S - 1200.0)
        largest = 0
        while made.now_s < made.faults_end_s - 600.0:
            made.until(made.now_s + 1800.0)
            largest = max(largest, folder_bytes(made.agent.home / "spool"))
        made.converge(DAY_S)
        return made, largest


@pytest.mark.promise("telemetry-bounded-over-simulated")
@pytest.mark.parametrize("seed", range(1))
def test_telemetry_stays_bounded_over_days_offline_and_its_books_balance(seed: int) -> None:
    """Two days without a network.

    1. The spool fills and holds its bound; what it drops is counted, row by row.
    2. The network is back: the rest drains, and the planner's figures balance.
    """
    made, largest = offline_for_days(seed, 2.0)
    assert SPOOL_BYTES // 2 < largest < SPOOL_BYTES + 4096, "the bound, and the ledger beside it"
    (book,) = made.store.books.values()
    assert book.dropped > 1000
    assert book.produced == book.dropped + len(made.store.rows)


@pytest.mark.full
def test_telemetry_stays_bounded_over_a_month_offline() -> None:
    _, largest = offline_for_days(3, 30.0)
    assert largest < SPOOL_BYTES + 4096


@pytest.mark.parametrize("seed", SEEDS)
def test_two_agents_with_one_key_take_turns_and_the_one_that_stays_converges(seed: int) -> None:
    """A copied key.

    1. The device commits `a`; a second agent with its key appears.
    2. `b` is pushed while the two take turns.
    3. The second one goes; the first runs `b`, and no row of its telemetry is lost or counted twice.
    """
    with world.world(seed, Faults(delay_s=0.2)) as made:
        a, b = sound(made, 2)
        made.begin()
        made.push(a)
        made.until(8.0)
        made.join_clone()
        made.until(15.0)
        made.push(b)
        made.until(25.0)
        made.dismiss_clones()
        made.converge()
        assert made.agent.core.report().active == b.digest
