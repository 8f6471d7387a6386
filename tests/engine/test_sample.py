"""What the engine shows a trigger, ten times a second."""

from tests.engine.driver import Driver
from tests.engine.plans import chains


def test_a_glance_shows_arrivals_queues_ages_and_where_instances_are() -> None:
    driver = Driver(chains(2, 1, fields={"launch_interval_us": 10**6, "work_conserving": False}))
    for model in ("a", "a", "a", "b"):
        driver.submit(model)
    driver.at(0.5)
    a, b = driver.core.sample(driver.now).queues
    assert (a.name, a.arrived, a.queued, a.oldest_age_s, a.blocks, a.progress) == ("a", 3, 2, 0.5, 2, 0b01)
    assert (b.name, b.arrived, b.queued, b.oldest_age_s, b.blocks, b.progress) == ("b", 1, 0, 0.0, 1, 0b1)
    driver.end()  # of both lanes' steps the oldest: a moves on to its second block
    assert driver.core.sample(driver.now).queues[0].progress == 0b10


def test_tasks_that_find_the_queue_full_count_as_arrived() -> None:
    from stageloom.shared.plan import QueuePlan

    driver = Driver(chains(1, fields={"queue": QueuePlan(max_tasks=1), "launch_interval_us": 10**6}))
    tasks = [driver.submit("a") for _ in range(4)]
    assert [driver.outcome(task) for task in tasks].count("refused") == 2
    assert driver.core.sample(driver.now).queues[0].arrived == 4


def test_the_tightest_deadline_is_told_once_and_counts_from_arrival() -> None:
    driver = Driver(chains(1))
    assert driver.core.sample(driver.now).tightest_s is None
    driver.now = 10.0
    for deadline_s in (12.0, 10.5, None, 9.0):
        driver.submit("a", deadline_s=deadline_s)
    assert driver.core.sample(driver.now).tightest_s == 0.5, "one that had passed already says nothing"
    assert driver.core.sample(driver.now).tightest_s is None


def test_the_tightest_deadline_of_each_model_is_its_own() -> None:
    driver = Driver(chains(1, 1))
    for model, deadline_s in (("a", 3.0), ("b", 2.0), ("b", 0.5)):
        driver.submit(model, deadline_s=deadline_s)
    seen = driver.core.sample(driver.now)
    assert [queue.tightest_s for queue in seen.queues] == [3.0, 0.5] and seen.tightest_s == 0.5
    assert [queue.tightest_s for queue in driver.core.sample(driver.now).queues] == [None, None]


def test_a_model_that_the_plan_lacks_is_not_shown() -> None:
    driver = Driver(chains(1, 1))
    driver.load(1, chains(1))
    driver.activate(1)
    assert [queue.name for queue in driver.core.sample(driver.now).queues] == ["a"]


def test_a_task_waits_as_long_in_an_instance_as_in_a_queue() -> None:
    seen = []
    for replicas in (1, 4):
        driver = Driver(chains(1, lanes=1, run_ahead=1, fields={"replicas": replicas}))
        for at_s in (0.0, 0.25, 0.5):
            driver.at(at_s)
            driver.submit("a")
        driver.at(1.0)
        (queue,) = driver.core.sample(driver.now).queues
        seen.append((queue.queued, driver.core.oldest_age_s(driver.now)))
    assert seen == [(1, 0.75), (0, 0.75)], "the first of the three runs"


def test_no_task_waits_where_all_have_begun() -> None:
    driver = Driver(chains(1, lanes=1))
    driver.submit("a")
    driver.at(1.0)
    assert driver.core.oldest_age_s(driver.now) == 0.0
