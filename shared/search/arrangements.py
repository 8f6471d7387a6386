"""How lanes may share the cores of a device or its GPU, and how each model runs in them: what is tried, and
its plan.

Every lane keeps to its cores: its thread stays where its weights are cached. The task whose deadline comes
first goes first, whatever its model. A step is never interrupted, so a long model can hold up another one's
tasks; it may then be cut into blocks, between which a task goes that is due sooner, or run with several
threads, on fewer lanes. Or models that are short beside all others are *express*: one lane more, which keeps
to no core, runs these alone, and the system interrupts a long step for the moment that this takes. On a GPU
models stay whole, and some lanes keep it busy: while one waits for the host another computes. `auto` and
re-plans choose among these.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

from stageloom.shared.graph import Graph
from stageloom.shared.plan import MAX_LANES, ExecutorOptions, Plan, QueueRule, Resource, StepChoice
from stageloom.shared.search.compose import ModelChoice, Rules, compose

CLEARLY: Final = 0.93
"""An executor takes the place of another if it takes at most this part of its time: less may be noise, above
all on a virtual machine with neighbours. Chosen."""
URGENCY: Final = 5.0
"""A task is taken to be wanted within this multiple of its own time,"""
LEAST_PATIENCE_S: Final = 0.020
"""and never sooner than this: what sits around a model, cameras and networks, has its own delays."""
BLOCK_SHARES: Final = (1.0, 0.5, 0.25)
"""What a block may take at the most, of the shortest patience of any model: what is tried."""
BORDERS_S: Final[Mapping[str, float]] = {"onnx": 0.0004, "openvino": 0.0010}
"""What a border adds to a model's time, by executor, as kernels begin anew and tensors change their layout:
`benchmarks.host_executors` saw 0.12 to 0.21 and 0.39 to 0.46 ms on one machine, on networks of 16 to 77 ms,
and 0.4 to 1.5 and 1.1 to 2.7 ms on another, on networks of 13 to 64."""
_BORDER_S: Final = 0.0005  # on other executors
UNEVEN: Final = 0.3
"""By this part of their mean the longest block of a model is taken to be longer: blocks have equal shares of
the arithmetic, which is not time. An assumption; the device does not measure blocks."""
EXPRESS_MOST_S: Final = 0.005
"""What an express model may take: so long what it interrupts is held up. Chosen, as is the leap."""
EXPRESS_LEAP: Final = 4.0
"""Models are express where the next longer one takes so many times as long as the longest of them."""
STEP_S: Final = 0.0003
"""What a step takes beside its inference."""
HANDOVER_S: Final = 0.002
"""What a task is taken to spend on its way from a client and back, of the time in which it is wanted."""
ON_GPU: Final = ("torch_cuda", "onnx_cuda")
"""Executors that compute on a GPU: a plan has one of them for all of its blocks."""
GPU_LANES: Final = 4
"""Of a plan on a GPU. So many independent graphs on streams of their own ran 2.5 to 2.9 times as fast as one
after another on an H200 (`docs/results/README.md`, "On a GPU"); the engine's lanes were not timed there."""
GPU_BATCH: Final = 8
"""The largest batch of such a plan. Tasks that wait already share a step; none waits for others."""
_BATCH_SHARE: Final = 0.5  # of the shortest patience: what a batch may take, were it no faster than its tasks
BY_DEADLINE: Final = Rules(step_choice=StepChoice.DEADLINE, max_skips=1 << 10, run_ahead=1)
"""The earliest deadline first over all models. Blocks of a cut model are often passed over for tasks that are
due sooner; and what waits behind a step cannot be overtaken."""

Times = Mapping[ExecutorOptions, float]
"""Seconds of one run of a whole model, by executor; infinity where it cannot run there."""


@dataclass(frozen=True)
class Arrangement:
    """How lanes share the cores, and how each model runs in them."""

    lanes: int
    width: int  # cores of a lane; 0: the lanes share the GPU
    blocks: tuple[int, ...]  # by model
    run_by: tuple[ExecutorOptions, ...]  # by model
    batches: tuple[int, ...] = ()  # by model, for those that can have one and have none; empty: none
    express: frozenset[int] = frozenset()  # models of the express lane, which then is there


def arrangements(
    known: Sequence[Times],
    most_blocks: Sequence[int],
    default: ExecutorOptions,
    cores: int,
    patience_s: Sequence[float | None],
) -> Iterator[Arrangement]:
    """Those that are tried, the simpler ones first: whole models on a lane per core, the same with an express
    lane, cut models, wider lanes, a GPU.

    By model: what is known of it, into how many blocks it may be cut, and how long a task of it may take in
    all, where that is known. Lanes of several cores only where some model was measured with their threads,
    and a GPU where all models run on it.
    """
    yield from _on_cores(known, most_blocks, default, cores, patience_s)
    yield from _on_gpu(known, patience_s)


