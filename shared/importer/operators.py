"""Group nodes into operators, as the papers count them, and number the operators. Pure.

The rule, applied to the normalised graph in this order:

1. A *weighted* node (convolution, matrix product, normalisation, recurrence) leads an operator and carries
   its pointwise tail: activations, arithmetic with constants and patterns such as x * sigmoid(x), as long as
   every run-time value the tail reads comes from the operator itself and nothing else reads what lies
   between. So Conv and its Relu are one operator, a matmul with bias too, but a residual Add and its Relu
   are two.
2. A *shape-only* node (Reshape, Flatten, Squeeze, Unsqueeze, Identity, Dropout) with one run-time input does
   not count: it belongs to the operator that makes its input, or, behind a graph input, to its only reader.
3. A node without run-time inputs (a constant too large to fold) belongs to its only reader.
4. Every other node is an operator: pools, Concat, Add, Relu behind an Add, Transpose, Softmax...
5. Values that cannot be a slot never cross operators: maker and readers of such a value become one operator.
   Around sequences, maps, optionals and strings it is opaque, with the reason; around a tensor of which the
   size is known only while running, or of an element type that slots do not hold, it is *joined*.
6. Operators that would wait for each other are merged, so each can run as a unit (its node set is convex).

Control flow and custom operators are opaque, and pointwise or shape-only under no name: com.microsoft has a
Gelu and a QuantizeLinear, too.

Fused units are counted on top, as common inference kernels fuse: an elementwise operator over several inputs
joins the weighted operator at the end of the longest chain that only it reads, a pointwise operator its
input's maker if it is the only reader. Conv + Add + Relu is one unit.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

WEIGHTED = frozenset({
    "Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "DeformConv",
    "Gemm", "MatMul", "MatMulInteger", "QLinearMatMul", "Einsum",
    "BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization",
    "RMSNormalization", "LSTM", "GRU", "RNN",
})  # fmt: skip
POINTWISE = frozenset({
    "Abs", "Cast", "Ceil", "Celu", "Clip", "Cos", "DequantizeLinear", "Elu", "Erf", "Exp", "Floor", "Gelu",
    "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Mish", "Neg", "Not", "PRelu", "QuantizeLinear",
    "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Swish",
    "Tanh", "ThresholdedRelu",
})  # fmt: skip
ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean"})
SHAPE_ONLY = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"})


@dataclass(frozen=True)
class NodeView:
    """A node as grouping sees it."""

    kind: str
    reads: tuple[str, ...]  # run-time values, captured ones of sub-graphs included, without repeats
    makes: tuple[str, ...]
    opaque: str = ""  # why the node itself cannot be cut further


@dataclass(frozen=True)
class Group:
    """The nodes of one operator, ascending, and the leading one; why it is opaque or joined, if it is."""

    nodes: tuple[int, ...]
    lead: int
    opaque: str = ""
    joined: str = ""


@dataclass
class _Links:
    """The maker and the readers of each value, by node index."""

    nodes: Sequence[NodeView]
    outputs: frozenset[str]
    maker: dict[str, int] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, node in enumerate(self.nodes):
            for value in node.makes:
                self.maker[value] = index
            for value in node.reads:
                self.readers.setdefault(value, []).append(index)

    def seen_outside(self, value: str, inside: set[int]) -> bool:
        """Return whether a node outside `inside`, or a graph output, needs the value."""
        return value in self.outputs or any(r not in inside for r in self.readers.get(value, ()))


def form_operators(
    nodes: Sequence[NodeView],
    *,
    outputs: Iterable[str],
    unfit: Mapping[str, str],
    joined: Mapping[str, str] | None = None,
) -> list[Group]:
    """Group `nodes` (topologically ordered) by the module's rule; the groups come in a topological order.

    `outputs` are the graph's; `unfit` and `joined` map values that nodes make and that cannot cross operators
    to the reason; those of `unfit` make an operator opaque.
    """
    joined = joined or {}
    links = _Links(nodes, frozenset(outputs))
    owner = list(range(len(nodes)))
    for index, node in enumerate(nodes):
        if node.kind in WEIGHTED and not node.opaque:
            for member in _tail(links, index, owner):
                owner[member] = index
    _absorb_shape_only(links, owner)
    _merge_around(links, owner, {*unfit, *joined})
    owner = _contract_cycles(links, owner)
    reasons = {index: node.opaque for index, node in enumerate(nodes) if node.opaque}
    joints: dict[int, str] = {}
    for by_node, whys in ((reasons, unfit), (joints, joined)):
        for value, why in whys.items():
            if links.readers.get(value):
                by_node.setdefault(links.maker[value], why)
    return _ordered(links, owner, reasons, joints)


def _is_tail_kind(node: NodeView) -> bool:
    pointwise = node.kind in POINTWISE or node.kind in ELEMENTWISE
    return (pointwise and not node.opaque) or _is_shape_only(node)


def _is_shape_only(node: NodeView) -> bool:
    return node.kind in SHAPE_ONLY and len(node.reads) == 1 and not node.opaque


def _tail(links: _Links, lead: int, owner: Sequence[int]) -> list[int]:
    """Return the pointwise tail of weighted node `lead` (rule 1)."""
    region = {lead}
    frontier = [lead]
    while frontier:
        for value in links.nodes[frontier.pop()].makes:
            for reader in links.readers.get(value, ()):
                node = links.nodes[reader]
                inside = all(links.maker.get(read, -1) in region for read in node.reads)
                if reader not in region and owner[reader] == reader and inside and _is_tail_kind(node):
                    region.add(reader)
                    frontier.append(reader)
    exits = [v for i in region for v in links.nodes[i].makes if links.seen_outside(v, region)]
    if len(exits) <= 1:
        return sorted(region - {lead})
    return _sole_readers(links, lead, region)


def _sole_readers(links: _Links, lead: int, region: set[int]) -> list[int]:
    """Return the nodes behind `lead` that are each the only reader of the one before."""
    followers: list[int] = []
    last = lead
    while True:
        made = links.nodes[last].makes
        if len(made) != 1 or made[0] in links.outputs:
            return followers
        readers = links.readers.get(made[0], [])
        if len(readers) != 1 or readers[0] not in region or len(links.nodes[readers[0]].reads) != 1:
            return followers
        last = readers[0]
        followers.append(last)


def _absorb_shape_only(links: _Links, owner: list[int]) -> None:
    """Apply rules 2 and 3, in place."""
    for index, node in enumerate(links.nodes):
        if owner[index] == index and _is_shape_only(node) and node.reads[0] in links.maker:
            owner[index] = owner[links.maker[node.reads[0]]]
    members = _members(owner)
    for index, node in enumerate(links.nodes):
        absorbable = _is_shape_only(node) or not node.reads
        if owner[index] != index or node.opaque or not absorbable:
            continue
        made = [value for i in members[index] for value in links.nodes[i].makes]
        readers = {owner[r] for value in made for r in links.readers.get(value, ())} - {index}
        if len(readers) == 1 and links.outputs.isdisjoint(made):
            (target,) = readers
            for member in members[index]:
                owner[member] = target
            members[target] += members.pop(index)


def _merge_around(links: _Links, owner: list[int], values: Iterable[str]) -> None:
    """Rule 5: merge the groups around each value that cannot cross a border, in place."""
    into: dict[int, int] = {}  # a group that was merged, and the one it went into

    def root(group: int) -> int:
        while group in into:
            into[group] = group = into.get(into[group], into[group])
        return group

    for value in values:
        target = root(owner[links.maker[value]])
        for reader in links.readers.get(value, ()):
            if (merged := root(owner[reader])) != target:
                low, high = sorted((merged, target))
                into[high] = target = low
    owner[:] = [root(group) for group in owner]


def _members(owner: Sequence[int]) -> dict[int, list[int]]:
    """Return the nodes of each group, ascending."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(owner):
        members.setdefault(group, []).append(index)
    return members


