"""EOP's tables and figures: the claims of `benchmarks.eop`, each part an entry of the catalogue."""

from collections.abc import Callable, Iterable
from typing import Final

from benchmarks.eop import paper
from benchmarks.paper.finding import Finding, Inputs, PaperClaim, Reproduce
from stageloom.planner.twin.device_pair import DevicePair, load_pair

Part = Callable[[DevicePair], Iterable[paper.Claim]]

_NOTE: Final = (
    "Modelled on rooflines of a Core i7-7700 and an RTX 2060 (*derived*), and on a machine made of the "
    "paper's own table 5 (*tables*). A claim that holds on neither contradicts the hardware and the paper's "
    "own tables. [EOP](../schedulers/eop.md) explains them."
)


def of_part(part: Part) -> Reproduce:
    """A reproduction that states every claim of one part."""

    def reproduce(inputs: Inputs) -> Finding:
        claims = part(load_pair(paper.EDGE_SERVER))
        return Finding(
            tuple(PaperClaim(f"{one.model}: {one.claim}", one.ours, one.holds) for one in claims), note=_NOTE
        )

    return reproduce


table_1: Final = of_part(paper.table_1)
table_2: Final = of_part(paper.key_shares)
table_4: Final = of_part(paper.table_4)
table_5: Final = of_part(paper.table_5)
figure_7: Final = of_part(paper.figure_7)
figure_8: Final = of_part(paper.figure_8)
figure_9: Final = of_part(paper.figure_9)
figure_10: Final = of_part(paper.figure_10)
figure_11: Final = of_part(paper.figure_11)
