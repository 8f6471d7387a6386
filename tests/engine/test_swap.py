"""Swaps: what moves over, what ends on the old plan, what is refused, when the old plan goes."""

from dataclasses import replace

import pytest

from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.plan import ExecutorOptions, Member, ModelPlan, QueuePlan, QueueRule, Wait
from stageloom.shared.shape_ranges import ShapeRanges
from tests.engine.driver import Driver
from tests.engine.generate import chain, digest, graph_of, members_of, plan_of
from tests.engine.plans import chains, models_of, with_models

GRAPHS = {digest(0): chain("a", 6), digest(1): chain("b", 6)}


def _cut(*cuts: int, name: str = "a", **fields: object) -> ModelPlan:
    number = "abcdef".index(name)
    return ModelPlan(name=name, artifact=digest(number), cuts=cuts, **fields)  # type: ignore[arg-type]


def _plan(*models: ModelPlan, **rules: object):  # type: ignore[no-untyped-def]
    return plan_of(models, [[m] for m in members_of(models)], GRAPHS, **{"run_ahead": 1, **rules})


def test_new_launches_go_to_the_new_plan() -> None:
    driver = Driver(_plan(_cut(3)))
    driver.load(1, _plan(_cut(2)))
    driver.activate(1)
    driver.submit("a")
    assert driver.issued[0].program.plan == 1


def _spaced(interval_us: int, **fields: int):  # type: ignore[no-untyped-def]
    return _plan(_cut(3, launch_interval_us=interval_us, work_conserving=False, **fields))  # type: ignore[arg-type]


def test_an_hour_between_launches_does_not_outlast_its_plan() -> None:
    driver = Driver(_spaced(3_600_000_000))
    driver.submit("a")
    driver.end_all()
    driver.submit("a")
    assert driver.core.next_wakeup(driver.now) == 3600.0
    driver.now = 0.25
    driver.load(1, _spaced(1_000_000))
    driver.activate(1)
    assert len(driver.answers) == 1, "a second has not passed since the last launch"
    assert driver.core.next_wakeup(driver.now) == 1.0
    driver.at(1.0)
    driver.end_all()
    assert len(driver.answers) == 2


def test_a_new_plan_without_spacing_launches_at_once() -> None:
    driver = Driver(_spaced(3_600_000_000))
    driver.submit("a")
    driver.end_all()
    driver.submit("a")
    driver.load(1, _spaced(0))
    driver.activate(1)
    driver.end_all()
    assert len(driver.answers) == 2


def test_a_new_plans_spacing_counts_the_tasks_of_the_last_launch() -> None:
    """It was a batch of two: two intervals of the new plan, which is slower than the old one."""
    driver = Driver(_spaced(0, batch=2, batch_max_delay_us=500))
    for _ in range(2):
        driver.submit("a")
    driver.end_all()
    driver.load(1, _spaced(1_000_000))
    driver.activate(1)
    driver.submit("a")
    assert driver.core.next_wakeup(driver.now) == 2.0


@pytest.mark.promise("instances-move-new-plan")
def test_an_instance_moves_where_its_cut_exists() -> None:
    driver = Driver(_plan(_cut(2, 4)))
    task = driver.submit("a")
    driver.load(1, _plan(_cut(1, 2)))
    driver.activate(1)
    move = driver.moves[0]
    assert (move.old, move.new) == ((0, Member(0, 0, 1)), (1, Member(0, 0, 2)))
    assert move.after == (0,), "the step that makes the slot is in flight"
    driver.end_all()
    assert [step.program.plan for step in driver.issued] == [0, 1]
    assert driver.outcome(task) == "completed"
    assert driver.released == [0]


def test_a_step_after_a_move_waits_for_what_the_move_waits_for() -> None:
    driver = Driver(_plan(_cut(2, 4), run_ahead=1))
    driver.submit("a")
    driver.load(1, _plan(_cut(2), run_ahead=2))
    driver.activate(1)
    assert driver.issued[1].program.plan == 1
    assert driver.issued[1].after == (0,)


@pytest.mark.promise("instances-move-new-plan")
def test_an_instance_whose_cut_is_gone_ends_on_the_old_plan() -> None:
    driver = Driver(_plan(_cut(2)))
    task = driver.submit("a")
    driver.load(1, _plan(_cut(3)))
    driver.activate(1)
    driver.end()
    assert not driver.moves and not driver.released
    driver.end()
    assert driver.outcome(task) == "completed"
    assert [step.program.plan for step in driver.issued] == [0, 0]
    assert driver.released == [0]


