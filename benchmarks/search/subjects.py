"""Networks of the zoo, alone and side by side, as combined blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

from benchmarks.allocation import imported
from stageloom.shared.blocks import Block, combine, split
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.search.comparison import Subject, subject
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.interface import Budget, Limits

LIMITS = Limits(r=3, s=8)
MIX = ("squeezenet_bypass", "googlenet", "inception_v3", "resnet50")
_NO_ARTIFACT = Digest("0" * 64)  # nothing was measured, so nothing is looked up


@dataclass(frozen=True)
class Network:
    """A network's operators, and where it is cut: as its paper does, else at every base cut."""

    artifact: Digest
    graph: Graph

    @property
    def cuts(self) -> tuple[int, ...]:
        """The cuts."""
        offered = dict(self.graph.partitions)
        return offered.get("paper", offered["base"])

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks between them."""
        return split(self.graph, self.cuts)


@cache
def of_the_zoo(name: str) -> Network:
    """A network at full size of which only the shapes are used, not the weights."""
    return Network(_NO_ARTIFACT, imported(name))


def rows_of(networks: Sequence[Network]) -> list[list[tuple[int, int]]]:
    """Per combined block its members, as (network, block): the i-th blocks side by side."""
    numbered = [[(at, block) for block in range(len(one.blocks))] for at, one in enumerate(networks)]
    return [[member for member in row if member is not None] for row in zip_longest(*numbered)]


def side_by_side(networks: Mapping[str, Network], table: CostTable, budget: Budget) -> Subject:
    """The combined blocks of networks, one or more."""
    known = list(networks.values())
    blocks = []
    for row in rows_of(known):
        members = [(known[at].artifact, known[at].graph, known[at].blocks[block]) for at, block in row]
        graph = combine([(graph, block) for _, graph, block in members])
        blocks.append((graph, table.for_members(members)))
    return subject("+".join(networks), blocks, LIMITS, budget)
