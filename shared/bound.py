"""A plan joined with the graphs it names: checked once, then every later part may rely on it."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from stageloom.shared.bitmask import mask_of
from stageloom.shared.blocks import Block, CombinedGraph, combine, slot_readers, slot_reads, split
from stageloom.shared.digest import digest_of, digest_to_raw
from stageloom.shared.errors import PlanError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.launch_list import LaunchList, lower
from stageloom.shared.legality import split_violations, violations
from stageloom.shared.partition import Axis, splits_text
from stageloom.shared.plan import MAX_MEMBERS, CombinedBlock, ExecutorOptions, Member, ModelPlan, Plan, Wait
from stageloom.shared.schedule import OWN_RESOURCE, Schedule, names_resources, resources_named
from stageloom.shared.split_graph import SplitOrigin, derive


@dataclass(frozen=True)
class BoundModel:
    """One model of a plan with its graph and blocks.

    Of a model that is split `graph` is the one that the splits make, which the blocks are runs of.
    """

    plan: ModelPlan
    graph: Graph
    blocks: tuple[Block, ...]
    slot_reads: tuple[tuple[int, ...], ...]  # see stageloom.shared.blocks.slot_reads [num_blocks][...]
    slot_readers: tuple[int, ...]  # see stageloom.shared.blocks.slot_readers [num_blocks]
    origins: tuple[SplitOrigin, ...] = ()  # of the operators of a model that is split [num_ops]
    unsplit: Graph | None = None  # the artifact's graph where the model is split

    @property
    def source(self) -> Graph:
        """The artifact's graph."""
        return self.graph if self.unsplit is None else self.unsplit

    @cached_property
    def graph_key(self) -> Digest:
        """What `graph` is known under: the artifact, or the artifact as it is split."""
        if not self.origins:
            return self.plan.artifact
        return digest_of([digest_to_raw(self.plan.artifact), splits_text(self.plan.splits)])

    def origin(self, op: int) -> SplitOrigin:
        """What an operator of `graph` is of the artifact's."""
        return self.origins[op] if self.origins else SplitOrigin((OpId(op),))

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of one task's inputs."""
        return sum(self.graph.tensors[t].nbytes for t in self.graph.inputs)

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        """Batch sizes that programs are prepared for, ascending: powers of two, then `batch` itself."""
        sizes = [1]
        while sizes[-1] * 2 < self.plan.batch:
            sizes.append(sizes[-1] * 2)
        return tuple(sizes) if self.plan.batch == 1 else (*sizes, self.plan.batch)

    def bucket_for(self, tasks: int) -> int:
        """The smallest bucket that holds `tasks`, which is at most `batch`."""
        return self.buckets[bisect_left(self.buckets, tasks)]


@dataclass(frozen=True)
class BoundCombined:
    """One combined block with the graph over its members' operators."""

    plan: CombinedBlock
    graph: CombinedGraph

    @property
    def members(self) -> tuple[Member, ...]:
        """The sub-blocks."""
        return self.plan.members

    @property
    def full_mask(self) -> int:
        """All members active."""
        return (1 << len(self.plan.members)) - 1


