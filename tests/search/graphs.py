"""Graphs to schedule: named ones with known answers, and random ones for brute force."""

from collections.abc import Sequence

from hypothesis import strategies as st

from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.digest import digest_of
from stageloom.shared.graph import Graph, Operator, Tensor
from stageloom.shared.ids import Digest, TensorId
from tests.shared.randoms import with_merges


def union(*members: Sequence[Sequence[int]]) -> CombinedGraph:
    """A combined graph; each member lists per operator its predecessors inside the member."""
    offsets, masks = [0], []
    for member in members:
        masks += [sum(1 << (offsets[-1] + before) for before in row) for row in member]
        offsets.append(offsets[-1] + len(member))
    return with_merges(CombinedGraph(tuple(offsets), (0,) * len(members), tuple(masks)))


@st.composite
def unions(draw: st.DrawFn, max_ops: int = 10) -> CombinedGraph:
    """One to three random members with edges from lower to higher operators."""
    members = []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, max_ops))
        members.append(
            [sorted(draw(st.sets(st.integers(0, op - 1), max_size=3))) if op else [] for op in range(size)]
        )
    return union(*members)


def model(name: str, predecessors: Sequence[Sequence[int]], cuts: Sequence[int] = ()) -> tuple[Digest, Graph]:
    """A model whose operator i makes tensor i + 1; operators without predecessors read the input, tensor 0.

    `cuts` become its base cuts and its partition `base`.
    """
    read = {before for row in predecessors for before in row}
    operators = tuple(
        Operator(
            kind="Conv",
            name=f"{name}.{op}",
            nodes=(op,),
            inputs=tuple(TensorId(before + 1) for before in row) or (TensorId(0),),
            outputs=(TensorId(op + 1),),
            flop=1_000_000,
            weight_bytes=0,
            fused_unit=op,
        )
        for op, row in enumerate(predecessors)
    )
    graph = Graph(
        name=name,
        tensors=tuple(Tensor(f"t{i}", "float32", (1, 4)) for i in range(len(operators) + 1)),
        operators=operators,
        inputs=(TensorId(0),),
        outputs=tuple(TensorId(op + 1) for op in range(len(operators)) if op not in read),
        base_cuts=tuple(cuts),
        partitions=(("whole", ()), ("base", tuple(cuts))),
        batchable=True,
    )
    return digest_of([name]), graph


DIAMOND = [[], [0], [0], [1, 2]]
CHAIN = [[], [0], [1]]
