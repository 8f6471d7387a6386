"""The plan: everything that decides how a device runs its models, as one frozen value.

A plan is plain data. `stageloom.shared.bound.bind` joins it with the graphs it names and checks that it is
legal.
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import starmap
from typing import Any, NamedTuple

import msgpack

from stageloom.shared.digest import canonical, digest_bytes, digest_from_raw, digest_to_raw
from stageloom.shared.errors import PlanError
from stageloom.shared.ids import Digest
from stageloom.shared.launch_list import Barrier
from stageloom.shared.partition import MAX_EXTENT, MAX_SPLITS, Axis, Split, splits_text
from stageloom.shared.schedule import Schedule, names_resources, num_operators
from stageloom.shared.stage_string import MAX_OPERATORS, from_tokens, to_string, to_tokens

PLAN_VERSION = 3
"""Of plans that split operators or run groups on several resources. Plans that name resources, several
executors or a placement are written as version 2, all others as version 1."""

MAX_PLAN_BYTES = 96 << 10  # decoding lists costs up to 72 bytes of memory per byte
MAX_MODELS = 64
MAX_COMBINED = 4096
MAX_MEMBERS = 62  # of a combined block: masks of them travel as numbers of at most 2**62
MAX_LANES = 16
MAX_EXECUTORS = 16
MAX_CORES = 1024
MAX_MEMORIES = 16
MAX_PLAN_OPERATORS = 1 << 17  # over all schedules: a range of six bytes expands to 65,536 operators


class QueueRule(Enum):
    """Who loses when a queue is full."""

    REFUSE_NEWEST = "refuse_newest"
    DROP_OLDEST = "drop_oldest"
    DEADLINE = "deadline"  # run the earliest deadline first; full: the latest deadline loses
    PRIORITY = "priority"  # run the highest priority first; full: the lowest priority, newest first, loses


class StepChoice(Enum):
    """Which combined block runs next among those that can."""

    RATIO = "ratio"  # highest input ratio first, ties to the oldest instance (TOP, VI-A)
    ROUND_ROBIN = "round_robin"
    WEIGHTED = "weighted"  # proportional share: the combined block furthest behind its weight
    DEADLINE = "deadline"  # earliest deadline first, over the queued and launched tasks of all models


class Wait(Enum):
    """Whether a combined block waits for members that have no input yet."""

    NONE = "none"  # TOP: never
    ALL = "all"  # synchronised rivals (POS): until every member's task has arrived
    TIMEOUT = "timeout"  # as ALL, for at most `wait_timeout_us`


class PlacementPolicy(Enum):
    """How the resource of a block is chosen; see `stageloom.shared.engine.placement`."""

    FIXED = "fixed"  # the plan names it
    EAGER = "eager"
    DM = "dm"
    DMDA = "dmda"
    HEFT = "heft"


class IssueOrder(Enum):
    """In which order the launches of a step are issued, where streams and waits leave that open."""

    DEVICE = "device"  # by what the executor measured of them
    SCHEDULE = "schedule"  # as the schedule lists them, on as many streams as it names


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlan:
    """The bounds of one model's queue."""

    rule: QueueRule = QueueRule.REFUSE_NEWEST
    max_tasks: int = 256
    max_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """How one model is cut, repeated, batched and served."""

    name: str  # what applications call it
    artifact: Digest
    cuts: tuple[int, ...] = ()  # ascending, among the artifact's base cuts; () is one block
    replicas: int = 1
    batch: int = 1  # tasks per instance at most
    batch_max_delay_us: int = 0  # how long the oldest task may wait for others to join its batch
    launch_interval_us: int = 0  # per task; 0 launches as soon as slot 0 is free
    work_conserving: bool = True  # launch before the interval is over when a lane is idle; False is TOP's
    weight: int = 1  # share under StepChoice.WEIGHTED
    queue: QueuePlan = QueuePlan()
    splits: tuple[Split, ...] = ()  # ascending; blocks are scheduled over the graph that they make

    @property
    def num_blocks(self) -> int:
        """Blocks of this model."""
        return len(self.cuts) + 1


class Member(NamedTuple):
    """One sub-block of a combined block."""

    model: int
    replica: int
    block: int


class Place(NamedTuple):
    """A further resource that may run a combined block, and what runs it there."""

    resource: int
    executor: int = 0
    schedule: Schedule | None = None  # None: the block's own


