"""What each half of a split operator computes, followed back from its output to inputs and weights. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

from stageloom.shared.errors import Unsplittable
from stageloom.shared.partition import Axis, AxisRange, NodeReads, NodeRun, OnnxNode, dimension_of
from stageloom.shared.partition_rules import reads_of


@dataclass(frozen=True, slots=True)
class NodePart:
    """One node of a half: what it reads of each input, and what changes in it.

    `reads` has an AxisRange for a part of an input and None for all of it; `kept` are the inputs that the
    half has (all but those parts of a Concat that lie in the other half).
    """

    node: int  # its index in the run
    reads: tuple[AxisRange | None, ...]
    kept: tuple[int, ...]
    attributes: Mapping[str, int | str | tuple[int, ...]] = field(
        default_factory=dict
    )  # instead of the node's
    numbers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # instead of a constant input


@dataclass(frozen=True)
class OperatorPart:
    """One half of a run of operators."""

    nodes: tuple[NodePart, ...]
    held: Mapping[str, AxisRange | None]
    """Per run-time value what of it there is: what is fed of an input, what is made of an inner value."""


@dataclass(frozen=True, slots=True)
class SplitAxis:
    """An axis that an operator may be split on: boundaries are the multiples of `quantum` below `extent`."""

    axis: Axis
    dim: int
    extent: int
    quantum: int = 1


@dataclass
class _Needs:
    """Per value the hull of what nodes further down read of it."""

    run: NodeRun
    of: dict[str, AxisRange | None] = field(default_factory=dict)

    def add(self, name: str, wanted: AxisRange | None) -> None:
        if not name:
            return
        if wanted is not None and wanted.start == 0 and wanted.stop == self.run.shape(name)[wanted.dim]:
            wanted = None
        if name not in self.of:
            self.of[name] = wanted
            return
        known = self.of[name]
        if known is None or wanted is None or known.dim != wanted.dim:
            self.of[name] = None
        else:
            self.of[name] = AxisRange(known.dim, min(known.start, wanted.start), max(known.stop, wanted.stop))


def part_of(run: NodeRun, wanted: AxisRange) -> OperatorPart:
    """Follow a part of the run's outputs back to what it reads of every input and weight.

    Raises:
        Unsplittable: a node cannot make a part of its output along that axis, or from there to there.
    """
    needs = _Needs(run)
    for name in run.outputs:
        shape = run.shape(name)
        if not 0 <= wanted.dim < len(shape):
            raise Unsplittable("axis", f"output {name[:80]!r} has no dimension {wanted.dim}")
        if not 0 <= wanted.start < wanted.stop <= shape[wanted.dim]:
            raise Unsplittable("boundary", f"[{wanted.start}, {wanted.stop}) is not inside {list(shape)}")
        needs.of[name] = wanted
    parts: list[NodePart] = []
    for index in range(len(run.nodes) - 1, -1, -1):
        node = run.nodes[index]
        made = [name for name in node.outputs if name in needs.of]
        if not made:
            if any(node.outputs):
                raise Unsplittable("axis", f"{node.kind} makes what only its own operator could want")
            continue
        at = needs.of[made[0]]
        if any(needs.of[name] != at for name in made[1:]):
            raise Unsplittable("axis", f"the outputs of {node.kind} are wanted in different parts")
        if at is None:
            if not _is_constant(run, node):
                raise Unsplittable("axis", f"both halves would need all that {node.kind} makes")
            found = NodeReads((None,) * len(node.inputs))
        else:
            found = reads_of(run, node, at)
        kept = tuple(range(len(node.inputs))) if found.kept is None else found.kept
        parts.append(NodePart(index, found.reads, kept, found.attributes, found.numbers))
        for position in kept:
            name = node.inputs[position]
            if name not in run.weights:
                needs.add(name, found.reads[position])
    return OperatorPart(tuple(reversed(parts)), MappingProxyType(needs.of))


def _is_constant(run: NodeRun, node: OnnxNode) -> bool:
    """Whether a node computes what depends on no input, so that both halves may."""
    makers = {name: other for other in run.nodes for name in other.outputs}
    waiting, seen = [node], set()
    while waiting:
        for name in waiting.pop().inputs:
            if not name or name in run.weights or name in seen:
                continue
            if name not in makers:
                return False
            seen.add(name)
            waiting.append(makers[name])
    return True


def halves_of(run: NodeRun, dim: int, boundary: int) -> tuple[OperatorPart, OperatorPart]:
    """Both halves of a run of operators, joined along `dim` of its outputs.

    Raises:
        Unsplittable: with the rule that is broken: `axis`, `boundary`, or `aligned` where the halves of a
            chain overlap between two of its operators, so that one computes what the other has.
    """
    extents = {run.shape(name)[dim] for name in run.outputs if dim < len(run.shape(name))}
    if len(extents) != 1:
        raise Unsplittable("axis", "the outputs have no such dimension of one extent")
    (extent,) = extents
    if not 0 < boundary < extent:
        raise Unsplittable("boundary", f"boundary {boundary} is not inside 0..{extent}")
    first = part_of(run, AxisRange(dim, 0, boundary))
    second = part_of(run, AxisRange(dim, boundary, extent))
    for name in sorted(run.crossing):
        one, other = first.held.get(name), second.held.get(name)
        if one is None or other is None or one.dim != other.dim or one.stop > other.start:
            raise Unsplittable("aligned", f"both halves would compute a part of {name[:80]!r}")
    return first, second


def split_axes(run: NodeRun, kind: str) -> tuple[SplitAxis, ...]:
    """The axes that a run of operators may be split on; `kind` is the last one's."""
    found = []
    for axis in Axis:
        dim = dimension_of(axis, kind, len(run.shapes.get(run.outputs[0], ())))
        if dim is None:
            continue
        extent = run.shape(run.outputs[0])[dim]
        # What a half reads grows with it: where both ends are legal, all between are.
        quantum = next(
            (q for q in _divisors(extent) if _may(run, dim, q) and _may(run, dim, extent - q)), None
        )
        if quantum is not None:
            found.append(SplitAxis(axis, dim, extent, quantum))
    return tuple(found)


def _may(run: NodeRun, dim: int, boundary: int) -> bool:
    try:
        halves_of(run, dim, boundary)
    except Unsplittable:
        return False
    return True


def _divisors(extent: int) -> Sequence[int]:
    return [number for number in range(1, extent) if extent % number == 0]


def part_bytes(shape: Sequence[int], held: AxisRange | None, item_bytes: int) -> int:
    """Bytes of the part of a tensor."""
    whole = prod(shape) * item_bytes
    return whole if held is None else whole // shape[held.dim] * held.extent
