"""Build the graph of a normalised ONNX model: operators, tensors, base cuts, partitions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx

from stageloom.shared.bitmask import bits, mask_of
from stageloom.shared.errors import ModelError
from stageloom.shared.graph import (
    MAX_SIGNATURE_CHARS,
    MAX_SIGNATURE_RANK,
    Graph,
    Operator,
    Tensor,
    graph_problem,
)
from stageloom.shared.ids import TensorId
from stageloom.shared.importer.attributes import attributes_of, convolution_of, node_flop
from stageloom.shared.importer.cuts import MAX_PAPER_CUTS, METADATA_KEY, Borders, base_cuts
from stageloom.shared.importer.nodes import captured_names, opaque_reason
from stageloom.shared.importer.operators import Group, NodeView, UnitView, form_operators, fused_units
from stageloom.shared.importer.values import UNKNOWN, Value, own_size, stored_size, weight_value

PAPER = "paper"


@dataclass(frozen=True)
class Built:
    """A graph, and what the import reports of its operators."""

    graph: Graph
    classifier: int  # mask of the operators that the papers' counts leave out
    joined: Mapping[int, str]  # by operator: why its nodes cannot be cut apart, though it is not opaque


def build_graph(model: onnx.ModelProto, values: Mapping[str, Value], borders: Borders | None) -> Built:
    """Build the graph of a normalised model; `values` holds its run-time values.

    Raises:
        ModelError: an output cannot be produced as a plain tensor, an input or output cannot be told to
            applications, or the borders do not fit the graph.
    """
    weights = {weight.name: weight for weight in model.graph.initializer}
    outputs = [output.name for output in model.graph.output]
    for output in model.graph.output:
        if why := values.get(output.name, UNKNOWN).unfit:
            raise ModelError(
                f"unsupported: output {output.name[:80]!r}: {why}", remedy=_remedy_of_output(output, model)
            )
    nodes = [_view(node, weights) for node in model.graph.node]
    unfit: dict[str, str] = {}
    joined: dict[str, str] = {}
    for name in (name for node in nodes for name in node.makes):
        value = values.get(name, UNKNOWN)
        if value.unfit:
            (unfit if value.opaque else joined)[name] = value.unfit
    groups = form_operators(nodes, outputs=outputs, unfit=unfit, joined=joined)
    if not groups:
        raise ModelError(
            "unsupported: the model computes nothing", remedy="export a model of at least one operator"
        )
    levels, classifier_nodes = _place_borders(groups, nodes, borders)
    order = sorted(range(len(groups)), key=lambda g: levels[g])  # stable, so still topological
    groups = [groups[g] for g in order]
    graph = _assemble(model, groups, nodes, values, weights)
    paper = _paper_cuts([levels[g] for g in order])
    cuts = base_cuts(graph, paper)
    partitions = [("whole", ()), ("base", cuts)]
    if paper:
        partitions.append((PAPER, paper))
    graph = replace(graph, base_cuts=cuts, partitions=tuple(partitions))
    if problem := graph_problem(graph):
        raise ModelError(f"the importer made a broken graph: {problem}", remedy="report this model")
    _require_signature(graph)
    classifier = mask_of(i for i, g in enumerate(order) if classifier_nodes >> g & 1)
    return Built(graph, classifier, {i: group.joined for i, group in enumerate(groups) if group.joined})


def _require_signature(graph: Graph) -> None:
    """Raises:
    ModelError: applications cannot be told an input or output.
    """
    for what, numbers in (("input", graph.inputs), ("output", graph.outputs)):
        for tensor in (graph.tensors[number] for number in numbers):
            chars, rank = len(tensor.name), len(tensor.shape)
            if chars > MAX_SIGNATURE_CHARS or rank > MAX_SIGNATURE_RANK:
                raise ModelError(
                    f"unsupported: {what} {tensor.name[:80]!r} has {rank} dimensions and a name of {chars} "
                    f"characters, at most {MAX_SIGNATURE_RANK} and {MAX_SIGNATURE_CHARS} are served",
                    remedy="export the model with a shorter name, or with the tensor reshaped",
                )


def _remedy_of_output(output: onnx.ValueInfoProto, model: onnx.ModelProto) -> str:
    labels = output.type.tensor_type.elem_type == onnx.TensorProto.STRING
    remedies = ["train or convert the model with integer labels, or remove that output"] if labels else []
    zipped = {name for node in model.graph.node if node.op_type == "ZipMap" for name in node.output}
    # Converters of scikit-learn's classifiers end so, unless told otherwise.
    if output.name in zipped or (labels and zipped):
        remedies.append(
            "convert the classifier with options={'zipmap': False} (skl2onnx) or zipmap=False (onnxmltools), "
            "which makes the probabilities one tensor"
        )
    return "; ".join(remedies) or "export the model so that its outputs are tensors of fixed shape"


def _view(node: onnx.NodeProto, weights: Mapping[str, object]) -> NodeView:
    reads = dict.fromkeys(
        name for name in (*node.input, *captured_names(node)) if name and name not in weights
    )
    return NodeView(
        node.op_type, tuple(reads), tuple(name for name in node.output if name), opaque_reason(node)
    )


def _ancestors(groups: Sequence[Group], nodes: Sequence[NodeView]) -> tuple[dict[str, int], list[int]]:
    """Return the group that makes each value, and per group the mask of itself and its ancestors."""
    maker = {name: g for g, group in enumerate(groups) for i in group.nodes for name in nodes[i].makes}
    reach: list[int] = []
    for g, group in enumerate(groups):
        mask = 1 << g
        for i in group.nodes:
            for read in nodes[i].reads:
                if read in maker and maker[read] != g:
                    mask |= reach[maker[read]]
        reach.append(mask)
    return maker, reach


def _place_borders(
    groups: Sequence[Group], nodes: Sequence[NodeView], borders: Borders | None
) -> tuple[list[int], int]:
    """Return per group the number of borders before it, and the mask of the classifier's groups."""
    levels = [0] * len(groups)
    if borders is None:
        return levels, 0
    inner, body = borders
    if len(inner) > MAX_PAPER_CUTS:
        raise _bad_borders(f"names {len(inner)} borders, at most {MAX_PAPER_CUTS} are used")
    maker, reach = _ancestors(groups, nodes)
    everything = (1 << len(groups)) - 1

    def needed_for(names: Sequence[str]) -> int:
        mask = 0
        for name in names:
            if name not in maker:
                raise _bad_borders(f"names the tensor {name[:80]!r}, which no operator of the graph makes")
            mask |= reach[maker[name]]
        return mask

    before = 0
    for border in inner:
        inside = needed_for(border)
        if before & ~inside:
            raise _bad_borders("has borders that do not hold the one before")
        before = inside
        for g in bits(everything & ~inside):
            levels[g] += 1
    return levels, everything & ~needed_for(body) if body else 0


