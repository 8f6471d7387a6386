"""What a step takes when it runs alone, and the share of the device that it uses meanwhile.

A step runs its combined block's schedule restricted to the active members, which is what the executors run.
With the launch list of the mask (`stageloom.shared.launch_list.lower`), per item

    item = sum of its operators + item_s + border_s_per_byte * bytes that enter or leave it,

and per stage of items, under a full barrier, the formula of `stageloom.shared.search.costs`,

    stage = least + contention * (total - least) + barrier (several items),   least = max(longest, work),

or, of a schedule that names resources, the most that one takes for its items in turn, and the barrier.

Other schedules (streams, `barrier=data`) run as a fluid (`stageloom.shared.search.makespan`). The step takes
the sum of its stages and `step_s`. Its share is the work of its operators over its seconds; work is the
seconds for which an operator would need the whole device: its roofline on a GPU, its threads over the cores
on a CPU.

Beside steps that keep the other cores of a CPU a step's groups find none to run on, and its items come one
after another (`StepTime.crowded_s`), but for those on resources that the schedule names.

Operators take `CostTable.operator_s` of the batch bucket. A stage that was measured whole, with all
members at their largest batch, which is the same of all, takes what was measured; others what the model of
the device class predicts, where stages have taught it anything (`stageloom.shared.search.interference`),
scaled by batch as their operators are.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple, TypeAlias

from stageloom.planner.twin.device_file import DeviceFile
from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import Block, CombinedGraph
from stageloom.shared.bound import BoundPlan
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.launch_list import Barrier, Item, LaunchList, lower
from stageloom.shared.plan import CombinedBlock, ExecutorOptions
from stageloom.shared.schedule import OWN_RESOURCE, Group, StageSchedule
from stageloom.shared.search.costs import CostTable, StageCosts, combined_digest, stage_batch
from stageloom.shared.search.makespan import launch_list_s
from stageloom.shared.search.split_costs import split_costs
from stageloom.shared.search.stage_costs import resources_s

Part: TypeAlias = tuple[Digest, Graph, Block, int]
"""A member of a combined block: artifact, graph, block, and its plan's batch."""

MAX_BLOCKS: Final = 8192
"""Combined blocks whose times are kept; a training meets many more. Those used longest ago go first."""

LEAST_SHARE: Final = 1e-6
"""Of a step of which no operator computes anything."""


class StepTime(NamedTuple):
    """One step with nothing beside it."""

    seconds: float
    share: float  # of the device, in (0, 1]
    crowded_s: float  # alike, with no core for a second group
    crowded_share: float
    items: int  # that it begins

    @classmethod
    def of_one_item(cls, seconds: float, share: float) -> "StepTime":
        """A step without groups."""
        return cls(seconds, share, seconds, share, 1)


class StepTimes:
    """Times of the steps of any plan on one device; what was worked out once is kept."""

    def __init__(self, device: DeviceFile, costs: CostTable) -> None:
        """`costs`: the operators' and stages' times; what lacks one is estimated from the costs' rates.

        A combined block takes those of the executor that runs it (`CostTable.under`).
        """
        self.device = device
        self.costs = costs
        self._blocks: dict[object, BlockTimes] = {}
        self._operators: dict[object, tuple[tuple[float, float], ...]] = {}

    @classmethod
    def derived(cls, device: DeviceFile, precision: str = "fp32") -> "StepTimes":
        """With nothing measured.

        Raises:
            InputError: the device file has no figures for this precision.
        """
        return cls(device, CostTable(rates=device.rates(precision)))

    def of_plan(self, bound: BoundPlan) -> "PlanTimes":
        """The times of one plan's steps."""
        costs = split_costs(self.costs, bound)
        if costs is not self.costs:  # they are of no other plan
            own = StepTimes(self.device, costs)
            return PlanTimes([own._block(bound, index) for index in range(len(bound.combined))], bound)
        return PlanTimes([self._block(bound, index) for index in range(len(bound.combined))], bound)

    def _block(self, bound: BoundPlan, index: int) -> "BlockTimes":
        """Combined blocks of equal contents and schedule share their times, whatever plan they are of."""
        combined, plan, executor = bound.plan.combined[index], bound.plan, bound.executor_of(index)
        parts = [_part(bound, member.model, member.block) for member in combined.members]
        key = (
            combined_digest((artifact, block.start, block.stop) for artifact, _, block, _ in parts),
            combined.tokens,
            tuple(batch for *_, batch in parts),
            plan.barrier,
            executor,
        )
        found = self._blocks.pop(key, None)
        if found is None:
            found = BlockTimes(self, parts, bound.combined[index].graph, combined, plan.barrier, executor)
            if len(self._blocks) >= MAX_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        self._blocks[key] = found  # now the last to be forgotten
        return found

    def operators(
        self, part: Part, bucket: int, executor: ExecutorOptions
    ) -> tuple[tuple[float, float], ...]:
        """Seconds and work of a member's operators at a batch bucket. [block's operators]"""
        artifact, graph, block, _ = part
        key = (artifact, block.start, block.stop, bucket, executor)
        found = self._operators.get(key)
        if found is None:
            found = self._operators[key] = tuple(
                self._operator(artifact, graph, OpId(op), bucket, executor) for op in block.operators
            )
        return found

    def _operator(
        self, artifact: Digest, graph: Graph, op: OpId, bucket: int, executor: ExecutorOptions
    ) -> tuple[float, float]:
        costs, cores = self.costs.under(executor), self.device.cores
        seconds = costs.operator_s(artifact, graph, op, bucket)
        if cores:
            return seconds, seconds * min(executor.intra_op_threads, cores) / cores
        return seconds, costs.work_s(artifact, graph, op, bucket)


