"""What is to be learned, as one picklable value: a worker makes all else from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum

from stageloom.planner.learning.maddpg.schedules import ScheduleTable
from stageloom.planner.twin.window import MakeDevice
from stageloom.shared.bound import BoundModel, bind
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.plan import Plan
from stageloom.shared.policy.maddpg.book import Blocks
from stageloom.shared.policy.maddpg.space import Space
from stageloom.shared.policy.plain import Load
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.interface import TOP_LIMITS, Limits


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Models on a device under arrivals.

    `template` gives all that is not learned: names, cuts, replicas, batches, queues, lanes, rules, executor.

    Raises:
        InputError: the template is not of this space, or waits for its models.
    """

    space: Space
    template: Plan
    graphs: Mapping[Digest, Graph]
    costs: CostTable
    arrivals_per_s: tuple[float, ...]  # mean per model [W]
    make_device: MakeDevice
    limits: Limits = TOP_LIMITS  # of schedules

    def __post_init__(self) -> None:
        if why := self.space.refusal(self.template, self.space.device_class):
            raise InputError(
                f"there is nothing to learn on this plan: {why}",
                remedy="name the models with --model, or push a plan that does not wait",
            )
        assert len(self.arrivals_per_s) == self.space.num_models

    @classmethod
    def of(
        cls,
        template: Plan,
        *,
        device_class: str,
        graphs: Mapping[Digest, Graph],
        costs: CostTable,
        arrivals_per_s: Sequence[float],
        make_device: MakeDevice,
        members_max: int = 2,
        samples: int = 10,
        limits: Limits = TOP_LIMITS,
    ) -> "Problem":
        """The problem of finding combined blocks and launch intervals for this plan's models."""
        return cls(
            space=Space.of(template, device_class, members_max=members_max, samples=samples),
            template=template,
            graphs=graphs,
            costs=costs,
            arrivals_per_s=tuple(arrivals_per_s),
            make_device=make_device,
            limits=limits,
        )

    @cached_property
    def service_s(self) -> tuple[float, ...]:
        """Device seconds of one task, its operators one after another, per model. [W]

        Fixed weights: what a plan gains must not make its queues count less.
        """
        return tuple(
            fsum(
                self.costs.operator_s(model.artifact, self.graphs[model.artifact], OpId(op))
                for op in range(len(self.graphs[model.artifact].operators))
            )
            for model in self.template.models
        )

    @cached_property
    def bound_models(self) -> tuple[BoundModel, ...]:
        """The models with their graphs and blocks, as `stageloom.shared.bound.bind` has them. [W]"""
        return bind(self.template, self.graphs).models

    def table(self) -> ScheduleTable:
        """An empty stage_dict; every worker fills its own."""
        return ScheduleTable(Blocks(self.template.models, self.graphs), self.costs, self.limits)

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """The mean load, in the models' order. [W]"""
        rows = zip(self.template.models, self.arrivals_per_s, self.service_s, strict=True)
        return tuple(
            Load(model=model.name, arrivals_per_s=rate, service_s=service_s, queued=0)
            for model, rate, service_s in rows
        )