def test_an_instance_moves_at_a_later_border() -> None:
    driver = Driver(_plan(_cut(2, 4)))
    driver.submit("a")
    driver.load(1, _plan(_cut(4)))
    driver.activate(1)
    assert not driver.moves
    driver.end_all()
    assert [(step.program.plan, step.members[0].member.block) for step in driver.issued] == [
        (0, 0),
        (0, 1),
        (1, 1),
    ]


@pytest.mark.promise("instances-move-new-plan")
def test_an_instance_moves_only_into_free_slots() -> None:
    """Two replicas stand at one cut, the new plan has one slot there: one moves, the other ends as it was."""
    models = [_cut(3, replicas=2), _cut(name="b")]
    groups = [[Member(0, 0, 0), Member(0, 1, 0)], [Member(0, 0, 1)], [Member(0, 1, 1)], [Member(1, 0, 0)]]
    driver = Driver(plan_of(models, groups, GRAPHS, run_ahead=1))
    for model in "baa":
        driver.submit(model)
    driver.end()
    assert driver.ran()[1] == [(0, 0, 0), (0, 1, 0)]
    driver.load(1, _plan(_cut(3), _cut(name="b")))
    driver.activate(1)
    assert [move.instance for move in driver.moves] == [1]
    driver.end_all()
    assert [driver.outcome(task) for task in driver.answers] == ["completed"] * 3
    assert [step.program.plan for step in driver.issued[2:]] in ([0, 1], [1, 0])


def test_an_instance_moves_with_the_slots_of_its_skips() -> None:
    """Operator 2 reads what operator 0 made. In the new plan that tensor lies in slot 1, which a launched
    instance would overwrite, so slots 1 and 2 are both taken by the one that moves."""
    graphs = {digest(0): graph_of("a", [[0], [1], [1, 2], [3]], outputs=[4])}
    old = plan_of([_cut(2)], [[Member(0, 0, b)] for b in range(2)], graphs, run_ahead=1)
    new = plan_of([_cut(1, 2)], [[Member(0, 0, b)] for b in range(3)], graphs, run_ahead=1)
    driver = Driver(old)
    driver.submit("a")
    driver.submit("a")
    driver.load(1, new)
    driver.activate(1)
    assert [move.instance for move in driver.moves] == [0]
    driver.end_all()
    blocks = [
        (step.program.plan, step.members[0].instance, step.members[0].member.block) for step in driver.issued
    ]
    assert blocks == [(0, 0, 0), (1, 0, 2), (1, 1, 0), (1, 1, 1), (1, 1, 2)]


@pytest.mark.parametrize(
    "change",
    [
        lambda m, r: (replace(m, artifact=digest(1)), r),
        lambda m, r: (m, {**r, "executor": ExecutorOptions(precision="fp16")}),
        lambda m, r: (m, {**r, "executor": ExecutorOptions(name="null")}),
        lambda m, r: (m, {**r, "wait": Wait.ALL}),
    ],
    ids=["artifact", "precision", "executor", "waits"],
)
def test_an_instance_stays_where_its_tensors_would_mean_something_else(change) -> None:  # type: ignore[no-untyped-def]
    driver = Driver(_plan(_cut(2)))
    driver.submit("a")
    model, rules = change(_cut(2), {})
    driver.load(1, _plan(model, **rules))
    driver.activate(1)
    driver.end_all()
    assert not driver.moves
    assert driver.released == [0]


def test_an_instance_moves_only_to_its_own_bucket() -> None:
    driver = Driver(_plan(_cut(3, batch=4, batch_max_delay_us=9)))
    for _ in range(4):
        driver.submit("a")
    driver.load(1, _plan(_cut(3, batch=2)))
    driver.activate(1)
    driver.end_all()
    assert not driver.moves
    assert len(driver.answers) == 4


def test_an_instance_that_has_not_begun_moves_without_data() -> None:
    driver = Driver(_plan(_cut(3)))
    driver.submit("a")
    driver.submit("a")
    driver.load(1, _plan(_cut(2)))
    driver.activate(1)
    driver.end_all()
    assert not driver.moves
    assert [step.program.plan for step in driver.issued] == [0, 0, 1, 1]


