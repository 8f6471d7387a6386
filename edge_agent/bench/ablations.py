"""A plan without one of its parts, so that each part's worth can be measured."""

from collections.abc import Mapping
from dataclasses import replace

from stageloom.shared.plan import (
    CombinedBlock,
    ExecutorOptions,
    ModelPlan,
    Plan,
    QueuePlan,
    QueueRule,
    StepChoice,
)
from stageloom.shared.search.arrangements import computing_lanes, express_of, unpinned


def with_executors(plan: Plan, executors: Mapping[str, str]) -> Plan:
    """The same plan with each model's blocks in the executor that is named for it, on one thread."""
    names = sorted(set(executors.values()))
    combined = tuple(
        replace(block, executor=names.index(executors[_model_of(plan, block).name]))
        for block in plan.combined
    )
    first, *further = (ExecutorOptions(name=name) for name in names)
    return replace(plan, combined=combined, executor=first, further_executors=tuple(further))


def ablations(plan: Plan) -> dict[str, Plan]:
    """The plan without its pinning, its express lane, OpenVINO, and with tasks in the order of their arrival.

    What the plan does not have is left out.
    """
    found = {}
    express = express_of(plan)
    if any(one.cores for one in plan.resources):
        found["unpinned"] = unpinned(plan)
    if express:
        found["without_express"] = _without_express(plan)
    if any(executor.name == "openvino" for executor in plan.executors):
        onnx = {model.name: "onnx" for model in plan.models}
        found["without_openvino"] = with_executors(plan, onnx)
    if plan.step_choice is StepChoice.DEADLINE:
        models = tuple(replace(model, queue=QueuePlan(rule=QueueRule.DROP_OLDEST)) for model in plan.models)
        found["arrival_order"] = replace(plan, step_choice=StepChoice.RATIO, models=models)
    return found


def _without_express(plan: Plan) -> Plan:
    """Of `auto`: its express lane is the last, and each block is a combined one."""
    lanes, express = computing_lanes(plan), express_of(plan)
    blocks = [
        replace(combined, members=(member._replace(replica=replica),), resources=())
        for combined in plan.combined
        for member in combined.members
        for replica in (range(lanes) if member.model in express else (member.replica,))
    ]
    return replace(
        plan,
        models=tuple(replace(model, replicas=lanes) for model in plan.models),
        combined=tuple(sorted(blocks, key=lambda block: block.members)),
        lanes=lanes,
        resources=plan.resources[:lanes],
        lane_resources=plan.lane_resources[:lanes],
    )


def _model_of(plan: Plan, block: CombinedBlock) -> ModelPlan:
    return plan.models[block.members[0].model]
