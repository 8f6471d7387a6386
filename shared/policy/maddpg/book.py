"""Schedules by combined block (TOP's stage_dict, algorithm 1 line 11), as a policy takes them along.

The key is what a combined block computes (artifact and operators of every member, in the plan's order) and
the largest batch of its members; the device class is the policy's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stageloom.shared.blocks import Block, CombinedGraph, combine, split
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Member, ModelPlan
from stageloom.shared.schedule import Schedule
from stageloom.shared.search.costs import combined_digest

Part = tuple[Digest, Graph, Block]
"""One member of a combined block as the cost table takes it."""

BlockKey = tuple[Digest, int]
"""Digest of a combined block, largest batch of its members."""


@dataclass(frozen=True)
class Book:
    """Schedules that were found."""

    schedules: Mapping[BlockKey, Schedule] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[BlockKey, Schedule]]:
        """In the order of the keys, so that equal books have equal bytes."""
        return iter(sorted(self.schedules.items(), key=lambda item: item[0]))


class Blocks:
    """The blocks of one plan's models, to look combined blocks of them up by."""

    def __init__(self, models: Sequence[ModelPlan], graphs: Mapping[Digest, Graph]) -> None:
        self._batches = [model.batch for model in models]
        self._parts: dict[tuple[int, int], Part] = {
            (index, block.index): (model.artifact, graphs[model.artifact], block)
            for index, model in enumerate(models)
            for block in split(graphs[model.artifact], model.cuts)
        }
        self._keys: dict[tuple[Member, ...], BlockKey] = {}

    def parts(self, members: Sequence[Member]) -> list[Part]:
        """What each member is."""
        return [self._parts[member.model, member.block] for member in members]

    def batches(self, members: Sequence[Member]) -> list[int]:
        """Tasks at a time of each member."""
        return [self._batches[member.model] for member in members]

    def key(self, members: tuple[Member, ...]) -> BlockKey:
        """What the members' schedule is found by."""
        found = self._keys.get(members)
        if found is None:
            spans = ((artifact, block.start, block.stop) for artifact, _, block in self.parts(members))
            found = self._keys[members] = combined_digest(spans), max(self.batches(members))
        return found

    def graph(self, members: Sequence[Member]) -> CombinedGraph:
        """The operators of all members."""
        return combine([(graph, block) for _, graph, block in self.parts(members)])
