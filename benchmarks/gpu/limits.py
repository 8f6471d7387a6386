"""How far a time is from what cannot be beaten: three distances, by ceilings measured on the same device."""

from dataclasses import dataclass

from benchmarks.gpu.ceilings import Ceilings
from stageloom.shared.bitmask import bits
from stageloom.shared.graph import Graph


@dataclass(frozen=True)
class Work:
    """What one image costs at least."""

    flop: int
    weight_bytes: int
    activation_bytes: int  # every tensor written once
    units: int  # fused
    critical_units: int  # on the longest path

    @property
    def moved_bytes(self) -> int:
        """Weights and activations."""
        return self.weight_bytes + self.activation_bytes


def work_of(graph: Graph, precision: str) -> Work:
    """Of one model at batch 1."""
    scale = 2 if precision == "fp16" else 1  # the graph counts float32
    made = {tensor for operator in graph.operators for tensor in operator.outputs}
    return Work(
        sum(operator.flop for operator in graph.operators),
        sum(operator.weight_bytes for operator in graph.operators) // scale,
        sum(graph.tensors[tensor].nbytes for tensor in made) // scale,
        len({operator.fused_unit for operator in graph.operators}),
        _critical(graph),
    )


def _critical(graph: Graph) -> int:
    """Fused units on the longest path."""
    before: dict[int, set[int]] = {}
    for op, mask in enumerate(graph.predecessors):
        unit = graph.operators[op].fused_unit
        others = {graph.operators[one].fused_unit for one in bits(mask)}
        before.setdefault(unit, set()).update(others - {unit})
    depth: dict[int, int] = {}

    def reach(unit: int) -> int:
        """Units in order of their first operator, so what comes before is known but for few."""
        if unit not in depth:
            depth[unit] = 1 + max((reach(one) for one in before[unit]), default=0)
        return depth[unit]

    return max(reach(unit) for unit in sorted(before))


@dataclass(frozen=True)
class Distances:
    """Lower bounds in microseconds per image, each from another reason; None where it was not measured."""

    flop_us: float
    bytes_us: float
    path_us: float
    empirical_us: float | None

    @property
    def roofline_us(self) -> float:
        """The longer of computing and of moving bytes."""
        return max(self.flop_us, self.bytes_us)


def distances(work: Work, ceilings: Ceilings, empirical_us: float | None) -> Distances:
    """`empirical_us` is the best of batch 64 and of independent graphs on 1 to 16 streams, per image."""
    return Distances(
        work.flop / ceilings.flop_per_s * 1e6,
        work.moved_bytes / ceilings.bytes_per_s * 1e6,
        work.critical_units * ceilings.chain_graph_s * 1e6,
        empirical_us,
    )