class PlanTimes:
    """Times of the steps of one plan."""

    def __init__(self, blocks: "Sequence[BlockTimes]", bound: BoundPlan) -> None:
        self.bound = bound
        self.blocks = tuple(blocks)

    def step(self, combined: int, mask: int, buckets: tuple[int, ...], *, fallback: bool = False) -> StepTime:
        """One step; `buckets` per active member, ascending by position.

        With `fallback` no program is ready: the members run one after another.
        """
        block = self.blocks[combined]
        if not fallback or mask & (mask - 1) == 0:
            return block.step(mask, buckets)
        return block.one_after_another(mask, buckets)


class BlockTimes:
    """Times of the steps of one combined block with its schedule, per mask and buckets."""

    def __init__(
        self,
        times: StepTimes,
        parts: Sequence[Part],
        graph: CombinedGraph,
        block: CombinedBlock,
        barrier: Barrier,
        executor: ExecutorOptions,
    ) -> None:
        self._times = times
        self._costs = times.costs.under(executor)
        self._parts = tuple(parts)
        self._graph = graph
        self._schedule = block.schedule
        self._barrier = barrier
        self._executor = executor
        self._known: dict[tuple[int, tuple[int, ...]], StepTime] = {}

    def step(self, mask: int, buckets: tuple[int, ...]) -> StepTime:
        """A step by a prepared program."""
        known = self._known.get((mask, buckets))
        if known is None:
            known = self._known[mask, buckets] = self._work_out(mask, buckets)
        return known

    def one_after_another(self, mask: int, buckets: tuple[int, ...]) -> StepTime:
        """A step without one: its members by themselves, under one step's overhead."""
        overhead_s = self._times.device.step_s
        alone = [
            self.step(1 << position, (bucket,)) for position, bucket in zip(bits(mask), buckets, strict=True)
        ]
        return StepTime(
            *_with_share(
                sum(one.seconds - overhead_s for one in alone) + overhead_s,
                sum(one.seconds * one.share for one in alone),
            ),
            *_with_share(
                sum(one.crowded_s - overhead_s for one in alone) + overhead_s,
                sum(one.crowded_s * one.crowded_share for one in alone),
            ),
            sum(one.items for one in alone),
        )

    @cached_property
    def _measured(self) -> dict[tuple[Group, ...], float]:
        """Stages that were measured whole, with all their members at the largest batch, the same of all.

        Those of one group that follow each other were measured as one, and run as one.
        """
        costs = self._costs
        batch = stage_batch(batch for *_, batch in self._parts)
        if batch is None:
            return {}
        digest = combined_digest((artifact, block.start, block.stop) for artifact, _, block, _ in self._parts)
        known = costs.stages_of.get((digest, batch), ())
        return {stage.groups: stage.seconds for stage in known if not stage.merge}

    @cached_property
    def _learned(self) -> StageCosts | None:
        """What the device class's interference model predicts for this block's stages; None without one."""
        costs = self._costs
        if costs.interference is None or not costs.interference.samples:
            return None
        parts = [(artifact, graph, block) for artifact, graph, block, _ in self._parts]
        return replace(costs.for_members(parts, batches=[batch for *_, batch in self._parts]), measured=())

    def items(self, mask: int) -> LaunchList:
        """What a step of these members runs."""
        return lower(self._schedule, self._graph, mask, barrier=self._barrier)

    def model_ops(self, item: Item) -> tuple[Digest, Graph, tuple[OpId, ...]]:
        """An item's operators, as their model numbers them."""
        artifact, graph, block, _ = self._parts[item.member]
        shift = block.start - self._graph.offsets[item.member]
        return artifact, graph, tuple(OpId(op + shift) for op in item.ops)

    def stages(self, mask: int, buckets: tuple[int, ...]) -> list["StageParts"]:
        """The stages of a step, as far as they are not empty; of a stage schedule with full barriers."""
        seconds, works = self._operators_s(mask, buckets)
        bucket_of = dict(zip(bits(mask), buckets, strict=True))
        stages = [list(items) for _, items in groupby(self.items(mask), attrgetter("stage"))]
        return [
            StageParts(
                groups=tuple(tuple(sorted(item.ops)) for item in items),
                items_s=[self._item_s(item, seconds, bucket_of[item.member]) for item in items],
                work_s=sum(sum(works[op] for op in item.ops) for item in items),
                operators_s=sum(sum(seconds[op] for op in item.ops) for item in items),
                merge=items[0].merge,
                resources=tuple(item.resource for item in items),
            )
            for items in stages
        ]

    def stage_s(self, mask: int, buckets: tuple[int, ...]) -> dict[int, float]:
        """Seconds of each stage by its number in the schedule, ascending; empty ones are left out.

        As in `stageloom.shared.stage_times` an item over several stages counts for its first. Empty for a
        schedule whose stages do not end one after another.
        """
        if not self.staged:
            return {}
        full = self._full(mask, buckets)
        numbers = sorted({item.stage for item in self.items(mask)})
        stages = self.stages(mask, buckets)
        return {number: self._stage_s(one, full) for number, one in zip(numbers, stages, strict=True)}

    def _full(self, mask: int, buckets: tuple[int, ...]) -> bool:
        """Whether all members are active at their largest batch, at which stages are measured."""
        bucket_of = dict(zip(bits(mask), buckets, strict=True))
        return all(bucket_of.get(m) == batch for m, (*_, batch) in enumerate(self._parts))

    @property
    def staged(self) -> bool:
        """Whether its stages end one after another."""
        return isinstance(self._schedule, StageSchedule) and self._barrier is Barrier.FULL

    def _work_out(self, mask: int, buckets: tuple[int, ...]) -> StepTime:
        overhead_s = self._times.device.step_s
        if not self.staged:
            return self._fluid(mask, buckets)
        full = self._full(mask, buckets)
        stages = self.stages(mask, buckets)
        taken = [(stage, self._stage_s(stage, full)) for stage in stages]
        total_s = sum(seconds for _, seconds in taken)
        crowded = [(s, seconds) if s.apart or len(s.items_s) == 1 else (s, s.total_s) for s, seconds in taken]
        return StepTime(
            *_with_share(total_s + overhead_s, sum(self._work_s(*one) for one in taken)),
            *_with_share(
                sum(seconds for _, seconds in crowded) + overhead_s, sum(s.work_s for s, _ in crowded)
            ),
            sum(len(stage.items_s) for stage in stages),
        )

    def _work_s(self, stage: "StageParts", seconds: float) -> float:
        """What a stage takes of the device, as seconds of all of it.

        On a CPU groups that slow each other keep their cores for as long as that takes them; what a GPU is
        asked to compute stays the same.
        """
        if not self._times.device.cores or len(stage.items_s) == 1 or stage.apart or not stage.least_s:
            return stage.work_s
        return stage.work_s * max((seconds - self._costs.rates.barrier_s) / stage.least_s, 1.0)

    def _operators_s(self, mask: int, buckets: tuple[int, ...]) -> tuple[list[float], list[float]]:
        """Seconds and work of the active members' operators, 0 elsewhere. [num_ops] each"""
        seconds, works = [0.0] * self._graph.size, [0.0] * self._graph.size
        for member, bucket in zip(bits(mask), buckets, strict=True):
            known = self._times.operators(self._parts[member], bucket, self._executor)
            for op, (op_s, work_s) in enumerate(known, self._graph.offsets[member]):
                seconds[op], works[op] = op_s, work_s
        return seconds, works

    def _fluid(self, mask: int, buckets: tuple[int, ...]) -> StepTime:
        """A step whose stages do not end one after another."""
        overhead_s = self._times.device.step_s
        seconds, works = self._operators_s(mask, buckets)
        bucket_of = dict(zip(bits(mask), buckets, strict=True))
        items = self.items(mask)
        for item in items:
            item_s = self._item_s(item, seconds, bucket_of[item.member])
            seconds[item.ops[0]] += item_s - sum(seconds[op] for op in item.ops)
        rates = self._costs.rates
        costs = StageCosts(
            tuple(seconds), contention=rates.contention, barrier_s=rates.barrier_s, work_s=tuple(works)
        )
        return StepTime(
            *_with_share(launch_list_s(items, costs) + overhead_s, sum(works)),
            *_with_share(sum(seconds[op] for item in items for op in item.ops) + overhead_s, sum(works)),
            len(items),
        )

    def _item_s(self, item: Item, seconds: Sequence[float], bucket: int) -> float:
        device, costs = self._times.device, self._costs
        total_s = sum(seconds[op] for op in item.ops)
        artifact, graph, ops = self.model_ops(item)
        if item.merge:
            apart_s = sum(costs.operator_s(artifact, graph, op, bucket) for op in ops)
            total_s *= costs.merged_s(artifact, graph, ops, bucket) / apart_s
        if device.border_s_per_byte:
            total_s += device.border_s_per_byte * bucket * border_bytes(graph, ops)
        return total_s + device.item_s

    def _stage_s(self, stage: "StageParts", full: bool) -> float:
        rates, groups = self._costs.rates, stage.groups
        if stage.apart:
            return resources_s(stage.resources, stage.items_s) + rates.barrier_s
        measured_s = self._measured.get(groups) if full and not stage.merge else None
        if measured_s is not None:
            return measured_s
        if self._learned is not None and not stage.merge:
            alone_s = sum(self._learned.operators_s[op] for group in groups for op in group)
            return self._learned.stage_s(groups) * (stage.operators_s / alone_s if alone_s > 0.0 else 1.0)
        if len(stage.items_s) == 1:
            return stage.items_s[0]
        return stage.least_s + rates.contention * (stage.total_s - stage.least_s) + rates.barrier_s


