"""Which executor runs each block of a plan that is searched, and which lanes and cores it has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from stageloom.shared.errors import PlanError
from stageloom.shared.plan import ExecutorOptions, Member, PlacementPolicy, Resource

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Executors beside the first one, resources, and what each block of each model uses of them.

    `executors_of` and `resources_of` have an entry per model: empty, for the first executor and for any
    resource; one value for all blocks; or one per block. [num_models][0, 1 or num_blocks] With a `placement`
    a block runs on one of its resources as it is placed, by its one executor; any means each of them.
    """

    further_executors: tuple[ExecutorOptions, ...] = ()
    resources: tuple[Resource, ...] = ()
    lane_resources: tuple[int, ...] = ()
    executors_of: tuple[tuple[int, ...], ...] = ()
    resources_of: tuple[tuple[tuple[int, ...], ...], ...] = ()
    placement: PlacementPolicy = PlacementPolicy.FIXED

    def used_by(self, members: Sequence[Member]) -> tuple[int, tuple[int, ...]]:
        """(executor, resources) of a combined block.

        Raises:
            PlanError: its members use different ones, or an entry is of another number of blocks.
        """
        places = self.placement is not PlacementPolicy.FIXED
        anywhere = tuple(range(len(self.resources))) if places else ()
        used = {
            (_entry(self.executors_of, member, 0), _entry(self.resources_of, member, ()) or anywhere)
            for member in members
        }
        if len(used) > 1:
            raise PlanError(
                "blocks that are combined have different executors or resources",
                remedy="give them the same, or combine blocks alone",
            )
        return used.pop()


def _entry(of_models: Sequence[Sequence[T]], member: Member, usual: T) -> T:
    blocks = of_models[member.model] if of_models else ()
    if len(blocks) < 2:
        return blocks[0] if blocks else usual
    if member.block >= len(blocks):
        raise PlanError(
            f"executors or resources of {len(blocks)} blocks are given for a model that has more",
            remedy="give one for all blocks, or one per block",
        )
    return blocks[member.block]
