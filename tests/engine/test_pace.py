"""Tasks that can no longer end in time are given up for those that can, where tasks go by deadlines."""

import pytest

from stageloom.shared.engine.pace import Pace
from stageloom.shared.plan import StepChoice
from tests.engine.driver import Driver
from tests.engine.plans import chains


def _one_lane(*blocks: int) -> Driver:
    return Driver(chains(*blocks, step_choice=StepChoice.DEADLINE, run_ahead=1))


def _measured(driver: Driver, seconds: float) -> None:
    """Run one task of model `a` whose steps take so long."""
    driver.submit("a")
    while driver.steps:
        driver.at(driver.now + seconds)
        driver.end()


def _run(driver: Driver, seconds: float) -> None:
    """End what is in flight after its seconds, until nothing is."""
    while driver.steps:
        driver.at(driver.now + seconds)
        driver.end()


def test_a_task_runs_only_if_it_can_still_end_in_time() -> None:
    driver = _one_lane(1)
    _measured(driver, 0.010)
    tasks = [driver.submit("a", deadline_s=driver.now + left_s) for left_s in (0.025, 0.026, 0.027)]
    issued = len(driver.issued)
    _run(driver, 0.010)
    assert [driver.outcome(task) for task in tasks] == ["completed", "completed", "expired"]
    assert len(driver.issued) == issued + 1
    assert driver.answers[tasks[2]].reason == "its deadline was too close for what was left to do"


def test_a_task_that_just_fits_runs() -> None:
    driver = _one_lane(1)
    _measured(driver, 0.010)
    first = driver.submit("a")
    fits = driver.submit("a", deadline_s=driver.now + 0.0201)
    _run(driver, 0.010)
    assert [driver.outcome(task) for task in (first, fits)] == ["completed", "completed"]


def test_nothing_is_given_up_before_a_step_was_measured() -> None:
    driver = _one_lane(1, 1)
    driver.submit("a")
    late = driver.submit("b", deadline_s=0.0101)
    driver.at(0.010)
    driver.end()
    assert driver.order() == [0, late]


def test_a_step_that_failed_says_nothing_of_how_long_one_takes() -> None:
    driver = _one_lane(1)
    _measured(driver, 0.010)
    driver.submit("a")
    driver.at(driver.now + 0.001)
    driver.end(error="the backend broke")
    driver.submit("a")
    late = driver.submit("a", deadline_s=driver.now + 0.015)
    driver.at(driver.now + 0.010)
    driver.end()
    assert driver.outcome(late) == "expired"


def test_other_step_choices_try_every_task_until_its_deadline() -> None:
    driver = Driver(chains(1, run_ahead=1))
    _measured(driver, 0.010)
    driver.submit("a")
    late = driver.submit("a", deadline_s=driver.now + 0.0101)
    driver.at(driver.now + 0.010)
    driver.end()
    assert driver.order()[-1] == late


def test_a_task_between_two_blocks_is_given_up_when_the_rest_takes_too_long() -> None:
    driver = _one_lane(3, 1)
    _measured(driver, 0.010)
    task = driver.submit("a", deadline_s=driver.now + 0.031)
    driver.at(driver.now + 0.015)
    driver.end()
    assert driver.outcome(task) == "expired"
    assert not driver.steps
    assert driver.core.idle


def test_tasks_behind_one_that_is_given_up_are_served_at_once() -> None:
    driver = _one_lane(1, 1)
    _measured(driver, 0.010)
    driver.submit("b")
    late = [driver.submit("a", deadline_s=driver.now + 0.012 + 1e-3 * i) for i in range(3)]
    other = driver.submit("b")
    driver.at(driver.now + 0.008)
    driver.end()
    assert [driver.outcome(task) for task in late] == ["expired"] * 3
    assert driver.order()[-1] == other


def test_where_no_task_ever_has_the_time_and_others_wait_one_is_tried_now_and_then() -> None:
    driver = _one_lane(1, 1)
    _measured(driver, 0.010)
    hopeless = []
    for _ in range(40):
        driver.now += 1.0
        driver.submit("b")
        driver.submit("b")
        hopeless.append(driver.submit("a", deadline_s=driver.now + 0.008))
        driver.end()
        driver.now += 0.005
        driver.end_all()
    outcomes = [driver.outcome(task) for task in hopeless]
    assert outcomes[:20] == ["expired"] * 20 and outcomes[-5:] == ["completed"] * 5


@pytest.mark.parametrize("models", [("a",), ("c",), ("a", "b")])
def test_after_a_slow_step_an_idle_lane_still_serves_each_task(models: tuple[str, ...]) -> None:
    """By the estimate none of them has the time any more, and nothing else wants the lane."""
    driver = _one_lane(1, 1, 3)
    for seconds in (0.010, 2.0):
        driver.submit(*models)
        _run(driver, seconds)
    tasks = []
    for _ in range(3):
        tasks.append(driver.submit(*models, deadline_s=driver.now + 0.1))
        _run(driver, 0.010)
    assert [driver.outcome(task) for task in tasks] == ["completed"] * 3


def test_a_task_that_is_tried_gives_way_to_one_that_has_the_time_and_its_pace_is_doubted() -> None:
    driver = _one_lane(4, 1)
    for model in ("a", "b"):
        driver.submit(model)
        _run(driver, 0.010)
    tasks = []
    for _ in range(60):
        driver.submit("a", deadline_s=driver.now + 0.030)
        driver.at(driver.now + 0.005)
        tasks.append(driver.submit("b", deadline_s=driver.now + 0.028))
        driver.at(driver.now + 0.005)
        driver.end()
        _run(driver, 0.010)
    assert [driver.outcome(task) for task in tasks] == ["completed"] * 60
    beyond = [member.block > 0 for (member,) in driver.ran()[5:]]
    assert not any(beyond[:60]) and any(beyond[60:]), "in time by the estimate in the end"


def test_a_shared_task_is_given_up_if_one_of_its_models_takes_too_long() -> None:
    driver = _one_lane(1, 1)
    _measured(driver, 0.010)
    driver.submit("b")
    shared = driver.submit("a", "b", deadline_s=driver.now + 0.015)
    driver.at(driver.now + 0.006)
    driver.end()
    assert driver.outcome(shared) == "expired"
    assert driver.core.idle


def test_a_short_step_counts_at_once_and_a_long_one_by_a_quarter() -> None:
    pace = Pace(2)
    pace.note(0, 4.0)
    pace.note(1, 2.0)
    assert pace.rest_s == [6.0, 2.0, 0.0]
    pace.note(0, 8.0)
    assert pace.rest_s == [7.0, 2.0, 0.0]
    pace.note(0, 1.0)
    assert pace.rest_s == [3.0, 2.0, 0.0]


def test_doubt_lowers_the_whole_estimate() -> None:
    pace = Pace(2)
    pace.note(0, 4.0)
    pace.note(1, 2.0)
    pace.doubt()
    assert pace.rest_s == pytest.approx([0.99 * 6.0, 0.99 * 2.0, 0.0])
