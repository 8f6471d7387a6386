"""Costs of a plan on a device, with what was measured there of parts of operators.

Parts count in plans that split operators, and in those that run some on a further resource
(`stageloom.shared.search.split_costs`). `plan explain`, predictions, re-plans and trials price a plan by one
table, which is made here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec

from stageloom.planner.costs.measured import device_costs, plan_costs
from stageloom.planner.store.costs import calibration_of
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.machines import whole_times
from stageloom.planner.store.parts import handover_of, part_samples_of, parts_since
from stageloom.planner.store.store import ReadStore
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import DeviceId, Digest, OpId
from stageloom.shared.plan import ExecutorOptions, Plan
from stageloom.shared.schedule import names_resources
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.measured_splits import OperatorNodes, SplitMeasurements, alike, part_samples
from stageloom.shared.search.part_costs import PartCosts


def costs_there(
    store: ReadStore,
    device: DeviceId,
    plan: Plan,
    graphs: Mapping[Digest, Graph],
    *,
    now_us: int = 0,
) -> CostTable:
    """The costs of a plan's executors on a device, with what is known of parts; `now_us` 0: nothing is stale.

    Raises:
        InputError: there is no such device.
    """
    held = store.read(calibration_of, device)
    costs = plan_costs(
        store, held.costs_key, plan, graph_of=store.graph, now_us=now_us, taught_by=held.taught_by
    )
    return with_parts(store, device, costs, [plan], graphs)


def with_parts(
    store: ReadStore,
    device: DeviceId,
    costs: CostTable,
    plans: Sequence[Plan],
    graphs: Mapping[Digest, Graph],
) -> CostTable:
    """The costs on some executors with what is known of parts of the plans' models; see `PartCosts`."""
    models = dict.fromkeys(artifact for plan in plans for artifact in _in_parts(plan))
    if not models or find_spec("onnx") is None:
        return costs

    def known(table: CostTable, options: ExecutorOptions) -> CostTable:
        parts = {
            artifact: part_costs(graphs[artifact], operator_nodes(store, artifact), times)
            for artifact in models
            if (times := split_measurements(store, device, artifact, graphs[artifact], options)) is not None
        }
        return replace(table, parts=parts)

    assert costs.executor is not None  # as `plan_costs` makes it
    beside = {options: known(table, options) for options, table in costs.beside.items()}
    return replace(known(costs, costs.executor), beside=beside)


def _in_parts(plan: Plan) -> Iterable[Digest]:
    """Artifacts of models that are split, or of which some operators run on a further resource."""
    away = {
        member.model for block in plan.combined if names_resources(block.schedule) for member in block.members
    }
    return (model.artifact for at, model in enumerate(plan.models) if model.splits or at in away)


def operator_nodes(store: ReadStore, artifact: Digest) -> OperatorNodes:
    """What the nodes of an artifact's operators do.

    Raises:
        InputError: onnx is not installed, or the artifact's file is not here.
    """
    if find_spec("onnx") is None:
        raise InputError(
            "splitting operators needs onnx, to read what their nodes do",
            remedy="pip install 'stageloom[planner,onnx]'",
        )
    from stageloom.shared.importer.splittable import SplitReader

    return SplitReader(store.load_artifact(artifact))


def split_measurements(
    store: ReadStore, device: DeviceId, artifact: Digest, graph: Graph, options: ExecutorOptions
) -> SplitMeasurements | None:
    """What was measured of a model on an executor; None where some of it was not."""
    device_class = store.read(device_info, device).device_class
    parts = store.read(part_samples_of, device_class, artifact, options)
    handover = store.read(handover_of, device_class, options)
    way = ExecutorOptions(name=options.name, intra_op_threads=options.intra_op_threads)
    session_s = store.read(whole_times, device, [artifact]).get(artifact, {}).get((way, 1))
    if not parts or handover is None or session_s is None or session_s == float("inf"):
        return None
    held = store.read(calibration_of, device)
    # Parts of before a drift compare with operators of before it, which the class has.
    same = not held.own or store.read(parts_since, device, device_class, artifact, options, held.at_us)
    key = held.costs_key if same else device_class
    table = device_costs(store, key, options, [(artifact, 1)], graph_of=store.graph)
    operators = [OpId(op) for op in range(len(graph.operators))]
    if not all(table.is_measured(artifact, op, 1) for op in operators):
        return None  # parts and the whole model are scaled to their sum, which no estimate may be in
    return SplitMeasurements(
        alone_s=tuple(table.operator_s(artifact, graph, op) for op in operators),
        parts=parts,
        session_s=session_s,
        handover_s=handover.seconds,
        copy_bytes_per_s=handover.copy_bytes_per_s,
    )


def part_costs(graph: Graph, nodes: OperatorNodes, times: SplitMeasurements) -> PartCosts:
    """What was measured, relative to the operators themselves."""
    axes = [nodes.axes(op) for op in range(len(graph.operators))]
    ratio = times.session_s / sum(times.alone_s)
    return PartCosts(
        samples_s=part_samples(axes, alike(graph, nodes), times.parts),
        border=max(1.0 / ratio - 1.0, 0.0),
        handover_s=times.handover_s,
        copy_bytes_per_s=times.copy_bytes_per_s,
    )