def _on_cores(
    known: Sequence[Times],
    most_blocks: Sequence[int],
    default: ExecutorOptions,
    cores: int,
    patience_s: Sequence[float | None],
) -> Iterator[Arrangement]:
    for width in widths(cores):
        lanes = min(cores // width, MAX_LANES)
        usable = [
            {
                options: taken
                for options, taken in one.items()
                if options.intra_op_threads in (1, width) and options.name not in ON_GPU
            }
            for one in known
        ]
        if width > 1 and not any(o.intra_op_threads == width for one in usable for o in one):
            continue
        single = replace(default, intra_op_threads=1)
        whole = tuple(fastest(one, single) for one in usable)
        seconds = [one.get(options) for one, options in zip(usable, whole, strict=True)]
        sets = (frozenset[int](), *express_models(seconds, lanes))
        yield from (Arrangement(lanes, width, (1,) * len(known), whole, express=one) for one in sets)
        for express in sets:
            seen = {(1,) * len(known)}
            held_up_s = [None if at in express else one for at, one in enumerate(patience_s)]
            for share in BLOCK_SHARES:
                counts = tuple(map(min, block_counts(seconds, held_up_s, share), most_blocks))
                if counts in seen:
                    continue
                seen.add(counts)
                run_by = tuple(
                    fastest({o: with_borders(o, t, number) for o, t in one.items()}, single)
                    for one, number in zip(usable, counts, strict=True)
                )
                yield Arrangement(lanes, width, counts, run_by, express=express)


def express_models(seconds: Sequence[float | None], lanes: int) -> Iterator[frozenset[int]]:
    """Models that are short, by a leap, beside all others; `seconds` by model, if known. Fewest first."""
    if lanes >= MAX_LANES or any(one is None for one in seconds):
        return
    order = sorted(range(len(seconds)), key=lambda model: seconds[model] or 0.0)
    taken = [seconds[model] or 0.0 for model in order]
    for number, (longest, next_s) in enumerate(pairwise(taken), start=1):
        if longest <= EXPRESS_MOST_S and next_s >= EXPRESS_LEAP * longest:
            yield frozenset(order[:number])


def _shared_on_gpu(known: Sequence[Times]) -> list[ExecutorOptions]:
    """Ways on a GPU in which all models run."""
    return [
        options
        for options in (known[0] if known else ())
        if options.name in ON_GPU and all(one.get(options, math.inf) < math.inf for one in known)
    ]


def usable_times(known: Sequence[Times]) -> list[Times]:
    """What is known, without ways on a GPU that some model cannot run in: no plan has those."""
    shared = _shared_on_gpu(known)
    return [
        {options: taken for options, taken in one.items() if options.name not in ON_GPU or options in shared}
        for one in known
    ]


def _on_gpu(known: Sequence[Times], patience_s: Sequence[float | None]) -> Iterator[Arrangement]:
    """Whole models, each way that all of them were measured in."""
    shared = _shared_on_gpu(known)
    longest_s = _BATCH_SHARE * min((one for one in patience_s if one is not None), default=0.0)
    for options in shared:
        batches = tuple(batch_within(one[options], longest_s) for one in known)
        yield Arrangement(GPU_LANES, 0, (1,) * len(known), (options,) * len(known), batches)


def batch_within(seconds: float, longest_s: float) -> int:
    """The largest batch, a power of two, that takes at most `longest_s` though it were no faster than its
    tasks one by one, of `seconds` each."""
    batch = 1
    while batch < GPU_BATCH and 2 * batch * seconds <= longest_s:
        batch *= 2
    return batch


def widths(cores: int) -> list[int]:
    """How many cores a lane may have: a few numbers that leave no core over, 1 first."""
    return [1, *(one for one in sorted({2, 4, cores}) if 1 < one <= cores and not cores % one)]


def patience_of(times: Times) -> float | None:
    """How long a task of the model may take in all, where none has a deadline; None: nothing is known."""
    shortest = min((t for o, t in times.items() if o.intra_op_threads == 1), default=math.inf)
    return max(URGENCY * shortest, LEAST_PATIENCE_S) if shortest < math.inf else None


def with_borders(options: ExecutorOptions, seconds: float, blocks: int) -> float:
    return seconds + BORDERS_S.get(options.name, _BORDER_S) * (blocks - 1)


def likely_blocks_s(options: ExecutorOptions, seconds: float, blocks: int) -> tuple[float, ...]:
    """What each block of a model may take, in some order: it is known of the whole model alone."""
    mean_s = with_borders(options, seconds, blocks) / blocks
    ends = max(blocks - 1, 1)
    return tuple(mean_s * (1.0 + UNEVEN * (2 * at - (blocks - 1)) / ends) for at in range(blocks))


def arranged_plan(models: Sequence[ModelChoice], found: Arrangement, cores: Sequence[int]) -> Plan:
    """The plan of an arrangement."""
    cut = [
        replace(
            one,
            partition=even_cuts(one.graph, number),
            replicas=1 if model in found.express else found.lanes,
            batch=batch if one.graph.batchable and one.batch == 1 else one.batch,
            queue=replace(one.queue, rule=QueueRule.DEADLINE),
        )
        for model, (one, number, batch) in enumerate(
            zip(models, found.blocks, found.batches or (one.batch for one in models), strict=True)
        )
    ]
    options = list(dict.fromkeys(found.run_by))
    plan = compose(
        cut,
        scheduler="sequential",
        lanes=found.lanes,
        executor=options[0],
        rules=BY_DEADLINE,
    )
    if not found.width:
        return plan
    ends = range(found.width, found.lanes * found.width + 1, found.width)
    resources = [Resource(cores=tuple(cores[end - found.width : end])) for end in ends]
    own, express = tuple(range(found.lanes)), (found.lanes,)
    return replace(
        plan,
        combined=tuple(
            replace(
                block,
                executor=options.index(found.run_by[block.members[0].model]),
                resources=(express if block.members[0].model in found.express else own)
                if found.express
                else (),
            )
            for block in plan.combined
        ),
        lanes=found.lanes + bool(found.express),
        further_executors=tuple(options[1:]),
        resources=(*resources, Resource()) if found.express else tuple(resources),
        lane_resources=tuple(range(found.lanes + bool(found.express))),
    )


def unpinned(plan: Plan) -> Plan:
    """The plan with lanes that keep to no core; an express lane stays one that runs its models alone."""
    express = bool(express_of(plan))
    return replace(
        plan,
        resources=tuple(replace(one, cores=()) for one in plan.resources) if express else (),
        lane_resources=plan.lane_resources if express else (),
    )


def express_of(plan: Plan) -> frozenset[int]:
    """Models that a plan runs on the processor in lanes of their own: those without cores beside lanes that
    have some or, where no lane has any, as under a quota, the last one."""
    resources = {plan.lane_resources[lane] for lane in _lanes_apart(plan)}
    if not resources:
        return frozenset()
    elsewhere = {
        member.model
        for block in plan.combined
        if not resources.issuperset(block.resources or range(len(plan.resources)))
        or plan.executors[block.executor].name in ON_GPU
        for member in block.members
    }
    return frozenset(range(len(plan.models))) - elsewhere


def computing_lanes(plan: Plan) -> int:
    """Its lanes, but for an express lane, which adds nothing to what the device computes."""
    return plan.lanes - len(_lanes_apart(plan)) if express_of(plan) else plan.lanes


def _lanes_apart(plan: Plan) -> list[int]:
    """Lanes that may be express. Where none has cores, the last one, if no block may run both there and in
    another."""
    coreless = [lane for lane in range(plan.lanes) if not plan.cores_of(lane)]
    if len(coreless) < plan.lanes:
        return coreless
    *others, last = plan.lane_resources or (0,)
    everywhere = tuple(range(len(plan.resources)))
    used = {block.resources or everywhere for block in plan.combined}
    alone = others and last not in others and all(last not in one or one == (last,) for one in used)
    return coreless[-1:] if alone else []


def block_counts(
    seconds: Sequence[float | None], patience_s: Sequence[float | None], share: float
) -> list[int]:
    """Into how many blocks each model is to be cut; `seconds` and `patience_s` per model, if known.

    A block takes at most `share` of the shortest patience of any model. Returns [num_models].
    """
    longest_s = share * min((one for one in patience_s if one is not None), default=math.inf)
    return [1 if one in (None, math.inf) else max(1, math.ceil(one / longest_s)) for one in seconds]


def even_cuts(graph: Graph, blocks: int) -> tuple[int, ...]:
    """Base cuts for so many blocks of about equal shares of the arithmetic, as far as there are such cuts.

    Blocks of a model without arithmetic, as of trees, have about equal shares of the operators.
    """
    if blocks < 2 or not graph.base_cuts:
        return ()
    work = [operator.flop for operator in graph.operators]
    done = list(accumulate(work if any(work) else [1] * len(work)))
    return tuple(
        sorted(
            {
                min(graph.base_cuts, key=lambda cut: abs(done[cut - 1] - done[-1] * part / blocks))
                for part in range(1, blocks)
            }
        )
    )


def fastest(times_s: Times, default: ExecutorOptions) -> ExecutorOptions:
    """The executor with the shortest time, `default` unless another one is clearly faster."""
    finite = {one: taken for one, taken in times_s.items() if taken < math.inf}
    if not finite:
        return default
    best = min(finite, key=lambda one: (finite[one], one.name, one.intra_op_threads, one.precision))
    known_s = times_s.get(default)
    return best if known_s is None or finite[best] <= CLEARLY * known_s else default