def _group_successors(links: _Links, owner: Sequence[int]) -> dict[int, set[int]]:
    after: dict[int, set[int]] = {o: set() for o in owner}
    for index, node in enumerate(links.nodes):
        for read in node.reads:
            maker = links.maker.get(read)
            if maker is not None and owner[maker] != owner[index]:
                after[owner[maker]].add(owner[index])
    return after


def _contract_cycles(links: _Links, owner: Sequence[int]) -> list[int]:
    """Rule 6: merge each strongly connected component of the graph of groups (Tarjan, without recursion)."""
    after = _group_successors(links, owner)
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    component: dict[int, int] = {}
    for root in after:
        if root in number:
            continue
        work = [(root, iter(sorted(after[root])))]
        number[root] = low[root] = len(number)
        stack.append(root)
        while work:
            group, successors = work[-1]
            for successor in successors:
                if successor not in number:
                    number[successor] = low[successor] = len(number)
                    stack.append(successor)
                    work.append((successor, iter(sorted(after[successor]))))
                    break
                if successor not in component:
                    low[group] = min(low[group], number[successor])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[group])
                if low[group] == number[group]:
                    while group not in component:
                        component[stack.pop()] = group
    return [component[o] for o in owner]


def _ordered(
    links: _Links, owner: Sequence[int], reasons: Mapping[int, str], joints: Mapping[int, str]
) -> list[Group]:
    """Return the groups in topological order, by first node where there is a choice."""
    members = _members(owner)
    order = topological_order(_group_successors(links, owner), lambda group: members[group][0])
    return [_group(links.nodes, members[group], reasons, joints) for group in order]


