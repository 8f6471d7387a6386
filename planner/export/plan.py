"""The files of a plan's export, from what the store has."""

import json

from stageloom.planner.costs.measured_parts import costs_there
from stageloom.planner.export.dot import dot_text
from stageloom.planner.export.ort_partition import partition
from stageloom.planner.export.perfetto import chrome_trace
from stageloom.planner.replan.predict import block_costs
from stageloom.planner.schema.plan import ExportedFile, ExportFormat, PlanExport
from stageloom.planner.store.costs import calibration_of
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.store import ReadStore
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.ids import DeviceId
from stageloom.shared.plan import decode_plan
from stageloom.shared.search.costs import CostTable


def export_plan(store: ReadStore, name: str, form: ExportFormat, device: DeviceId | None) -> PlanExport:
    """A plan in another tool's format. `device`: whose costs a timeline takes; None: estimates.

    Raises:
        InputError: there is no such plan or device, an artifact of the plan is not here any more, or the
            format cannot say what the plan does.
    """
    info = store.read(plan_info, name)
    plan = decode_plan(info.wire, info.digest)
    bound = bind(plan, {model.artifact: store.graph(model.artifact) for model in plan.models})
    if form is ExportFormat.DOT:
        files = [ExportedFile(name=f"{info.plan}.dot", text=dot_text(bound, info.plan))]
    elif form is ExportFormat.PERFETTO:
        files = [
            ExportedFile(name=f"{info.plan}.trace.json", text=_timeline(store, bound, info.plan, device))
        ]
    else:
        files = [
            ExportedFile(
                name=f"{model.name}.partition.json",
                text=_json(partition(bound, at, _node_names(store.load_artifact(model.artifact)))),
            )
            for at, model in enumerate(plan.models)
        ]
    return PlanExport(plan=info.plan, digest=info.digest, format=form, files=tuple(files))


def _timeline(store: ReadStore, bound: BoundPlan, name: str, device: DeviceId | None) -> str:
    table, known = CostTable(), "estimated"
    if device is not None:
        graphs = {model.plan.artifact: model.source for model in bound.models}
        table = costs_there(store, device, bound.plan, graphs)
        held = store.read(calibration_of, device)
        if any(one.measured_s for one in (table, *table.beside.values())):
            known = f"of {device if held.own else held.device_class}"
    costs = [block_costs(bound, index, table) for index in range(len(bound.combined))]
    return _json(chrome_trace(bound, costs, name, known))


def _node_names(artifact: Artifact) -> list[str]:
    import onnx

    return [node.name for node in onnx.load_model_from_string(artifact.onnx_bytes()).graph.node]


def _json(document: object) -> str:
    return json.dumps(document, indent=1) + "\n"
