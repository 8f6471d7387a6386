"""Random combined blocks to learn from (TOP, V-C.2: "various block combinations in the model set")."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Final

from stageloom.planner.twin.device_file import load_device
from stageloom.shared.blocks import Block, CombinedGraph, combine, split
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.costs import CostTable, StageCosts

MemberOf = tuple[Digest, Graph, Block]
CostsOf = Callable[[Sequence[MemberOf], Random], StageCosts]

DEVICES: Final = ("a100", "nano", "tx2", "xavier_nx")
"""TOP's (table I), by their device files."""

_WINDOW: Final = (6, 36)  # operators of a piece of a block that is larger


@dataclass(frozen=True)
class Drawing:
    """Where blocks come from: models by digest, what stages cost, and how many members at most."""

    models: Mapping[Digest, Graph]
    costs: CostsOf
    members_max: int = 3

    def draw(self, random: Random) -> tuple[CombinedGraph, StageCosts]:
        """One combined block and its costs."""
        count = random.randint(1, self.members_max)
        digests = list(self.models)
        chosen = [random.choice(digests) for _ in range(count)]
        if random.random() < 0.2:
            chosen = [chosen[0]] * count  # replicas, perhaps of different blocks
        members = [(digest, self.models[digest], _block(self.models[digest], random)) for digest in chosen]
        return combine([(graph, block) for _, graph, block in members]), self.costs(members, random)


def analytic_costs(members: Sequence[MemberOf], random: Random) -> StageCosts:
    """Estimates for a device of TOP's table I, its figures varied, so that no one device is learned.

    Half of them are like the largest: the small ones leave little to choose.
    """
    name = "a100" if random.random() < 0.5 else random.choice(DEVICES)
    return CostTable(rates=varied(_rates(name), random)).for_members(members)


@cache
def _rates(device: str) -> DeviceRates:
    return load_device(device).rates()


def varied(rates: DeviceRates, random: Random) -> DeviceRates:
    """A device like this one. What groups cost each other no data sheet says, so any of a range is drawn."""

    def times(value: float, spread: float) -> float:
        return float(value * spread ** random.uniform(-1.0, 1.0))

    return replace(
        rates,
        flop_per_s=times(rates.flop_per_s, 2.0),
        bytes_per_s=times(rates.bytes_per_s, 2.0),
        launch_s=times(rates.launch_s, 2.0),
        barrier_s=times(rates.barrier_s, 3.0),
        contention=random.choice((0.0, 0.05, 0.1, 0.2, 0.4)),
        threads=max(round(times(rates.threads, 2.0)), 1),
    )


def _block(graph: Graph, random: Random) -> Block:
    """A block between two of the model's cuts, or a piece of one that is too large to learn from at once."""
    offered = dict(graph.partitions)
    cuts = offered.get("paper") or offered.get("base") or graph.base_cuts
    block = random.choice(split(graph, cuts))
    size = block.stop - block.start
    wanted = random.randint(*_WINDOW)
    if size <= wanted:
        return block
    start = block.start + random.randint(0, size - wanted)
    return replace(block, start=start, stop=start + wanted)