def topological_order(after: Mapping[int, Collection[int]], key: Callable[[int], Any]) -> list[int]:
    """Order the keys of `after` before their successors; of the ready ones the smallest `key` is first.

    Nodes of a cycle are left out.
    """
    missing = dict.fromkeys(after, 0)
    for successor in chain.from_iterable(after.values()):
        missing[successor] += 1
    ready = [(key(node), node) for node, count in missing.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)[1]
        order.append(node)
        for successor in after[node]:
            missing[successor] -= 1
            if not missing[successor]:
                heapq.heappush(ready, (key(successor), successor))
    return order


def _group(
    nodes: Sequence[NodeView], members: list[int], reasons: Mapping[int, str], joints: Mapping[int, str]
) -> Group:
    opaque = [i for i in members if i in reasons]
    weighted = [i for i in members if nodes[i].kind in WEIGHTED]
    counted = [i for i in members if not _is_shape_only(nodes[i])]
    lead = (opaque or weighted or counted or members)[0]
    why, joint = (
        "; ".join(dict.fromkeys(by_node[i] for i in members if i in by_node)) for by_node in (reasons, joints)
    )
    return Group(tuple(members), lead, why, joint)


@dataclass(frozen=True)
class UnitView:
    """An operator as fusing sees it."""

    kind: str
    before: tuple[int, ...]  # operators whose output it reads
    readers: int  # how many operators read its outputs
    is_output: bool
    opaque: bool


def fused_units(operators: Sequence[UnitView]) -> list[int]:
    """Return the number of each operator's fused unit, in order of first appearance."""
    unit = list(range(len(operators)))
    depth: list[int] = []
    for index, operator in enumerate(operators):
        depth.append(1 + max((depth[p] for p in operator.before), default=0))
        if operator.opaque:
            continue
        free = [
            p
            for p in operator.before
            if operators[p].readers == 1 and not operators[p].is_output and not operators[p].opaque
        ]
        if operator.kind in ELEMENTWISE and len(operator.before) > 1:
            free = [p for p in free if operators[p].kind in WEIGHTED]
        elif not (operator.kind in POINTWISE or operator.kind in ELEMENTWISE):
            continue
        elif len(operator.before) != 1:
            continue
        if free:
            unit[index] = unit[max(free, key=lambda p: (depth[p], p))]
    numbers: dict[int, int] = {}
    return [numbers.setdefault(u, len(numbers)) for u in unit]


def critical_path(operators: Sequence[UnitView], units: Sequence[int]) -> int:
    """Return the number of units on the longest dependent chain."""
    before: dict[int, set[int]] = {u: set() for u in units}
    for operator, own in zip(operators, units, strict=True):
        before[own] |= {units[p] for p in operator.before if units[p] != own}
    depth: dict[int, int] = {}
    for root in before:
        stack = [root]
        while stack:
            top = stack[-1]
            waiting = [u for u in before[top] if u not in depth]
            if waiting:
                stack += waiting
                continue
            depth[stack.pop()] = 1 + max((depth[u] for u in before[top]), default=0)
    return max(depth.values(), default=0)
