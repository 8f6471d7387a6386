"""Plans for models on a fast and a slow resource: StarONNX's, and what it is compared with.

- `fast_only`: whole models on the fast resource.
- `whole_both`: whole models, each placed when it is ready; what the paper calls naive.
- `staronnx`: cut in two where 5 to 15 % of the fast resource's compute are left in the tail (the paper's
  cut); heads on the fast resource, tails placed.
- `staronnx_balanced`: the same, cut where the slow resource can just take all tails.

Source: Beaumont et al. 2024, sections 4 and 5; see `docs/staronnx.md`. Both cuts come from measured times of
parts (`halves`), so that these plans are made where models are measured, and not from a table of operators.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final

from stageloom.shared.errors import PlanError, SettingError
from stageloom.shared.plan import CombinedBlock, ExecutorOptions, Place, PlacementPolicy, Plan, Resource
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.halves import MeasureParts, balanced_cut, paper_cut

REPLICAS: Final = 8
"""Batches of a model in flight: with fewer than both resources have queued, one of them runs dry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastAndSlow:
    """Two resources of one lane each, what runs blocks there, and how blocks are placed."""

    fast: Resource
    slow: Resource
    fast_executor: ExecutorOptions
    slow_executor: ExecutorOptions
    placement: PlacementPolicy = PlacementPolicy.DMDA

    def plan(self, models: Sequence[ModelChoice], *, heads: bool = False) -> Plan:
        """Blocks placed on both; with `heads` all but the last one of a model stay on the fast resource.

        Raises:
            PlanError: no such plan is legal.
        """
        composed = compose(
            [replace(choice, replicas=max(choice.replicas, REPLICAS)) for choice in models],
            lanes=2,
            executor=self.fast_executor,
        )
        same = self.slow_executor == self.fast_executor

        def placed(block: CombinedBlock) -> CombinedBlock:
            member = block.members[0]
            if heads and member.block + 1 < composed.models[member.model].num_blocks:
                return replace(block, resources=(0,))
            if same:
                return replace(block, resources=(0, 1))
            return replace(block, resources=(0,), further_places=(Place(1, 1),))

        return replace(
            composed,
            combined=tuple(map(placed, composed.combined)),
            further_executors=() if same else (self.slow_executor,),
            resources=(self.fast, self.slow),
            lane_resources=(0, 1),
            placement=self.placement,
        )


SLACK: Final = 0.06
"""Of the rate, given up for latency by the balanced cut: where the slow resource cannot take all tails,
`dmda` runs one on the fast resource whenever it ends sooner there, and about one head always waits."""

Measure = Callable[[ModelChoice], MeasureParts]
"""How the parts of a model are timed."""


def fast_only(models: Sequence[ModelChoice], where: FastAndSlow, measure: Measure) -> Plan:
    """Whole models on the fast resource; nothing is measured."""
    plan = compose([_whole(choice) for choice in models], executor=where.fast_executor)
    return replace(plan, resources=(where.fast,), lane_resources=(0,))


def whole_both(models: Sequence[ModelChoice], where: FastAndSlow, measure: Measure) -> Plan:
    """Whole models, placed; nothing is measured."""
    return where.plan([_whole(choice) for choice in models])


def staronnx(models: Sequence[ModelChoice], where: FastAndSlow, measure: Measure) -> Plan:
    """At the paper's cut.

    Raises:
        PlanError: no base cut of a model leaves such a tail.
    """
    return where.plan([_cut(choice, paper_cut, measure) for choice in models], heads=True)


def staronnx_balanced(models: Sequence[ModelChoice], where: FastAndSlow, measure: Measure) -> Plan:
    """At the balanced cut.

    Raises:
        PlanError: a model has no base cut.
    """
    find = partial(balanced_cut, tolerance=SLACK)
    return where.plan([_cut(choice, find, measure) for choice in models], heads=True)


def _whole(choice: ModelChoice) -> ModelChoice:
    return replace(choice, partition=())


def _cut(
    choice: ModelChoice, find: Callable[[Sequence[int], MeasureParts], int | None], measure: Measure
) -> ModelChoice:
    cut = find(choice.graph.base_cuts, measure(choice))
    if cut is None:
        raise PlanError(
            f"model {choice.name!r} has no base cut with such a tail", remedy="use whole_both or fast_only"
        )
    return replace(choice, partition=(cut,))


@dataclass(frozen=True, slots=True)
class PlacedRival:
    """One of these ways to use two resources."""

    help: str  # one line
    plan: Callable[[Sequence[ModelChoice], FastAndSlow, Measure], Plan]


_RIVALS: Mapping[str, PlacedRival] = MappingProxyType(
    {
        "fast_only": PlacedRival("whole models on the fast resource", fast_only),
        "whole_both": PlacedRival("whole models on both, placed when ready", whole_both),
        "staronnx": PlacedRival("tails of 5 to 15 % placed on both (StarONNX)", staronnx),
        "staronnx_balanced": PlacedRival("tails that the slow resource can just take", staronnx_balanced),
    }
)


def placed_rivals() -> Mapping[str, PlacedRival]:
    """Return all of them by name."""
    return _RIVALS


def placed_rival(name: str) -> PlacedRival:
    """The one of that name.

    Raises:
        SettingError: there is none; the error lists the names.
    """
    if name not in _RIVALS:
        raise SettingError(
            f"there is no rival {name!r}", remedy=f"choose one of {', '.join(sorted(_RIVALS))}"
        )
    return _RIVALS[name]
