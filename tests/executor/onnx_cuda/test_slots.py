"""What holds for every executor, and for those with static buffers, holds for this one: the same tests."""

from collections.abc import Iterator

import pytest

from stageloom.edge_agent.executor.onnx_cuda.executor import OnnxCudaExecutor
from tests.executor.onnx_cuda.simulated import simulated
from tests.executor.test_every_executor import (
    test_an_instance_that_is_dropped_leaves_nothing_behind,
    test_outputs_leave_with_the_last_block_and_only_then,
    test_tracing_times_every_item_of_the_launch_list,
)
from tests.executor.torch.test_executor import (
    test_a_failed_step_breaks_its_instance_and_nothing_else,
    test_an_instance_goes_on_in_another_plan_after_a_move,
    test_blocks_of_one_replica_in_one_step_do_not_overwrite_what_the_other_reads,
    test_every_mask_of_a_combined_block_and_every_bucket,
    test_every_model_under_random_schedules,
    test_lanes_overlap_and_share_no_memory,
    test_operators_are_timed_one_by_one,
    test_outputs_are_not_overwritten_by_the_next_step,
    test_random_schedules_equal_the_whole_models,
    test_steps_issued_ahead_keep_their_order,
)

__all__ = [
    "test_a_failed_step_breaks_its_instance_and_nothing_else",
    "test_an_instance_goes_on_in_another_plan_after_a_move",
    "test_an_instance_that_is_dropped_leaves_nothing_behind",
    "test_blocks_of_one_replica_in_one_step_do_not_overwrite_what_the_other_reads",
    "test_every_mask_of_a_combined_block_and_every_bucket",
    "test_every_model_under_random_schedules",
    "test_lanes_overlap_and_share_no_memory",
    "test_operators_are_timed_one_by_one",
    "test_outputs_are_not_overwritten_by_the_next_step",
    "test_outputs_leave_with_the_last_block_and_only_then",
    "test_random_schedules_equal_the_whole_models",
    "test_steps_issued_ahead_keep_their_order",
    "test_tracing_times_every_item_of_the_launch_list",
]


@pytest.fixture
def executor() -> Iterator[OnnxCudaExecutor]:
    """On a fresh simulated device."""
    made = simulated()
    yield made
    made.close()