def _bad_borders(why: str) -> ModelError:
    return ModelError(f"metadata {METADATA_KEY!r} {why}", remedy="correct or remove that entry")


def _paper_cuts(levels: Sequence[int]) -> tuple[int, ...]:
    """Return the positions of the borders among operators sorted by level."""
    return tuple(p for p in range(1, len(levels)) if levels[p] > levels[p - 1])


def _assemble(
    model: onnx.ModelProto,
    groups: Sequence[Group],
    nodes: Sequence[NodeView],
    values: Mapping[str, Value],
    weights: Mapping[str, onnx.TensorProto],
) -> Graph:
    tensors: list[Tensor] = []
    ids: dict[str, TensorId] = {}

    def add(name: str) -> TensorId:
        if name not in ids:
            value = values[name]
            ids[name] = TensorId(len(tensors))
            tensors.append(Tensor(name, value.dtype, value.shape))
        return ids[name]

    inputs = tuple(add(value.name) for value in model.graph.input)
    wanted = {output.name for output in model.graph.output}
    readers: dict[str, set[int]] = {}
    for g, group in enumerate(groups):
        for i in group.nodes:
            for name in nodes[i].reads:
                readers.setdefault(name, set()).add(g)

    def shape_of(name: str) -> tuple[int, ...]:
        return weight_value(weights[name]).shape if name in weights else values.get(name, UNKNOWN).shape

    operators = []
    for g, group in enumerate(groups):
        made = [name for i in group.nodes for name in nodes[i].makes]
        own = set(made)
        reads = dict.fromkeys(r for i in group.nodes for r in nodes[i].reads if r not in own)
        lead = model.graph.node[group.lead]
        inputs_read = tuple(dict.fromkeys(add(name) for name in reads))
        outputs_made = tuple(add(n) for n in made if n in wanted or readers.get(n, set()) - {g})
        convolution = None
        own_nodes = [model.graph.node[i] for i in group.nodes]
        if not group.opaque and len(inputs_read) == len(outputs_made) == 1:
            convolution = convolution_of(own_nodes, tensors[outputs_made[0]].name, values, weights)
        operators.append(
            Operator(
                kind=lead.op_type,
                name=lead.name,
                nodes=group.nodes,
                inputs=inputs_read,
                outputs=outputs_made,
                flop=sum(node_flop(node, shape_of) for node in own_nodes),
                weight_bytes=_weight_bytes(own_nodes, weights),
                fused_unit=g,
                opaque=group.opaque,
                convolution=convolution,
                attributes=attributes_of(own_nodes, lead, weights),
            )
        )
    graph = Graph(
        name=model.graph.name,
        tensors=tuple(tensors),
        operators=tuple(operators),
        inputs=inputs,
        outputs=tuple(add(output.name) for output in model.graph.output),
    )
    units = fused_units(unit_views(graph))
    return replace(
        graph,
        operators=tuple(replace(o, fused_unit=unit) for o, unit in zip(graph.operators, units, strict=True)),
    )


def _weight_bytes(nodes: Sequence[onnx.NodeProto], weights: Mapping[str, onnx.TensorProto]) -> int:
    names = {name for node in nodes for name in (*node.input, *captured_names(node)) if name in weights}
    stored = (*(stored_size(weights[name]) for name in names), *map(own_size, nodes))
    return sum(nbytes for _, nbytes in stored)


def unit_views(graph: Graph) -> list[UnitView]:
    """Return the view of each operator that counting fused units needs."""
    outputs = set(graph.outputs)
    return [
        UnitView(
            kind=operator.kind,
            before=tuple(sorted({graph.producer[t] for t in operator.inputs} - {-1})),
            readers=len({reader for t in operator.outputs for reader in graph.consumers[t]}),
            is_output=not outputs.isdisjoint(operator.outputs),
            opaque=bool(operator.opaque),
        )
        for operator in graph.operators
    ]