@dataclass(frozen=True)
class CombinedBlock:
    """Blocks that are scheduled together, how, by which of the plan's executors, and on which resources.

    `further_places` are for plans whose placement is not fixed.
    """

    members: tuple[Member, ...]
    schedule: Schedule
    executor: int = 0
    resources: tuple[int, ...] = ()  # ascending; empty: on any
    further_places: tuple[Place, ...] = ()

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """The schedule's stage string on the wire; plans that differ in launch intervals share the block."""
        return tuple(to_tokens(self.schedule))

    @cached_property
    def variants(self) -> tuple[tuple[int, Schedule], ...]:
        """The ways to run it, as pairs of an executor's number and a schedule; its own comes first."""
        further = ((place.executor, place.schedule or self.schedule) for place in self.further_places)
        return ((self.executor, self.schedule), *further)

    @cached_property
    def variant_on(self) -> dict[int, int]:
        """Per resource that is named the number of the variant that it runs."""
        own = dict.fromkeys(self.resources, 0)
        return own | {place.resource: variant for variant, place in enumerate(self.further_places, 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """What the executor is told; a field that an executor does not know is refused by it, never ignored."""

    name: str = "onnx"
    intra_op_threads: int = 1  # onnx: threads inside one operator
    precision: str = "fp32"
    issue: IssueOrder = IssueOrder.DEVICE  # torch_cuda


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """Cores that some lanes have for themselves; without a list the system chooses the cores."""

    cores: tuple[int, ...] = ()  # ascending
    memory: int = 0  # its memory node; 0 is the host's
    executor: int | None = None
    """By number what runs the groups that schedules put here; None: what runs the rest of their block."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One device's plan. `lanes` steps of different combined blocks may overlap.

    Combined blocks are run by `executor`, or by the one of `executors` that they name. Where resources are
    named, each lane belongs to one, and its threads keep to that one's cores.
    """

    models: tuple[ModelPlan, ...]
    combined: tuple[CombinedBlock, ...]
    lanes: int = 1
    run_ahead: int = 2  # steps in flight per lane at most
    step_choice: StepChoice = StepChoice.RATIO
    wait: Wait = Wait.NONE
    wait_timeout_us: int = 0
    max_skips: int = 8  # a combined block passed over this often is overdue
    barrier: Barrier = Barrier.FULL
    executor: ExecutorOptions = ExecutorOptions()
    further_executors: tuple[ExecutorOptions, ...] = ()
    resources: tuple[Resource, ...] = ()
    lane_resources: tuple[int, ...] = ()  # per lane its resource; empty without resources [lanes]
    placement: PlacementPolicy = PlacementPolicy.FIXED

    @property
    def executors(self) -> tuple[ExecutorOptions, ...]:
        """All that its combined blocks name, by number."""
        return (self.executor, *self.further_executors)

    def resource_of(self, lane: int) -> int | None:
        """The resource of a lane; None without resources.

        Steps that are no lane's, such as those of a measurement, have a number behind all lanes: they run
        where the first lane does.
        """
        if not self.lane_resources:
            return None
        return self.lane_resources[lane if lane < len(self.lane_resources) else 0]

    def cores_of(self, lane: int) -> tuple[int, ...]:
        """The cores that a lane may run on; empty where the system chooses."""
        resource = self.resource_of(lane)
        return () if resource is None else self.resources[resource].cores

    def memory_of(self, lane: int) -> int:
        """The memory node of a lane's resource."""
        resource = self.resource_of(lane)
        return 0 if resource is None else self.resources[resource].memory

    @property
    def places(self) -> bool:
        """Whether a resource is chosen for a block whenever the block can run."""
        return self.placement is not PlacementPolicy.FIXED

    @property
    def version(self) -> int:
        """The oldest plan format that can express it: plans of version 1 and 2 keep their digests."""
        if (
            any(model.splits for model in self.models)
            or any(names_resources(schedule) for block in self.combined for _, schedule in block.variants)
            or any(resource.executor is not None for resource in self.resources)
        ):
            return PLAN_VERSION
        named = self.further_executors or self.resources or self.lane_resources or self.places
        bound = any(b.executor or b.resources or b.further_places for b in self.combined)
        return 2 if named or bound else 1

    @cached_property
    def wire(self) -> bytes:
        """Canonical msgpack; the digest is taken over these bytes."""
        return canonical(_to_lists(self))

    @cached_property
    def digest(self) -> Digest:
        """Digest of `wire`."""
        return digest_bytes([self.wire])

    @cached_property
    def structure(self) -> Digest:
        """Digest of the plan but for its launch intervals: what a trial compares, and what is proven.

        Intervals follow the load and are guarded whenever they change.
        """
        return replace(self, models=tuple(replace(one, launch_interval_us=0) for one in self.models)).digest


def _to_lists(plan: Plan) -> list[Any]:
    first = plan.version == 1
    lists = [
        plan.version,
        [_model_to_list(model) for model in plan.models],
        [
            [
                [part for m in c.members for part in m],
                c.tokens,
                *([] if first else [c.executor, list(c.resources)]),
                *([[_place_to_list(place) for place in c.further_places]] if c.further_places else []),
            ]
            for c in plan.combined
        ],
        [
            plan.lanes,
            plan.run_ahead,
            plan.step_choice.value,
            plan.wait.value,
            plan.wait_timeout_us,
            plan.max_skips,
            plan.barrier.value,
        ],
        _executor_to_list(plan.executor),
    ]
    if not first:
        further = [_executor_to_list(executor) for executor in plan.further_executors]
        lists += [further, [list(one.cores) for one in plan.resources], list(plan.lane_resources)]
    memories = [one.memory for one in plan.resources]
    splits = plan.version == PLAN_VERSION
    if splits or plan.places or any(memories):  # left out as long as they have their defaults
        lists += [plan.placement.value, memories]
    if splits:
        executors = [-1 if one.executor is None else one.executor for one in plan.resources]
        lists += [executors, [_splits_to_list(model.splits) for model in plan.models]]
    return lists


_AXES = tuple(Axis)
_LONGER = 3


def _splits_to_list(splits: tuple[Split, ...]) -> list[int]:
    """Per split one number for the operators skipped, the further operators up to 3, and the axis; where
    there are 3, how many beyond; the boundary. Most take two to four bytes."""
    flat, behind = [], 0
    for one in splits:
        further = one.last - one.first
        head = (one.first - behind) * (_LONGER + 1) + min(further, _LONGER)
        flat.append(head * len(_AXES) + _AXES.index(one.axis))
        flat += [further - _LONGER] if further >= _LONGER else []
        flat.append(one.boundary)
        behind = one.last + 1
    return flat


def _splits_from_list(flat: Any) -> tuple[Split, ...]:
    if len(flat) > 3 * MAX_SPLITS:
        raise PlanError(f"a model has more than {MAX_SPLITS} splits")
    numbers = iter(flat)
    found: list[Split] = []
    behind = 0
    for head in numbers:
        rest, axis = divmod(_bounded("split", head, 0, 12 * MAX_OPERATORS), len(_AXES))
        gap, further = divmod(rest, _LONGER + 1)
        if further == _LONGER:
            further += _bounded("split operators", next(numbers, None), 0, MAX_OPERATORS - 1)
        boundary = _bounded("boundary", next(numbers, None), 1, MAX_EXTENT)
        found.append(Split(behind + gap, behind + gap + further, _AXES[axis], boundary))
        behind += gap + further + 1
    return tuple(found)


def _place_to_list(place: Place) -> list[Any]:
    own = () if place.schedule is None else tuple(to_tokens(place.schedule))
    return [place.resource, place.executor, own]


def _executor_to_list(executor: ExecutorOptions) -> list[Any]:
    issue = [] if executor.issue is IssueOrder.DEVICE else [executor.issue.value]
    return [executor.name, executor.intra_op_threads, executor.precision, *issue]


def _model_to_list(model: ModelPlan) -> list[Any]:
    queue = model.queue
    return [
        model.name,
        digest_to_raw(model.artifact),
        list(model.cuts),
        [model.replicas, model.batch, model.batch_max_delay_us, model.launch_interval_us],
        model.work_conserving,
        model.weight,
        [queue.rule.value, queue.max_tasks, queue.max_bytes],
    ]


def decode_plan(wire: bytes, expected: Digest | None = None) -> Plan:
    """Rebuild a plan and check every field's type and bound; graphs are checked by
    `stageloom.shared.bound.bind`.

    Raises:
        PlanError: the bytes are too many, no plan, not canonical, or have another digest than `expected`.
    """
    if len(wire) > MAX_PLAN_BYTES:
        raise PlanError(f"a plan of {len(wire)} bytes is larger than {MAX_PLAN_BYTES}")
    if expected is not None and digest_bytes([wire]) != expected:
        raise PlanError(
            f"the plan's bytes do not have the digest {expected[:12]}", remedy="push the plan again"
        )
    try:
        lists = msgpack.unpackb(wire, strict_map_key=True, max_array_len=MAX_PLAN_BYTES, max_map_len=0)
        plan = _from_lists(lists)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise PlanError(f"not a plan: {str(error)[:200]}", remedy="push the plan again") from error
    if plan.wire != wire:
        raise PlanError("the plan is not in canonical form", remedy="push the plan again")
    return plan


def _from_lists(lists: Any) -> Plan:
    version, models, combined, rules, executor, *beside = lists
    if type(version) is not int or not 1 <= version <= PLAN_VERSION:
        raise PlanError(
            f"plan format {_short(version)} is none of 1 to {PLAN_VERSION}", remedy="upgrade the older side"
        )
    further, resources, lane_resources, *placed = beside if version > 1 else ((), (), ())
    placement, memories, *split = placed or (PlacementPolicy.FIXED.value, [0] * len(resources))
    run_by, splits = split if version == PLAN_VERSION else ([-1] * len(resources), [[]] * len(models))
    lanes, run_ahead, step_choice, wait, wait_timeout_us, max_skips, barrier = rules
    if len(further) >= MAX_EXECUTORS or len(resources) > MAX_LANES or len(lane_resources) > MAX_LANES:
        raise PlanError("a plan's executors, resources or lanes are too many")
    if len(models) > MAX_MODELS or len(combined) > MAX_COMBINED:
        raise PlanError(f"a plan of {len(models)} models and {len(combined)} combined blocks is too large")
    return Plan(
        models=tuple(starmap(_model_from_list, zip(models, splits, strict=True))),
        combined=_all_combined(combined, len(models)),
        lanes=_bounded("lanes", lanes, 1, MAX_LANES),
        run_ahead=_bounded("run_ahead", run_ahead, 1, 64),
        step_choice=StepChoice(step_choice),
        wait=Wait(wait),
        wait_timeout_us=_bounded("wait_timeout_us", wait_timeout_us, 0, 60_000_000),
        max_skips=_bounded("max_skips", max_skips, 1, 1 << 20),
        barrier=Barrier(barrier),
        executor=_executor_from_list(executor),
        further_executors=tuple(map(_executor_from_list, further)),
        resources=tuple(starmap(_resource_from_lists, zip(resources, memories, run_by, strict=True))),
        lane_resources=tuple(_bounded("a lane's resource", one, 0, MAX_LANES) for one in lane_resources),
        placement=PlacementPolicy(placement),
    )


def _executor_from_list(row: Any) -> ExecutorOptions:
    name, intra_op_threads, precision, *issue = row
    (order,) = issue or [IssueOrder.DEVICE.value]
    return ExecutorOptions(
        name=_text("executor", name, 64),
        intra_op_threads=_bounded("intra_op_threads", intra_op_threads, 1, 256),
        precision=_text("precision", precision, 16),
        issue=IssueOrder(order),
    )


def _resource_from_lists(cores: Any, memory: Any, executor: Any) -> Resource:
    if len(cores) > MAX_CORES:
        raise PlanError(f"a resource of {len(cores)} cores is too large")
    return Resource(
        cores=tuple(_bounded("core", core, 0, MAX_CORES - 1) for core in cores),
        memory=_bounded("memory node", memory, 0, MAX_MEMORIES - 1),
        executor=None if executor == -1 else _bounded("executor", executor, 0, MAX_EXECUTORS - 1),
    )


def _model_from_list(row: Any, splits: Any) -> ModelPlan:
    name, artifact, cuts, (replicas, batch, delay, interval), work_conserving, weight, queue = row
    rule, max_tasks, max_bytes = queue
    if type(work_conserving) is not bool:
        raise PlanError("work_conserving is not a boolean")
    return ModelPlan(
        name=_text("model name", name, 128),
        artifact=digest_from_raw(artifact),
        cuts=tuple(_bounded("cut", cut, 1, 1 << 20) for cut in cuts),
        replicas=_bounded("replicas", replicas, 1, 64),
        batch=_bounded("batch", batch, 1, 1024),
        batch_max_delay_us=_bounded("batch_max_delay_us", delay, 0, 60_000_000),
        launch_interval_us=_bounded("launch_interval_us", interval, 0, 3_600_000_000),
        work_conserving=work_conserving,
        weight=_bounded("weight", weight, 1, 1 << 20),
        queue=QueuePlan(
            rule=QueueRule(rule),
            max_tasks=_bounded("max_tasks", max_tasks, 1, 1 << 24),
            max_bytes=_bounded("max_bytes", max_bytes, 1, 1 << 40),
        ),
        splits=_splits_from_list(splits),
    )


def _all_combined(rows: Any, num_models: int) -> tuple[CombinedBlock, ...]:
    left = MAX_PLAN_OPERATORS
    combined = []
    for row in rows:
        block = _combined_from_list(row, num_models)
        left -= sum(num_operators(schedule) for _, schedule in block.variants)
        if left < 0:
            raise PlanError(f"the schedules of a plan expand to more than {MAX_PLAN_OPERATORS} operators")
        combined.append(block)
    return tuple(combined)


def _combined_from_list(row: Any, num_models: int) -> CombinedBlock:
    flat, tokens, executor, resources, *further = row if len(row) != 2 else (*row, 0, ())
    places = further[0] if len(further) == 1 else ()
    if len(further) > 1 or max(len(resources), len(places)) > MAX_LANES:
        raise PlanError("a combined block names too many resources")
    if len(flat) % 3:
        raise PlanError("the members of a combined block are not triples")
    members = tuple(
        Member(*(_bounded("member", part, 0, 1 << 20) for part in flat[i : i + 3]))
        for i in range(0, len(flat), 3)
    )
    if unknown := [m for m in members if m.model >= num_models]:
        raise PlanError(f"a combined block names model {unknown[0].model} of a plan with {num_models}")
    return CombinedBlock(
        members,
        from_tokens(tokens),
        _bounded("executor", executor, 0, MAX_EXECUTORS),
        tuple(_bounded("resource", one, 0, MAX_LANES) for one in resources),
        tuple(map(_place_from_list, places)),
    )


def _place_from_list(row: Any) -> Place:
    resource, executor, tokens = row
    return Place(
        _bounded("resource", resource, 0, MAX_LANES),
        _bounded("executor", executor, 0, MAX_EXECUTORS),
        from_tokens(tokens) if tokens else None,
    )


def _bounded(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise PlanError(f"{name} is {_short(value)}, outside {low}..{high}")
    return value


def _short(value: Any) -> str:
    """A decoded value for a message: never the text of something large or deep."""
    return str(value) if type(value) in (int, bool, float) else f"a {type(value).__name__}"


def _text(name: str, value: Any, longest: int) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= longest or not value.isprintable():
        raise PlanError(f"{name} is not a printable string of at most {longest} characters")
    return value


def plan_text(plan: Plan) -> str:
    """The plan as a person reads it: one line per model, one per combined block with its stage string."""
    lines = [
        f"plan {plan.digest[:12]}  executor={_executor_text(plan.executor)} "
        f"lanes={plan.lanes} run_ahead={plan.run_ahead} "
        f"step_choice={plan.step_choice.value} wait={plan.wait.value} wait_timeout_us={plan.wait_timeout_us} "
        f"max_skips={plan.max_skips} "
        f"barrier={plan.barrier.value}" + (f" placement={plan.placement.value}" if plan.places else "")
    ]
    for number, executor in enumerate(plan.further_executors, 1):
        lines.append(f"executor {number}  {_executor_text(executor)}")
    for number, resource in enumerate(plan.resources):
        lanes = [str(lane) for lane, own in enumerate(plan.lane_resources) if own == number]
        lines.append(
            f"resource {number}  cores={','.join(map(str, resource.cores)) or 'any'} lanes={','.join(lanes)}"
            + (f" memory={resource.memory}" if resource.memory else "")
            + ("" if resource.executor is None else f" executor={resource.executor}")
        )
    for model in plan.models:
        queue = model.queue
        lines.append(
            f"model {model.name}  artifact={model.artifact} blocks={model.num_blocks} "
            f"cuts={','.join(map(str, model.cuts)) or '-'} replicas={model.replicas} batch={model.batch} "
            f"interval_us={model.launch_interval_us} delay_us={model.batch_max_delay_us} "
            f"strict={'no' if model.work_conserving else 'yes'} weight={model.weight} "
            f"queue={queue.rule.value}:{queue.max_tasks} tasks:{queue.max_bytes} bytes"
            + (f" splits={splits_text(model.splits)}" if model.splits else "")
        )
    for block in plan.combined:
        members = " ".join(f"{plan.models[m.model].name}#{m.replica}.{m.block}" for m in block.members)
        run_by = f" executor={block.executor}" if len(plan.executors) > 1 else ""
        if block.resources:
            run_by += f" on={','.join(map(str, block.resources))}"
        further = "".join(
            f"  @{place.resource} executor={place.executor}"
            + (f" {to_string(place.schedule)}" if place.schedule else "")
            for place in block.further_places
        )
        lines.append(f"combined {members}{run_by}  {to_string(block.schedule)}{further}")
    return "\n".join(lines) + "\n"


def _executor_text(executor: ExecutorOptions) -> str:
    issue = "" if executor.issue is IssueOrder.DEVICE else f" issue={executor.issue.value}"
    return f"{executor.name} threads={executor.intra_op_threads} precision={executor.precision}{issue}"