@dataclass(frozen=True)
class BoundPlan:
    """A legal plan with everything it refers to."""

    plan: Plan
    models: tuple[BoundModel, ...]
    combined: tuple[BoundCombined, ...]

    @cached_property
    def home(self) -> dict[Member, tuple[int, int]]:
        """Per (model, replica, block) its combined block and its position among the members."""
        return {
            member: (index, position)
            for index, combined in enumerate(self.combined)
            for position, member in enumerate(combined.members)
        }

    @cached_property
    def variants(self) -> tuple[tuple[int, int], ...]:
        """All pairs of a combined block and the number of a way to run it: there are several if it has
        further places."""
        return tuple(
            (index, variant)
            for index, block in enumerate(self.combined)
            for variant in range(len(block.plan.variants))
        )

    def executor_of(self, combined: int, variant: int = 0) -> ExecutorOptions:
        """What runs a combined block."""
        return self.plan.executors[self.combined[combined].plan.variants[variant][0]]

    def group_executor(self, combined: int, variant: int, resource: int) -> ExecutorOptions:
        """What runs the groups of a combined block on a resource that they name."""
        if resource == OWN_RESOURCE or self.plan.resources[resource].executor is None:
            return self.executor_of(combined, variant)
        return self.plan.executors[self.plan.resources[resource].executor or 0]

    def lanes_of(self, combined: int) -> int:
        """The lanes that may run a combined block, as a mask."""
        resources = self.combined[combined].plan.variant_on
        return self.lanes_on(*resources) if resources else (1 << self.plan.lanes) - 1

    def lanes_on(self, *resources: int) -> int:
        """The lanes of these resources, as a mask."""
        return mask_of(lane for lane, own in enumerate(self.plan.lane_resources) if own in resources)

    def cores_of(self, combined: int) -> tuple[int, ...]:
        """The cores that may run a combined block, ascending; empty where the system chooses."""
        lanes, plan = self.lanes_of(combined), self.plan
        cores = [plan.cores_of(lane) for lane in range(plan.lanes) if lanes >> lane & 1]
        return tuple(sorted(set().union(*cores))) if all(cores) else ()

    def run_by(self, name: str) -> tuple[tuple[int, int], ...]:
        """The `variants` that executors of this name run, ascending."""
        return tuple(pair for pair in self.variants if self.executor_of(*pair).name == name)

    @cached_property
    def executor_names(self) -> tuple[str, ...]:
        """Executors that have a combined block to run, or groups of one, each once."""
        own = [self.executor_of(*pair).name for pair in self.variants]
        beside = [
            self.group_executor(index, variant, resource).name
            for index, variant in self.variants
            for resource in sorted(resources_named(self.combined[index].plan.variants[variant][1]))
        ]
        return tuple(dict.fromkeys(own + beside))

    @cached_property
    def splits(self) -> bool:
        """Whether an operator of a model is split."""
        return any(model.origins for model in self.models)

    @cached_property
    def names_resources(self) -> bool:
        """Whether a group of a combined block runs on a resource that its schedule names."""
        return any(names_resources(block.plan.schedule) for block in self.combined)

    @cached_property
    def precisions(self) -> tuple[str, ...]:
        """In which precision each model is computed, in all of its blocks. [num_models]"""
        of = {
            member.model: self.executor_of(index).precision
            for index, combined in enumerate(self.combined)
            for member in combined.members
        }
        return tuple(of[index] for index in range(len(self.models)))

    @cached_property
    def _launches(self) -> dict[tuple[int, int, int], LaunchList]:
        return {}

    def launches(self, combined: int, mask: int, variant: int = 0) -> LaunchList:
        """The launch list of a combined block with the members in `mask` active; lowered once."""
        known = self._launches.get((combined, mask, variant))
        if known is None:
            block = self.combined[combined]
            schedule = block.plan.variants[variant][1]
            known = lower(schedule, block.graph, mask, barrier=self.plan.barrier)
            self._launches[combined, mask, variant] = known
        return known

    @cached_property
    def model_index(self) -> dict[str, int]:
        """Model name to index."""
        return {model.plan.name: index for index, model in enumerate(self.models)}


def bind(plan: Plan, graphs: Mapping[Digest, Graph]) -> BoundPlan:
    """Join `plan` with the graphs of its artifacts and check all of it.

    Raises:
        PlanError: an artifact is absent, a cut is no base cut, a batch is not allowed, a block is in no or in
            two combined blocks, one of these has too many members, blocks of a model differ in precision, a
            split or a schedule is illegal, a block has no place where the plan is to find one, or the wait
            rule cannot be honoured.
    """
    _check_positive(plan)
    models = tuple(_bind_model(model, graphs) for model in plan.models)
    if not models:
        raise PlanError("a plan needs at least one model")
    if len({model.plan.name for model in models}) != len(models):
        raise PlanError(
            "two models of the plan share a name",
            remedy="rename one of them, or give it once with more replicas",
        )
    _check_cover(plan, models)
    _check_resources(plan)
    _check_group_executors(plan)
    _check_precisions(plan)
    _check_places(plan)
    combined = tuple(_bind_combined(index, plan, models) for index in range(len(plan.combined)))
    if plan.wait is not Wait.NONE:
        check_wait([block.members for block in plan.combined])
    return BoundPlan(plan, models, combined)


def _check_positive(plan: Plan) -> None:
    """The decoder bounds these too; a plan made in this process has not been through it."""
    for name in ("lanes", "run_ahead", "max_skips"):
        if getattr(plan, name) < 1:
            raise PlanError(f"{name} is {getattr(plan, name)}, less than 1")
    for model in plan.models:
        for name in ("replicas", "batch", "weight"):
            if getattr(model, name) < 1:
                raise PlanError(f"{name} of model {model.name!r} is {getattr(model, name)}, less than 1")
        for name in ("batch_max_delay_us", "launch_interval_us"):
            if getattr(model, name) < 0:
                raise PlanError(f"{name} of model {model.name!r} is negative")