class StageParts(NamedTuple):
    """One stage of a step: its groups, the seconds of each alone, and their work together."""

    groups: tuple[Group, ...]
    items_s: list[float]
    work_s: float
    operators_s: float  # all operators alone, without what items cost beside them
    merge: bool
    resources: tuple[int, ...]  # per group

    @property
    def apart(self) -> bool:
        """Whether several groups run on resources that the schedule names."""
        return len(self.resources) > 1 and set(self.resources) != {OWN_RESOURCE}

    @property
    def total_s(self) -> float:
        """One group after another."""
        return sum(self.items_s)

    @property
    def least_s(self) -> float:
        """With nothing in each other's way."""
        return min(max(*self.items_s, self.work_s), self.total_s)


def border_bytes(graph: Graph, ops: Sequence[OpId]) -> int:
    """Bytes of one row that these operators read from others, or make for others."""
    inside = set(ops)
    read = {tensor for op in ops for tensor in graph.operators[op].inputs}
    made = {tensor for op in ops for tensor in graph.operators[op].outputs}
    outputs = set(graph.outputs)
    crossing = {tensor for tensor in read if graph.producer[tensor] not in inside}
    crossing |= {
        tensor
        for tensor in made
        if tensor in outputs or any(reader not in inside for reader in graph.consumers[tensor])
    }
    return sum(graph.tensors[tensor].nbytes for tensor in crossing)


def _part(bound: BoundPlan, model: int, block: int) -> Part:
    known = bound.models[model]
    return known.graph_key, known.graph, known.blocks[block], known.plan.batch


def _with_share(seconds: float, work_s: float) -> tuple[float, float]:
    """Seconds of a step, and its share of the device."""
    share = work_s / seconds if seconds > 0.0 else 1.0
    return seconds, min(max(share, LEAST_SHARE), 1.0)
