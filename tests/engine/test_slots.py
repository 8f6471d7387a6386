"""Slots in logical time: who may move when, what a step waits for, what is staged."""

from stageloom.shared.plan import CombinedBlock, Member, ModelPlan
from tests.engine.driver import Driver
from tests.engine.generate import digest, graph_of, plan_of
from tests.engine.plans import chains


def test_run_ahead_bounds_the_steps_in_flight_of_a_lane() -> None:
    for run_ahead in (1, 2, 3):
        driver = Driver(chains(5, run_ahead=run_ahead))
        driver.submit("a")
        assert len(driver.steps) == run_ahead
        driver.end_all()
        assert len(driver.issued) == 5


def test_a_step_waits_for_the_step_that_made_its_input() -> None:
    driver = Driver(chains(3, run_ahead=3))
    driver.submit("a")
    assert [step.after for step in driver.issued] == [(), (0,), (1,)]


def test_a_step_that_ended_is_not_waited_for() -> None:
    driver = Driver(chains(2, run_ahead=1))
    driver.submit("a")
    driver.end()
    assert driver.issued[1].after == ()


def test_a_slot_is_overwritten_after_its_reader() -> None:
    """Two blocks, run-ahead 3: the second instance's block 0 overwrites slot 1, which step 1 reads."""
    driver = Driver(chains(2, run_ahead=3))
    driver.submit("a")
    driver.submit("a")
    # Step 2 is the second instance's block 0: slot 0 was read by step 0, slot 1 by step 1.
    assert driver.ran() == [[(0, 0, 0)], [(0, 0, 1)], [(0, 0, 0)]]
    assert driver.issued[2].after == (0, 1)


def test_a_block_does_not_run_while_its_next_slot_is_held() -> None:
    """The only lane is full with the first instance's blocks, the second one follows block by block."""
    groups = [[(0, 0, 0)], [(0, 0, 1), (1, 0, 0)]]
    driver = Driver(chains(2, 1, groups=groups, run_ahead=1))
    driver.submit("a")
    driver.submit("a")
    assert driver.ran() == [[(0, 0, 0)]]
    driver.end()
    # Slot 1 is held, so the second instance waits; combined block 1 runs at a ratio of one half.
    assert driver.ran()[1] == [(0, 0, 1)]
    driver.end()
    assert driver.ran()[2] == [(0, 0, 0)]


def test_a_chain_inside_one_mask_moves_together_and_is_staged() -> None:
    """Three blocks of one model in one combined block: a pipeline of three instances in one step."""
    driver = Driver(chains(3, groups=[[(0, 0, 0), (0, 0, 1), (0, 0, 2)]], run_ahead=1))
    for _ in range(4):
        driver.submit("a")
    driver.end()
    driver.end()
    step = driver.issued[2]
    assert [m.member.block for m in step.members] == [2, 1, 0], "downstream first"
    assert [m.instance for m in step.members] == [0, 1, 2]
    assert [m.staged for m in step.members] == [False, True, True]
    assert [m.last for m in step.members] == [True, False, False]


def test_the_first_step_of_a_pipeline_is_written_in_place() -> None:
    driver = Driver(chains(3, groups=[[(0, 0, 0), (0, 0, 1), (0, 0, 2)]], run_ahead=1))
    driver.submit("a")
    assert [m.staged for m in driver.issued[0].members] == [False]


def test_a_tensor_that_skips_a_block_keeps_its_slot_until_its_last_reader() -> None:
    """Operator 2 reads what operator 0 made: slot 1 stays held while block 1 has run but block 2 has not."""
    artifact = digest(0)
    graphs = {artifact: graph_of("a", [[0], [1], [1, 2]], outputs=[3])}
    models = [ModelPlan(name="a", artifact=artifact, cuts=(1, 2))]
    bound = plan_of(models, [[Member(0, 0, b)] for b in range(3)], graphs, run_ahead=1)
    assert bound.models[0].slot_readers == (0, 2, 2)
    driver = Driver(bound)
    driver.submit("a")
    driver.submit("a")
    driver.end_all()
    assert driver.ran() == [[(0, 0, b)] for b in (0, 1, 2, 0, 1, 2)]


def test_a_reader_of_an_earlier_slot_waits_for_what_made_it() -> None:
    artifact = digest(0)
    graphs = {artifact: graph_of("a", [[0], [0], [1, 2]], outputs=[3])}
    models = [ModelPlan(name="a", artifact=artifact, cuts=(1, 2))]
    bound = plan_of(models, [[Member(0, 0, b)] for b in range(3)], graphs, run_ahead=3)
    driver = Driver(bound)
    driver.submit("a")
    # Block 1 reads only the graph's input in slot 0, which step 0 filled; block 2 reads slots 1 and 2.
    assert [step.after for step in driver.issued] == [(), (0,), (0, 1)]


def test_lanes_overlap_different_combined_blocks_only() -> None:
    driver = Driver(chains(1, 1, 1, groups=[[(0, 0, 0), (1, 0, 0)], [(2, 0, 0)]], lanes=2, run_ahead=1))
    driver.submit("a")
    driver.submit("b")  # its combined block is in lane 0, which is full
    driver.submit("c")
    assert [(step.lane, step.program.combined) for step in driver.steps] == [(0, 0), (1, 1)]


def test_an_idle_lane_is_filled_before_another_runs_ahead() -> None:
    driver = Driver(chains(1, 1, lanes=2, run_ahead=2))
    driver.submit("a")
    driver.submit("b")
    assert [step.lane for step in driver.steps] == [0, 1]


def test_replicas_run_one_model_several_times_at_once() -> None:
    driver = Driver(chains(1, groups=[[(0, 0, 0), (0, 1, 0)]], fields={"replicas": 2}, run_ahead=1))
    for _ in range(3):
        driver.submit("a")
    driver.end_all()
    assert driver.ran() == [[(0, 0, 0)], [(0, 0, 0), (0, 1, 0)]]


def test_members_of_a_combined_block_are_named_in_the_program() -> None:
    bound = chains(1, 1, groups=[[(0, 0, 0), (1, 0, 0)]])
    assert isinstance(bound.plan.combined[0], CombinedBlock)
    driver = Driver(bound)
    driver.submit("b")
    assert driver.issued[0].program.mask == 0b10
    assert driver.issued[0].program.buckets == (1,)