def test_queued_tasks_of_a_model_that_is_gone_are_refused() -> None:
    driver = Driver(_plan(_cut(), _cut(name="b")))
    tasks = [driver.submit("b") for _ in range(4)]
    driver.load(1, _plan(_cut()))
    driver.activate(1)
    assert [driver.answers[task].code for task in tasks[2:]] == ["model_removed"] * 2
    driver.end_all()
    assert [driver.outcome(task) for task in tasks[:2]] == ["completed"] * 2
    assert driver.answers[driver.submit("b")].code == "unknown_model"


def test_a_model_that_comes_back_is_served_again() -> None:
    driver = Driver(_plan(_cut(), _cut(name="b")))
    driver.load(1, _plan(_cut()))
    driver.activate(1)
    driver.load(2, _plan(_cut(), _cut(name="b")))
    driver.activate(2)
    task = driver.submit("b")
    driver.end_all()
    assert driver.outcome(task) == "completed"


def test_a_model_that_no_plan_serves_is_forgotten_once_its_last_step_has_ended() -> None:
    driver = Driver(_plan(_cut(), _cut(name="b")))
    task = driver.submit("b")
    driver.load(1, _plan(_cut()))
    driver.activate(1)
    assert [*driver.core.completed()] == ["a", "b"]
    driver.end_all()
    assert driver.outcome(task) == "completed"
    assert [*driver.core.completed()] == [one.name for one in driver.core.snapshot(0.0).models] == ["a"]


def test_a_model_that_a_shared_task_still_names_is_forgotten_when_that_ends() -> None:
    """Its part has ended, and its plan gone, before the other part has."""
    driver = Driver(_plan(_cut(), _cut(name="b")))
    first = driver.submit("a")
    shared = driver.submit("a", "b")
    driver.load(1, _plan(_cut()))
    driver.activate(1)
    driver.end_all()
    assert {driver.outcome(first), driver.outcome(shared)} <= {"completed", "refused"}
    assert [*driver.core.completed()] == ["a"]


def test_models_of_many_plans_that_came_and_went_are_forgotten() -> None:
    """One by one, as the versions of a model do; an engine without room for two plans gives up one first."""
    driver = Driver(_plan(_cut()))
    for key, name in enumerate("bababa", 1):
        driver.submit("ab"[key % 2 == 0])
        driver.do(driver.core.drain(driver.now))
        driver.end_all()
        driver.do(driver.core.unload(PlanKey(key - 1), driver.now))
        driver.load(key, _plan(_cut(name=name)))
        driver.activate(key)
        assert [one.name for one in driver.core.snapshot(0.0).models] == [name]


def test_queued_tasks_are_kept_unless_the_new_model_takes_other_inputs() -> None:
    driver = Driver(chains(1, run_ahead=1))
    tasks = [driver.submit("a") for _ in range(3)]
    other = replace(models_of([1])[0], artifact=digest(7))
    graphs = {digest(7): graph_of("a", [[0, 1]], outputs=[2], inputs=2)}
    driver.load(1, plan_of([other], [[Member(0, 0, 0)]], graphs))
    driver.activate(1)
    assert driver.answers[tasks[2]].code == "model_changed"


@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [(1, 2, "refused"), (2, 1, ""), (1, 1, ""), (1, 0, "")],
)
def test_queued_tasks_are_refused_where_the_new_model_takes_a_smaller_range(
    old: int, new: int, outcome: str
) -> None:
    """Inputs of `old` to 2 elements; the small ones would fail in every step that wants 2."""

    def of_at_least(elements: int, number: int) -> BoundPlan:
        graph = graph_of("a", [[0]], outputs=[1])
        ranges = ShapeRanges(((elements,),) * 2, 8) if elements < 2 else None
        model = replace(models_of([1])[0], artifact=digest(number))
        graphs = {digest(number): replace(graph, ranges=ranges)}
        return plan_of([model], [[Member(0, 0, 0)]], graphs, run_ahead=1)

    driver = Driver(of_at_least(old, 7))
    tasks = [driver.submit("a") for _ in range(3)]
    driver.load(1, of_at_least(new, 8))
    driver.activate(1)
    assert driver.outcome(tasks[2]) == outcome
    if outcome:
        assert driver.answers[tasks[2]].code == "model_changed"


