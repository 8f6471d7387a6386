"""Models and blocks small enough to learn from in a test."""

from random import Random

from stageloom.planner.learning.gpg.lessons import Drawing, analytic_costs
from stageloom.planner.learning.gpg.model import GpgModel
from stageloom.planner.twin.device_file import load_device
from stageloom.shared.attributes import Attributes
from stageloom.shared.blocks import CombinedGraph, combine, split
from stageloom.shared.graph import Graph, Operator, Tensor
from stageloom.shared.ids import Digest, TensorId
from stageloom.shared.policy.gpg.network import GpgNetwork
from stageloom.shared.search.costs import CostTable, StageCosts

CELL = ((), (0,), (0,), (2,), (0,), (4,), (1, 3, 5))
"""An inception cell: one entry, three branches, a concat."""


def cell(name: str, *, channels: int = 32, side: int = 14, repeats: int = 1) -> Graph:
    """Cells one after another, cut between them; every operator keeps the shape."""
    rows: list[tuple[int, ...]] = []
    for _ in range(repeats):
        first = len(rows)
        before = (first - 1,) if first else ()
        rows += [tuple(first + one for one in row) or before for row in CELL]
    shape = (1, channels, side, side)
    operators = tuple(
        Operator(
            kind="Concat" if len(row) > 1 else "Conv",
            name=f"{name}.{op}",
            nodes=(op,),
            inputs=tuple(TensorId(one + 1) for one in row) or (TensorId(0),),
            outputs=(TensorId(op + 1),),
            flop=0 if len(row) > 1 else 2 * channels * channels * side * side * (1 + op % 3),
            weight_bytes=4 * channels * channels,
            fused_unit=op,
            attributes=Attributes((3, 3), (1, 1), (1, 1, 1, 1), 1, "relu") if len(row) < 2 else Attributes(),
        )
        for op, row in enumerate(rows)
    )
    cuts = tuple(len(CELL) * at for at in range(1, repeats))
    return Graph(
        name=name,
        tensors=tuple(Tensor(f"t{at}", "float32", shape) for at in range(len(rows) + 1)),
        operators=operators,
        inputs=(TensorId(0),),
        outputs=(TensorId(len(rows)),),
        base_cuts=cuts,
        partitions=(("whole", ()), ("base", cuts)),
    )


def models() -> dict[Digest, Graph]:
    """Two models of different shapes."""
    made = [cell("narrow", repeats=2), cell("wide", channels=128, side=28)]
    return {graph.digest: graph for graph in made}


def drawing() -> Drawing:
    """Blocks of both, on estimated devices."""
    return Drawing(models(), analytic_costs, members_max=2)


def block(members: int, seed: int = 0) -> tuple[CombinedGraph, StageCosts]:
    """A combined block of cells, on an A100."""
    random = Random(seed)
    chosen = []
    for _ in range(members):
        digest, graph = random.choice(sorted(models().items()))
        chosen.append((digest, graph, random.choice(split(graph, graph.base_cuts))))
    table = CostTable(rates=load_device("a100").rates())
    return combine([(graph, part) for _, graph, part in chosen]), table.for_members(chosen)


def network(model: GpgModel) -> GpgNetwork:
    """A model's numbers without torch."""
    return GpgNetwork(model.exported())
