"""When tasks are launched: spacing, idle lanes, batches."""

import pytest

from tests.engine.driver import Driver
from tests.engine.plans import chains


def _launches(driver: Driver, until_s: float) -> list[tuple[float, int]]:
    """When and how many tasks first blocks were issued with, steps ending at once."""
    launches: list[tuple[float, int]] = []
    seen = 0
    while True:
        driver.end_all()
        fresh = driver.issued[seen:]
        launches.extend((round(driver.now, 6), len(step.members[0].tasks)) for step in fresh)
        seen = len(driver.issued)
        wakeup = driver.core.next_wakeup(driver.now)
        if wakeup is None or wakeup > until_s:
            return launches
        driver.at(wakeup)


@pytest.mark.promise("launches-keep-spacing-batches")
def test_strict_launches_are_spaced_by_the_interval() -> None:
    driver = Driver(chains(1, fields={"launch_interval_us": 1000, "work_conserving": False}))
    for _ in range(4):
        driver.submit("a")
    assert _launches(driver, 1.0) == [(0.0, 1), (0.001, 1), (0.002, 1), (0.003, 1)]


@pytest.mark.promise("launches-keep-spacing-batches")
def test_the_spacing_counts_from_the_last_launch_not_from_a_grid() -> None:
    driver = Driver(chains(1, fields={"launch_interval_us": 1000, "work_conserving": False}))
    driver.submit("a")
    driver.end_all()
    driver.at(0.0015)
    driver.submit("a")
    driver.submit("a")
    assert len(driver.issued) == 2
    assert driver.core.next_wakeup(driver.now) == 0.0025


def test_a_batch_is_followed_by_its_tasks_times_the_interval() -> None:
    fields = {"launch_interval_us": 1000, "work_conserving": False, "batch": 4, "replicas": 1}
    driver = Driver(chains(1, fields=fields))
    for _ in range(9):
        driver.submit("a")
    assert _launches(driver, 1.0) == [(0.0, 1), (0.001, 4), (0.005, 4)]


def test_work_conserving_launches_when_a_lane_is_idle() -> None:
    driver = Driver(chains(1, fields={"launch_interval_us": 1000}))
    for _ in range(3):
        driver.submit("a")
    # The first runs; the second waits for its turn, as the lane is busy.
    assert len(driver.issued) == 1
    driver.now = 0.0001
    driver.end()
    assert len(driver.issued) == 2
    driver.now = 0.0002
    driver.end()
    assert len(driver.issued) == 3


def test_work_conserving_waits_with_an_idle_lane_for_company_alone() -> None:
    """Not until the interval since the last launch, of a second, is over."""
    fields = {"launch_interval_us": 1_000_000, "batch": 4, "batch_max_delay_us": 500}
    driver = Driver(chains(1, 1, fields=fields))
    for _ in range(2):
        driver.now += 0.01
        driver.submit("a")
        wakeup = driver.core.next_wakeup(driver.now)
        assert wakeup == pytest.approx(driver.now + 0.0005)
        driver.at(wakeup or 0.0)
        assert len(driver.steps) == 1
        driver.end_all()


def test_a_strict_launcher_leaves_a_lane_idle() -> None:
    driver = Driver(chains(1, fields={"launch_interval_us": 1000, "work_conserving": False}))
    driver.submit("a")
    driver.submit("a")
    driver.end_all()
    assert len(driver.issued) == 1


@pytest.mark.promise("launches-keep-spacing-batches")
def test_a_batch_waits_for_company_at_most_its_delay() -> None:
    driver = Driver(chains(1, fields={"batch": 4, "batch_max_delay_us": 500}))
    driver.submit("a")
    driver.at(0.0002)
    driver.submit("a")
    assert not driver.issued
    assert driver.core.next_wakeup(driver.now) == pytest.approx(0.0005)
    driver.at(driver.core.next_wakeup(driver.now) or 0.0)
    assert [m.tasks for m in driver.issued[0].members] == [(0, 1)]


def test_a_full_batch_does_not_wait() -> None:
    driver = Driver(chains(1, fields={"batch": 2, "batch_max_delay_us": 500}))
    driver.submit("a")
    driver.submit("a")
    assert [m.tasks for m in driver.issued[0].members] == [(0, 1)]


def test_a_batch_is_padded_to_the_next_bucket() -> None:
    driver = Driver(chains(1, fields={"batch": 6, "batch_max_delay_us": 500}))
    for _ in range(3):
        driver.submit("a")
    driver.at(0.001)
    assert driver.issued[0].program.buckets == (4,)
    driver.end_all()
    for _ in range(6):
        driver.submit("a")
    assert driver.issued[1].program.buckets == (6,)
    assert {answer.outcome.value for answer in driver.answers.values()} == {"completed"}


def test_a_cancelled_row_leaves_the_batch_before_its_first_block() -> None:
    """The lane is busy, so the batch of two waits in slot 0."""
    driver = Driver(chains(1, fields={"batch": 2}, run_ahead=1))
    driver.submit("a")
    first, second = driver.submit("a"), driver.submit("a")
    # `first` was launched alone, at once; `second` waits in the queue.
    driver.do(driver.core.cancel(first, 0.0))
    driver.end_all()
    assert driver.order() == [0, second]


def test_a_cancelled_row_keeps_its_place_once_the_batch_runs() -> None:
    driver = Driver(chains(2, fields={"batch": 2, "batch_max_delay_us": 500}, run_ahead=1))
    first, second = driver.submit("a"), driver.submit("a")
    driver.do(driver.core.cancel(first, 0.0))
    driver.end_all()
    assert [step.members[0].tasks for step in driver.issued] == [(first, second)] * 2
    assert driver.outcome(first) == "cancelled" and driver.outcome(second) == "completed"
    assert not driver.drops
