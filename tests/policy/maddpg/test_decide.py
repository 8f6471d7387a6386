"""From samples to a plan."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from stageloom.shared.blocks import combine, split
from stageloom.shared.errors import InputError
from stageloom.shared.plan import ExecutorOptions, Plan, Resource, StepChoice, Wait
from stageloom.shared.policy.maddpg.actions import actions_of
from stageloom.shared.policy.maddpg.decide import Blocks, decide, replanned
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.policy.plain import Load
from stageloom.shared.policy.queues import PolicySample
from stageloom.shared.schedule import Stage, StageSchedule, stage_schedule
from stageloom.shared.search.compose import ModelChoice, compose
from tests.policy.maddpg.cases import saying
from tests.search.graphs import CHAIN, DIAMOND, model

LEFT, RIGHT = model("left", DIAMOND, cuts=[1, 3]), model("right", CHAIN, cuts=[2])
GRAPHS = dict([LEFT, RIGHT])
PLAN = compose(
    [
        ModelChoice(name="left", artifact=LEFT[0], graph=LEFT[1], partition="base"),
        ModelChoice(name="right", artifact=RIGHT[0], graph=RIGHT[1], partition="base", batch=2),
    ]
)
SPACE = Space.of(PLAN, "toy")
TOGETHER = ((SPACE.members[0], SPACE.members[3]), (SPACE.members[1],), (SPACE.members[2], SPACE.members[4]))
LOADS = (
    Load(model="right", arrivals_per_s=100.0, service_s=0.001, queued=0),
    Load(model="left", arrivals_per_s=10.0, service_s=0.004, queued=0),
)
SAMPLES = (PolicySample(((1, 0, 0), (0, 1)), (0.1, -0.1)),)

POLICY = saying(SPACE, (0.5, 0.5, *actions_of(SPACE, TOGETHER)))


def test_the_plan_has_the_policys_blocks_and_intervals_and_all_else_of_the_incumbent() -> None:
    made = replanned(SPACE, POLICY, {}, PLAN, "toy", GRAPHS, SAMPLES, LOADS)
    assert [block.members for block in made.combined] == list(TOGETHER)
    intervals = [one.launch_interval_us for one in made.models]
    assert intervals == [int(1e6 * (0.004 * 0.1 / 1.05) ** 0.5), int(1e6 * (0.001 * 0.01 / 1.05) ** 0.5)]
    back = tuple(replace(one, launch_interval_us=0) for one in made.models)
    assert replace(made, models=back, combined=PLAN.combined) == PLAN


def test_a_plan_that_goes_by_deadlines_gets_the_policys_blocks_and_no_intervals() -> None:
    ordered = replace(PLAN, step_choice=StepChoice.DEADLINE)
    made = replanned(SPACE, POLICY, {}, ordered, "toy", GRAPHS, SAMPLES, LOADS)
    assert [block.members for block in made.combined] == list(TOGETHER)
    assert replace(made, combined=ordered.combined) == ordered


def test_schedules_come_from_the_book_and_are_sequential_where_it_has_none() -> None:
    blocks = Blocks(PLAN.models, GRAPHS)
    parts = [(graph, split(graph, graph.base_cuts)[block]) for (_, graph), block in ((LEFT, 2), (RIGHT, 1))]
    assert combine(parts).size == 2
    side_by_side = stage_schedule([[[0], [1]]])
    book = {blocks.key(TOGETHER[2]): side_by_side}
    made = replanned(SPACE, POLICY, book, PLAN, "toy", GRAPHS, SAMPLES, LOADS)
    assert made.combined[2].schedule == side_by_side
    assert made.combined[0].schedule == stage_schedule([[[0]], [[1]], [[2]]])


def test_blocks_of_equal_operators_share_a_schedule_whatever_their_models_are_called() -> None:
    renamed = tuple(replace(one, name=one.name + "2") for one in PLAN.models)
    assert Blocks(PLAN.models, GRAPHS).key(TOGETHER[0]) == Blocks(renamed, GRAPHS).key(TOGETHER[0])
    assert Blocks(PLAN.models, GRAPHS).key(TOGETHER[0])[1] == 2  # the larger batch
    assert Blocks(PLAN.models, GRAPHS).key(TOGETHER[1])[1] == 1


def _other(number: int, **changes: object) -> Callable[[Plan], Plan]:
    def changed(plan: Plan) -> Plan:
        models = list(plan.models)
        models[number] = replace(models[number], **changes)  # type: ignore[arg-type]
        return replace(plan, models=tuple(models))

    return changed


def _with_more(plan: Plan) -> Plan:
    """Another executor and a resource, which no block names."""
    return replace(
        plan,
        further_executors=(ExecutorOptions(name="openvino"),),
        resources=(Resource(cores=(0,)),),
        lane_resources=(0,),
    )


def _first(plan: Plan, **changes: object) -> Plan:
    """The plan with changes to its first block."""
    first, *others = plan.combined
    return replace(plan, combined=(replace(first, **changes), *others))  # type: ignore[arg-type]


@pytest.mark.promise("policy-refuses-was-trained")
@pytest.mark.parametrize(
    ("change", "device_class", "why"),
    [
        (lambda plan: plan, "nano", "device class 'toy', not 'nano'"),
        (lambda plan: replace(plan, models=plan.models[:1]), "toy", "2 models, the plan has 1"),
        (lambda plan: replace(plan, models=plan.models[::-1]), "toy", r"model 1 \(right\) is artifact"),
        (_other(0, cuts=(1,)), "toy", r"model 1 \(left\) is cut at 1, it was trained for 1,3"),
        (_other(0, cuts=()), "toy", "cut at no cut"),
        (_other(1, batch=4), "toy", "in batches of 4, it was trained for 2"),
        (_other(1, replicas=2), "toy", "2 replicas, it was trained for 1"),
        (lambda plan: replace(plan, wait=Wait.ALL), "toy", "waits"),
        (lambda plan: _first(_with_more(plan), executor=1), "toy", "runs on openvino, others on onnx"),
        (lambda plan: _first(_with_more(plan), resources=(0,)), "toy", "bound to resources"),
        (
            lambda plan: _first(_with_more(plan), schedule=StageSchedule((Stage(((0,),), resources=(0,)),))),
            "toy",
            "bound to resources",
        ),
    ],
)
def test_a_policy_refuses_what_it_was_not_trained_for_and_says_why(
    change: Callable[[Plan], Plan], device_class: str, why: str
) -> None:
    with pytest.raises(InputError, match=why):
        replanned(SPACE, POLICY, {}, change(PLAN), device_class, GRAPHS, SAMPLES, LOADS)


def test_names_queues_and_executors_are_no_business_of_the_policy() -> None:
    other = replace(PLAN, models=tuple(replace(one, name=one.name + "2", weight=3) for one in PLAN.models))
    assert SPACE.refusal(other, "toy") == ""
    assert SPACE.refusal(_with_more(PLAN), "toy") == "", "lanes keep their cores whatever is combined"


def test_launcher_actions_are_read_in_the_models_order() -> None:
    ordered = (LOADS[1], LOADS[0])
    _, intervals_us = decide(
        SPACE, saying(SPACE, (0.01, 0.99, *actions_of(SPACE, TOGETHER))), SAMPLES, ordered
    )
    assert intervals_us[0] == pytest.approx(4000 * (0.1 / 1.05 / 0.004) ** 0.01, rel=1e-3)
    assert intervals_us[1] == pytest.approx(1000 * (0.01 / 1.05 / 0.001) ** 0.99, rel=1e-3)
