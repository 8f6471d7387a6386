"""What a policy decides over: models with fixed blocks, on one device class. A policy belongs to one space.

Actions are numbers of [0, 1]: agent 0 (the task launcher) gives one per model, the agents 1..W (the model
scheduler) one per block of their model. They are kept as one row: launcher first, then the members in the
order of models, replicas and blocks. TOP has one instance of each block; a replica here is one more of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from stageloom.shared.errors import SettingError
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Member, ModelPlan, Plan, Wait
from stageloom.shared.schedule import names_resources


class IntervalMap(str, Enum):
    """What an action of the task launcher means."""

    GEOMETRIC = "geometric"  # between the bounds that load and device give
    PAPER = "paper"  # seconds per task, 0 to 1 (TOP, V-B)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpace:
    """One model as the policy knows it: by what it computes and how it is cut, not by its name."""

    artifact: Digest
    cuts: tuple[int, ...]
    replicas: int = 1
    batch: int = 1

    @property
    def blocks(self) -> int:
        return len(self.cuts) + 1

    @classmethod
    def of(cls, model: ModelPlan) -> "ModelSpace":
        return cls(artifact=model.artifact, cuts=model.cuts, replicas=model.replicas, batch=model.batch)


@dataclass(frozen=True, kw_only=True)
class Space:
    """The shape of states and actions, and how actions are read.

    Raises:
        SettingError: no model, H below one, or no sample.
    """

    device_class: str
    models: tuple[ModelSpace, ...]
    members_max: int = 2  # H: members of a combined block at most
    samples: int = 10  # n: rows of a state
    interval_map: IntervalMap = IntervalMap.GEOMETRIC
    deviation_scale: float = 0.05
    """Seconds of work (or tasks) at which a deviation stops counting in proportion; 0: it counts as it is."""

    def __post_init__(self) -> None:
        if not self.models or self.members_max < 1 or self.samples < 1 or not self.deviation_scale >= 0.0:
            raise SettingError(
                f"no policy over {len(self.models)} models, {self.members_max} members and "
                f"{self.samples} samples",
                remedy="use one or more of each",
            )

    @classmethod
    def of(cls, plan: Plan, device_class: str, *, members_max: int = 2, samples: int = 10) -> "Space":
        """The space of plans that differ from this one in combined blocks and launch intervals alone."""
        models = tuple(ModelSpace.of(model) for model in plan.models)
        return cls(device_class=device_class, models=models, members_max=members_max, samples=samples)

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """Every block there is, in the order of the action row."""
        return tuple(
            Member(index, replica, block)
            for index, model in enumerate(self.models)
            for replica in range(model.replicas)
            for block in range(model.blocks)
        )

    @property
    def num_models(self) -> int:
        """W."""
        return len(self.models)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Blocks per model. [W]"""
        return tuple(model.blocks for model in self.models)

    @property
    def bins(self) -> int:
        """As many as there are blocks (TOP, V-B)."""
        return len(self.members)

    @cached_property
    def row_width(self) -> int:
        """Columns of equation 1: the blocks of all models, then their queues."""
        return sum(self.blocks) + self.num_models

    @property
    def state_width(self) -> int:
        """Numbers of a state, n rows one after another."""
        return self.samples * self.row_width

    @cached_property
    def agents(self) -> tuple[int, ...]:
        """Actions per agent, the task launcher first. [W + 1]"""
        return (self.num_models, *(model.replicas * model.blocks for model in self.models))

    @property
    def action_width(self) -> int:
        """Numbers of an action row."""
        return sum(self.agents)

    @cached_property
    def bin_of_start(self) -> tuple[int, ...]:
        """Per member the bin in which it starts, alone. [bins]

        Ordered by how far through its model a block is, so that neighbouring bins hold blocks that run at
        about the same time, mostly of different models: what is close in action is sensible to combine.
        """
        places = [((m.block + 0.5) / self.models[m.model].blocks, m) for m in self.members]
        order = sorted(range(len(places)), key=places.__getitem__)
        found = [0] * len(order)
        for rank, at in enumerate(order):
            found[at] = rank
        return tuple(found)

    def refusal(self, plan: Plan, device_class: str) -> str:
        """Why a policy of this space does not fit such a plan; empty where it does."""
        if device_class != self.device_class:
            return f"it was trained for the device class {self.device_class!r}, not {device_class!r}"
        if len(plan.models) != self.num_models:
            return f"it was trained for {self.num_models} models, the plan has {len(plan.models)}"
        if plan.wait is not Wait.NONE:
            return f"the plan waits ({plan.wait.value}); what a policy combines must not"
        if problem := _kept_apart(plan):
            return f"{problem}; a policy combines blocks that all run alike"
        pairs = zip(self.models, map(ModelSpace.of, plan.models), plan.models, strict=True)
        for index, (trained, found, model) in enumerate(pairs):
            if problem := _difference(trained, found):
                return f"model {index + 1} ({model.name}) {problem}"
        return ""


def _kept_apart(plan: Plan) -> str:
    """What of a plan's blocks new combined blocks would lose; empty where there is nothing."""
    if any(model.splits for model in plan.models):
        return "the plan splits operators"
    for block in plan.combined:
        if block.executor:
            return f"a block runs on {plan.executors[block.executor].name}, others on {plan.executor.name}"
        if block.resources or block.further_places or names_resources(block.schedule):
            return "blocks are bound to resources"
    return ""


def _difference(trained: ModelSpace, found: ModelSpace) -> str:
    if found.artifact != trained.artifact:
        return f"is artifact {found.artifact[:12]}, it was trained for {trained.artifact[:12]} there"
    if found.cuts != trained.cuts:
        return f"is cut at {_listed(found.cuts)}, it was trained for {_listed(trained.cuts)}"
    if found.replicas != trained.replicas:
        return f"has {found.replicas} replicas, it was trained for {trained.replicas}"
    if found.batch != trained.batch:
        return f"runs in batches of {found.batch}, it was trained for {trained.batch}"
    return ""


def _listed(cuts: Sequence[int]) -> str:
    return ",".join(map(str, cuts)) or "no cut"
