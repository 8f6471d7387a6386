"""What the figures of the paper's shapes are made of."""

from pathlib import Path

import pytest

from benchmarks.learning.pair import judged
from benchmarks.shapes import OVERLOAD, best_combination, draw, problem_of, shape_of, with_batch
from stageloom.planner.tournament.evaluator import EvaluationSettings
from stageloom.planner.twin.device_file import load_device
from stageloom.shared.schedule import StageSchedule
from tests.search.test_rivals import LEFT, RIGHT, choice

BOTH = [choice(LEFT, partition="base"), choice(RIGHT, partition="base")]
COURSE = EvaluationSettings(seeds=(1,), warm_up_s=0.1, window_s=0.2, windows=1)


def test_a_batch_is_the_same_graph_with_more_rows_and_more_work() -> None:
    _, graph = LEFT
    of_four = with_batch(graph, 4)
    assert [one.flop for one in of_four.operators] == [4 * one.flop for one in graph.operators]
    assert [one.nbytes for one in of_four.tensors] == [4 * one.nbytes for one in graph.tensors]
    assert [one.weight_bytes for one in of_four.operators] == [one.weight_bytes for one in graph.operators]


def test_the_load_is_more_than_the_device_serves_in_turn() -> None:
    problem = problem_of(load_device("nano"), BOTH, members_max=1)
    needed = sum(rate * one_s for rate, one_s in zip(problem.arrivals_per_s, problem.service_s, strict=True))
    assert needed == pytest.approx(OVERLOAD)


def test_the_best_combination_is_no_worse_than_every_block_alone() -> None:
    problem = problem_of(load_device("a100"), BOTH, members_max=2)
    _, plan, worth = best_combination(problem, COURSE)
    assert worth.throughput_per_s >= judged(problem, problem.template, COURSE).throughput_per_s
    shape = shape_of(plan)
    stages = [
        stage
        for block in plan.combined
        if isinstance(block.schedule, StageSchedule)
        for stage in block.schedule.stages
    ]
    assert shape.stages == len(stages)
    assert shape.streams == max(len(stage.groups) for stage in stages)


def test_equal_rows_are_drawn_as_equal_bytes_with_the_claim(tmp_path: Path) -> None:
    rows = [{"batch": batch, "images_per_s": 10.0 * batch, "utilisation": 0.5} for batch in (1, 4)]
    first = draw(26, "it rises", rows, tmp_path / "a").read_bytes()
    assert first == draw(26, "it rises", rows, tmp_path / "b").read_bytes()
    assert b"it rises" in first
