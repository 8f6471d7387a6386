"""A plan without one of its parts, so that each part's worth can be measured."""

from dataclasses import replace

from stageloom.shared.plan import ExecutorOptions, Plan, QueuePlan, QueueRule, StepChoice
from stageloom.shared.search.arrangements import computing_lanes, express_of, unpinned


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
        found["without_openvino"] = _in_onnxruntime(plan)
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


def _in_onnxruntime(plan: Plan) -> Plan:
    """Each block keeps its threads: without those of a wide lane the ablation would be of two parts."""
    run_by = [
        ExecutorOptions(name="onnx", intra_op_threads=plan.executors[block.executor].intra_op_threads)
        for block in plan.combined
    ]
    options = list(dict.fromkeys(run_by))
    combined = tuple(
        replace(block, executor=options.index(one)) for block, one in zip(plan.combined, run_by, strict=True)
    )
    return replace(plan, combined=combined, executor=options[0], further_executors=tuple(options[1:]))