def test_a_smaller_queue_sends_its_losers_away() -> None:
    driver = Driver(chains(1, run_ahead=1))
    tasks = [driver.submit("a") for _ in range(6)]
    models = models_of([1], queue=QueuePlan(max_tasks=2, rule=QueueRule.DROP_OLDEST))
    driver.load(1, with_models(models, run_ahead=1))
    driver.activate(1)
    assert [driver.outcome(task) for task in tasks] == ["", "", "refused", "refused", "", ""]


def test_refuse_newest_keeps_the_oldest_when_the_queue_shrinks() -> None:
    driver = Driver(chains(1, run_ahead=1))
    tasks = [driver.submit("a") for _ in range(6)]
    driver.load(1, with_models(models_of([1], queue=QueuePlan(max_tasks=2)), run_ahead=1))
    driver.activate(1)
    assert [driver.outcome(task) for task in tasks] == ["", "", "", "", "refused", "refused"]


def test_going_back_to_a_plan_that_is_still_draining() -> None:
    driver = Driver(_plan(_cut(2)))
    first = driver.submit("a")
    driver.load(1, _plan(_cut(3)))
    driver.activate(1)
    driver.activate(0)
    assert driver.released == [1]
    driver.end_all()
    assert driver.outcome(first) == "completed"
    assert driver.core.snapshot(0.0).loaded == (0,)


def test_swapping_without_memory_for_two_plans() -> None:
    driver = Driver(_plan(_cut(2)))
    tasks = [driver.submit("a") for _ in range(4)]
    driver.do(driver.core.drain(0.0))
    with pytest.raises(ValueError, match="in use"):
        driver.core.unload(PlanKey(0), 0.0)
    driver.end_all()
    assert driver.core.idle
    driver.do(driver.core.unload(PlanKey(0), 0.0))
    assert driver.released == [0]
    tasks.append(driver.submit("a"))
    driver.load(1, _plan(_cut(3)))
    driver.activate(1)
    driver.end_all()
    assert [driver.outcome(task) for task in tasks] == ["completed"] * 5


def test_a_plan_that_was_never_active_can_be_given_up() -> None:
    driver = Driver(_plan(_cut(2)))
    driver.load(1, _plan(_cut(3)))
    driver.do(driver.core.unload(PlanKey(1), 0.0))
    assert driver.released == [1]
    with pytest.raises(ValueError, match="not loaded"):
        driver.core.activate(PlanKey(1), 0.0)


def test_a_key_cannot_be_loaded_twice() -> None:
    driver = Driver(_plan(_cut(2)))
    with pytest.raises(ValueError, match="loaded already"):
        driver.core.load(PlanKey(0), _plan(_cut(2)), 0.0)


def test_an_old_plan_outlives_a_move_that_reads_it() -> None:
    """No instance is left on the old plan after the move, but its step and its slot are still in use."""
    old, new = _plan(_cut(3), run_ahead=1, lanes=1), _plan(_cut(3), run_ahead=3, lanes=1)
    driver = Driver(old)
    driver.load(1, new)
    driver.submit("a")  # step 0, old plan, block 0
    driver.activate(1)  # moves; step 1 is its block 1 on the new plan
    assert driver.moves[0].after == (0,)
    assert [(s.program.plan, s.members[0].member.block) for s in driver.issued] == [(0, 0), (1, 1)]
    assert not driver.released
    driver.end()
    assert driver.released == [0]


def test_queued_tasks_are_refused_where_the_new_model_gives_other_outputs() -> None:
    driver = Driver(chains(1, run_ahead=1))
    tasks = [driver.submit("a") for _ in range(3)]
    other = replace(models_of([1])[0], artifact=digest(7))
    graphs = {digest(7): graph_of("a", [[0]], outputs=[0, 1], inputs=1)}
    driver.load(1, plan_of([other], [[Member(0, 0, 0)]], graphs))
    driver.activate(1)
    assert driver.answers[tasks[2]].code == "model_changed"