def _bind_model(model: ModelPlan, graphs: Mapping[Digest, Graph]) -> BoundModel:
    graph = graphs.get(model.artifact)
    if graph is None:
        raise PlanError(f"artifact {model.artifact[:12]} of model {model.name!r} is not here")
    if not set(model.cuts) <= set(graph.base_cuts) or list(model.cuts) != sorted(set(model.cuts)):
        raise PlanError(f"the cuts of model {model.name!r} are not ascending base cuts of its artifact")
    if model.batch > 1 and not graph.batchable:
        raise PlanError(
            f"model {model.name!r} cannot run in batches of {model.batch}: its rows are not independent",
            remedy="use batch 1 and more replicas",
        )
    if not model.splits:
        blocks = split(graph, model.cuts)
        return BoundModel(model, graph, blocks, slot_reads(graph, blocks), slot_readers(graph, blocks))
    if found := split_violations(model.splits, graph, model.cuts):
        raise PlanError(f"model {model.name!r}: {found[0].detail} ({len(found)} violations)")
    if model.batch > 1 and any(one.axis is Axis.BATCH for one in model.splits):
        raise PlanError(
            f"model {model.name!r} is split along a batch that its instances fill in part",
            remedy="use batch 1 of a model that was imported with the batch, or another axis",
        )
    derived = derive(graph, model.splits)
    made = derived.graph
    blocks = split(made, derived.cuts(model.cuts))
    reads, readers = slot_reads(made, blocks), slot_readers(made, blocks)
    return BoundModel(model, made, blocks, reads, readers, derived.origins, graph)


def _check_cover(plan: Plan, models: tuple[BoundModel, ...]) -> None:
    wanted = {
        Member(index, replica, block)
        for index, model in enumerate(models)
        for replica in range(model.plan.replicas)
        for block in range(model.plan.num_blocks)
    }
    seen: set[Member] = set()
    for combined in plan.combined:
        for member in combined.members:
            if member not in wanted:
                raise PlanError(f"the combined blocks name {tuple(member)}, which no model has")
            if member in seen:
                raise PlanError(f"block {tuple(member)} is in two combined blocks")
            seen.add(member)
        if not combined.members:
            raise PlanError("a combined block has no member")
        if len(combined.members) > MAX_MEMBERS:
            raise PlanError(
                f"a combined block has {len(combined.members)} members, more than {MAX_MEMBERS}",
                remedy="use a smaller members_max, or fewer replicas",
            )
    if missing := wanted - seen:
        raise PlanError(f"block {tuple(min(missing))} is in no combined block")


def _check_resources(plan: Plan) -> None:
    """What blocks and lanes name is there, and no core belongs to two resources, or to too many threads."""
    for index, block in enumerate(plan.combined):
        executors = [executor for executor, _ in block.variants]
        if unknown := [executor for executor in executors if executor >= len(plan.executors)]:
            raise PlanError(
                f"combined block {index} names executor {unknown[0]} of a plan with {len(plan.executors)}",
                remedy="number the plan's executors from 0",
            )
        if list(block.resources) != sorted(set(block.resources)):
            raise PlanError(f"the resources of combined block {index} are not ascending")
        if unlaned := set(block.variant_on) - set(plan.lane_resources):
            raise PlanError(
                f"combined block {index} names resource {min(unlaned)}, which has no lane",
                remedy="name resources of the plan that have lanes",
            )
    for number, resource in enumerate(plan.resources):
        if resource.executor is not None and not 0 <= resource.executor < len(plan.executors):
            raise PlanError(
                f"resource {number} names executor {resource.executor} of a plan with {len(plan.executors)}",
                remedy="number the plan's executors from 0",
            )
    if not plan.resources and not plan.lane_resources:
        return
    if len(plan.lane_resources) != plan.lanes:
        raise PlanError(
            f"{len(plan.lane_resources)} of {plan.lanes} lanes name a resource", remedy="name all"
        )
    if unknown := [one for one in plan.lane_resources if not 0 <= one < len(plan.resources)]:
        raise PlanError(
            f"a lane names resource {unknown[0]} of a plan with {len(plan.resources)}",
            remedy="number the plan's resources from 0",
        )
    taken: set[int] = set()
    for index, resource in enumerate(plan.resources):
        if list(resource.cores) != sorted(set(resource.cores)):
            raise PlanError(f"the cores of resource {index} are not ascending")
        if shared := taken & set(resource.cores):
            raise PlanError(
                f"core {min(shared)} belongs to two resources",
                remedy="give each core to one, or both lanes the same resource",
            )
        taken |= set(resource.cores)
        lanes, threads = _lanes_using(plan, index), _threads_on(plan, index)
        if resource.cores and lanes * threads > len(resource.cores):
            raise PlanError(
                f"resource {index} has {len(resource.cores)} cores for {lanes} lanes of {threads} threads",
                remedy="use fewer lanes or threads, or name more cores",
            )


