"""`wait: all` and `timeout`: synchronised rivals, and what keeps them from waiting for ever."""

import pytest

from stageloom.shared.plan import Wait
from tests.engine.driver import Driver
from tests.engine.plans import chains

ROUNDS = [[(0, 0, 0), (1, 0, 0)], [(0, 0, 1), (1, 0, 1)]]


def _driver(wait: Wait = Wait.ALL, wait_timeout_us: int = 0) -> Driver:
    return Driver(chains(2, 2, groups=ROUNDS, wait=wait, wait_timeout_us=wait_timeout_us, run_ahead=1))


def test_none_never_waits() -> None:
    driver = _driver(Wait.NONE)
    driver.submit("a")
    assert driver.ran() == [[(0, 0, 0)]]


@pytest.mark.promise("waiting-rules-act-written")
def test_all_waits_until_every_members_task_has_come() -> None:
    driver = _driver()
    driver.submit("a")
    assert not driver.issued
    assert driver.core.next_wakeup(0.0) is None
    driver.submit("b")
    driver.end_all()
    assert driver.ran() == [[(0, 0, 0), (1, 0, 0)], [(0, 0, 1), (1, 0, 1)]]


@pytest.mark.promise("waiting-rules-act-written")
def test_timeout_waits_so_long_and_no_longer() -> None:
    driver = _driver(Wait.TIMEOUT, wait_timeout_us=1000)
    driver.submit("a")
    assert not driver.issued
    assert driver.core.next_wakeup(0.0) == 0.001
    driver.at(0.0009)
    assert not driver.issued
    driver.at(0.001)
    assert driver.ran() == [[(0, 0, 0)]]


def test_timeout_does_not_wait_once_all_are_there() -> None:
    driver = _driver(Wait.TIMEOUT, wait_timeout_us=1000)
    driver.submit("a")
    driver.submit("b")
    assert driver.ran() == [[(0, 0, 0), (1, 0, 0)]]


@pytest.mark.promise("waiting-rules-act-written")
def test_a_cancelled_instance_travels_on_as_an_empty_member() -> None:
    """1. Round one runs block 0 of both. 2. `a` is cancelled. 3. `b` runs block 1 alone, and the next round
    is not held up: without the empty member, round two's `a` would wait for `b`, which waits for `a`."""
    driver = _driver()
    a = driver.submit("a")
    driver.submit("b")
    driver.submit("a")
    driver.submit("b")
    driver.do(driver.core.cancel(a, 0.0))
    driver.end_all()
    both = [(0, 0, 0), (1, 0, 0)]
    assert driver.ran() == [both, [(1, 0, 1)], both, [(0, 0, 1), (1, 0, 1)]]


def test_a_round_of_dead_instances_needs_no_step() -> None:
    driver = _driver()
    a, b = driver.submit("a"), driver.submit("b")
    driver.do(driver.core.cancel(a, 0.0))
    driver.do(driver.core.cancel(b, 0.0))
    driver.end_all()
    assert len(driver.issued) == 1
    assert driver.core.idle


def test_a_failed_instance_travels_on_too() -> None:
    groups = [[(0, 0, 0)], [(0, 0, 1), (1, 0, 0)]]
    driver = Driver(chains(2, 1, groups=groups, wait=Wait.ALL, run_ahead=1))
    driver.submit("a")
    b = driver.submit("b")
    driver.end(error="broken")
    driver.end_all()
    assert driver.outcome(b) == "completed"
    assert driver.core.idle


@pytest.mark.promise("waiting-rules-act-written")
def test_all_acts_as_none_while_draining() -> None:
    driver = _driver()
    driver.submit("a")
    driver.do(driver.core.drain(0.0))
    driver.end_all()
    assert driver.ran() == [[(0, 0, 0)], [(0, 0, 1)]]
    assert driver.core.idle


def test_a_drain_frees_empty_members() -> None:
    driver = _driver()
    a = driver.submit("a")
    driver.submit("b")
    driver.do(driver.core.cancel(a, 0.0))
    driver.do(driver.core.drain(0.0))
    driver.end_all()
    assert driver.core.idle


def test_after_a_drain_the_rounds_begin_anew() -> None:
    """1. `a` is launched. 2. A drain lets it go on alone. 3. The drain ends while it is in flight: nothing is
    launched before it is out, as it broke the rounds. 4. Then all wait for each other again."""
    driver = _driver()
    driver.submit("a")
    driver.do(driver.core.drain(0.0))
    driver.activate(0)
    driver.submit("b")
    assert driver.ran() == [[(0, 0, 0)]]
    driver.end()
    driver.end()
    assert driver.ran() == [[(0, 0, 0)], [(0, 0, 1)]]
    driver.submit("a")
    driver.end_all()
    assert driver.ran()[2:] == [[(0, 0, 0), (1, 0, 0)], [(0, 0, 1), (1, 0, 1)]]


def test_all_acts_as_none_on_a_superseded_plan() -> None:
    driver = _driver()
    a = driver.submit("a")
    driver.load(1, chains(1, 1, run_ahead=1))
    driver.activate(1)
    driver.end_all()
    assert driver.outcome(a) == "completed"
    assert driver.released == [0]