def test_answer_names_the_plan_whose_step_ended_the_task() -> None:
    driver = Driver(chains(1, run_ahead=1))
    old = driver.submit("a")
    driver.load(1, chains(1, run_ahead=1))
    driver.activate(1)
    new = driver.submit("a")
    cancelled = driver.submit("a")
    driver.do(driver.core.cancel(cancelled, driver.now))
    driver.end(error="broken")
    driver.end_all()
    assert [driver.answers[task].plan for task in (old, new, cancelled)] == [0, 1, None]


# -- the windows of a trial ---------------------------------------------------------------------------------


def _switch(driver: Driver, key: int, *, keep: bool) -> None:
    driver.do(driver.core.activate(PlanKey(key), driver.now, keep=keep))


def test_a_kept_plan_stays_loaded_and_can_be_activated_again() -> None:
    driver = Driver(_plan(_cut(3)))
    driver.load(1, _plan(_cut(2)))
    for key in (1, 0, 1):
        driver.do(driver.core.drain(driver.now))
        assert driver.core.idle
        _switch(driver, key, keep=True)
        task = driver.submit("a")
        assert driver.issued[-1].program.plan == key
        driver.end_all()
        assert driver.outcome(task) == "completed"
    assert driver.released == []
    _switch(driver, 0, keep=False)
    assert driver.released == [1], "the loser of the trial frees itself"


def test_a_model_that_a_kept_plan_serves_is_not_forgotten() -> None:
    driver = Driver(_plan(_cut(), _cut(name="b")))
    driver.load(1, _plan(_cut()))
    driver.submit("b")
    driver.end_all()
    _switch(driver, 1, keep=True)
    assert driver.core.completed() == {"a": 0, "b": 1}
    _switch(driver, 1, keep=False)
    driver.do(driver.core.unload(PlanKey(0), driver.now))
    assert driver.core.completed() == {"a": 0}


def test_tasks_wait_through_a_drain_and_run_on_the_plan_that_ends_it() -> None:
    driver = Driver(_plan(_cut(3)))
    driver.load(1, _plan(_cut(2)))
    driver.do(driver.core.drain(driver.now))
    tasks = [driver.submit("a") for _ in range(3)]
    assert driver.issued == []
    _switch(driver, 1, keep=True)
    driver.end_all()
    assert [driver.outcome(task) for task in tasks] == ["completed"] * 3
    assert {step.program.plan for step in driver.issued} == {1}


def test_a_kept_plan_that_is_unloaded_with_something_in_flight_goes_when_it_is_empty() -> None:
    driver = Driver(_plan(_cut(3)))
    driver.load(1, _plan(_cut(2)))
    task = driver.submit("a")
    _switch(driver, 1, keep=True)
    driver.do(driver.core.unload(PlanKey(0), driver.now))
    assert driver.released == []
    driver.end_all()
    assert driver.outcome(task) == "completed"
    assert driver.released == [0]


def test_no_task_is_refused_for_the_smaller_queue_of_a_plan_on_trial() -> None:
    driver = Driver(_plan(_cut(3, queue=QueuePlan(max_tasks=8))))
    driver.load(1, _plan(_cut(2, queue=QueuePlan(max_tasks=1))))
    driver.do(driver.core.drain(driver.now))
    tasks = [driver.submit("a") for _ in range(6)]
    _switch(driver, 1, keep=True)
    driver.end_all()
    assert [driver.outcome(task) for task in tasks] == ["completed"] * 6
    _switch(driver, 1, keep=False)  # it has won: from now on its own bounds hold
    driver.do(driver.core.drain(driver.now))
    tasks = [driver.submit("a") for _ in range(3)]
    assert [driver.outcome(task) for task in tasks[1:]] == ["refused"] * 2


def test_what_a_plan_left_in_flight_ends_first_whichever_plan_was_loaded_first() -> None:
    """A trial goes back to the plan that was loaded first while tasks wait all the time: its next window
    begins once the other plan is empty, and must not wait until each step was passed over long enough."""
    driver = Driver(_plan(_cut(2), max_skips=1000))
    driver.load(1, _plan(_cut(1, 3, 4), max_skips=1000))
    _switch(driver, 1, keep=True)
    task = driver.submit("a")
    for _ in range(20):
        driver.submit("a")
    _switch(driver, 0, keep=True)
    for _ in range(4):
        driver.end()
    assert driver.outcome(task) == "completed" and driver.core.settled
    assert [step.program.plan for step in driver.issued[:5]] == [1, 1, 1, 1, 0]
