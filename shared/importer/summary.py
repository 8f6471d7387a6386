"""Filling in the report of an import from the graph that was built."""

from itertools import pairwise

from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.importer.build import Built, unit_views
from stageloom.shared.importer.cuts import crossing_bytes
from stageloom.shared.importer.operators import critical_path
from stageloom.shared.importer.report import ImportReport, PartitionReport, TensorReport, WholeReport


def report_of(
    built: Built,
    *,
    digest: Digest,
    size: int,
    parameters: int,
    weight_bytes: int,
    opset: int,
    batch_reason: str,
) -> ImportReport:
    """The report of a built graph and the artifact made of it."""
    graph = built.graph
    live = crossing_bytes(graph)
    peak = max(
        live[op] + sum(graph.tensors[t].nbytes for t in operator.outputs)
        for op, operator in enumerate(graph.operators)
    )
    units = [operator.fused_unit for operator in graph.operators]
    return ImportReport(
        digest=digest,
        name=graph.name,
        operators=len(graph.operators),
        paper_operators=len(graph.operators) - built.classifier.bit_count(),
        fused_units=graph.fused_units,
        critical_path=critical_path(unit_views(graph), units),
        gflop=sum(operator.flop for operator in graph.operators) / 1e9,
        parameters=parameters,
        memory_bytes=weight_bytes + peak,
        weight_bytes=weight_bytes,
        activation_bytes=peak,
        base_cuts=graph.base_cuts,
        cut_bytes=tuple(live[cut] for cut in graph.base_cuts),
        partitions=tuple(_partition(name, cuts, built) for name, cuts in graph.partitions),
        opaque=tuple(
            _whole(graph, op, operator.opaque)
            for op, operator in enumerate(graph.operators)
            if operator.opaque
        ),
        joined=tuple(_whole(graph, op, why) for op, why in built.joined.items()),
        inputs=tuple(_tensor(graph, t) for t in graph.inputs),
        outputs=tuple(_tensor(graph, t) for t in graph.outputs),
        batchable=graph.batchable,
        batch_reason=batch_reason,
        size=size,
        opset=opset,
    )


def _partition(name: str, cuts: tuple[int, ...], built: Built) -> PartitionReport:
    edges = (0, *cuts, len(built.graph.operators))
    counts = tuple(
        sum(1 for op in range(first, last) if not built.classifier >> op & 1)
        for first, last in pairwise(edges)
    )
    return PartitionReport(name, cuts, sum(1 for count in counts if count), counts)


def _whole(graph: Graph, op: int, why: str) -> WholeReport:
    operator = graph.operators[op]
    return WholeReport(op, operator.name, operator.kind, len(operator.nodes), why)


def _tensor(graph: Graph, tensor: int) -> TensorReport:
    found = graph.tensors[tensor]
    return TensorReport(found.name, found.dtype, found.shape)