def _lanes_using(plan: Plan, resource: int) -> int:
    """The lanes of a resource, and those of others of which a block may have groups there."""
    used = {lane for lane, own in enumerate(plan.lane_resources) if own == resource}
    for block in plan.combined:
        if any(resource in resources_named(schedule) for _, schedule in block.variants):
            used |= {
                lane
                for lane, own in enumerate(plan.lane_resources)
                if not block.variant_on or own in block.variant_on
            }
    return len(used)


def _check_group_executors(plan: Plan) -> None:
    """What runs groups on further resources computes as what runs the rest of their block."""
    for index, block in enumerate(plan.combined):
        for executor, schedule in block.variants:
            for number in resources_named(schedule):
                beside = plan.resources[number].executor if number < len(plan.resources) else None
                own = plan.executors[executor].precision
                if beside is not None and plan.executors[beside].precision != own:
                    raise PlanError(
                        f"combined block {index} has groups in {own} and in another precision",
                        remedy="give the executors of its resources one precision",
                    )


def _check_precisions(plan: Plan) -> None:
    """A model is computed in one precision, whichever executors run its blocks."""
    found: dict[int, str] = {}
    for block in plan.combined:
        precision = plan.executors[block.executor].precision
        for member in block.members:
            first = found.setdefault(member.model, precision)
            if first != precision:
                raise PlanError(
                    f"model {plan.models[member.model].name!r} has blocks in {first} and in {precision}",
                    remedy="give all blocks of a model executors of one precision",
                )


def _threads_on(plan: Plan, resource: int) -> int:
    """Of the widest executor that may run a block there."""
    wanted = (
        plan.executors[block.variants[block.variant_on.get(resource, 0)][0]].intra_op_threads
        for block in plan.combined
        if not block.variant_on or resource in block.variant_on
    )
    beside = plan.resources[resource].executor
    threads = plan.executors[beside].intra_op_threads if beside is not None else 1
    return max((*wanted, threads))


def _check_places(plan: Plan) -> None:
    """A plan that places blocks says where each may run, and a block is the same wherever it runs."""
    for index, block in enumerate(plan.combined):
        if not plan.places:
            if block.further_places:
                raise PlanError(
                    f"combined block {index} has several places in a plan whose placement is fixed",
                    remedy="name a placement: eager, dm, dmda or heft",
                )
            continue
        named = [*block.resources, *(place.resource for place in block.further_places)]
        if not block.resources or len(set(named)) != len(named):
            raise PlanError(
                f"placement {plan.placement.value!r} needs the resources of combined block {index}, each once"
            )
        precisions = {plan.executors[executor].precision for executor, _ in block.variants}
        if len(precisions) > 1:
            raise PlanError(
                f"combined block {index} would run as {' or '.join(sorted(precisions))}, as it is placed",
                remedy="give the executors of its places one precision",
            )
    if plan.places and plan.wait is not Wait.NONE:
        raise PlanError(
            f"placement {plan.placement.value!r} and wait {plan.wait.value!r} exclude each other",
            remedy="use wait: none, or a fixed placement",
        )


def _bind_combined(index: int, plan: Plan, models: tuple[BoundModel, ...]) -> BoundCombined:
    block = plan.combined[index]
    graph = combine([(models[m.model].graph, models[m.model].blocks[m.block]) for m in block.members])
    schedules: list[Schedule] = [block.schedule]
    schedules += [place.schedule for place in block.further_places if place.schedule is not None]
    for schedule in schedules:
        if found := violations(schedule, graph, resources=len(plan.resources)):
            raise PlanError(f"combined block {index}: {found[0].detail} ({len(found)} violations)")
    return BoundCombined(block, graph)


def check_wait(combined: Sequence[Sequence[Member]]) -> None:
    """Refuse combined blocks, given by their members, that cannot wait for all of these.

    Raises:
        PlanError: two blocks of one replica are in one, or their order has a cycle.
    """
    home = {member: index for index, members in enumerate(combined) for member in members}
    after: dict[int, set[int]] = {index: set() for index in range(len(combined))}
    for index, members in enumerate(combined):
        if len({(m.model, m.replica) for m in members}) != len(members):
            raise PlanError(
                f"combined block {index} holds two blocks of one replica, which cannot wait for each other",
                remedy="use wait: none",
            )
        for m in members:
            if m.block:
                after[index].add(home[Member(m.model, m.replica, m.block - 1)])
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        raise PlanError(
            "the models' blocks impose a cycle on the combined blocks, so none could ever wait for all",
            remedy="use wait: none",
        ) from error
