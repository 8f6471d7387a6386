"""How lanes may share the cores of a device or its GPU, and how each model runs in them: what is tried, and
its plan.

Every lane keeps to its cores: its thread stays where its weights are cached. The task whose deadline comes
first goes first, whatever its model. A step is never interrupted, so a long model can hold up another one's
tasks; it may then be cut into blocks, between which a task goes that is due sooner, or run with several
threads, on fewer lanes. On a GPU models stay whole, and some lanes keep it busy: while one waits for the host
another computes. `auto` and re-plans choose among these.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from stageloom.shared.graph import Graph
from stageloom.shared.plan import MAX_LANES, ExecutorOptions, Plan, QueueRule, Resource, StepChoice
from stageloom.shared.search.compose import ModelChoice, Rules, compose

CLEARLY: Final = 0.97
"""An executor takes the place of another if it takes at most this part of its time: less may be noise."""
URGENCY: Final = 5.0
"""A task is taken to be wanted within this multiple of its own time,"""
LEAST_PATIENCE_S: Final = 0.020
"""and never sooner than this: what sits around a model, cameras and networks, has its own delays."""
BLOCK_SHARES: Final = (1.0, 0.5, 0.25)
"""What a block may take at the most, of the shortest patience of any model: what is tried."""
BORDERS_S: Final[Mapping[str, float]] = {"onnx": 0.0002, "openvino": 0.00045}
"""What a border adds to a model's time, by executor, as kernels begin anew: `benchmarks.host_executors` saw
0.12 to 0.21 and 0.39 to 0.46 ms on networks of 16 to 77 ms."""
_BORDER_S: Final = 0.0005  # on other executors
STEP_S: Final = 0.0003
"""What a step takes beside its inference."""
ON_GPU: Final = ("torch_cuda", "onnx_cuda")
"""Executors that compute on a GPU: a plan has one of them for all of its blocks."""
GPU_LANES: Final = 4
"""Of a plan on a GPU. So many independent graphs on streams of their own ran 2.5 to 2.9 times as fast as one
after another on an H200 (`docs/results/README.md`, "On a GPU"); the engine's lanes were not timed there."""
GPU_BATCH: Final = 8
"""The largest batch of such a plan. Tasks that wait already share a step; none waits for others."""
_BATCH_SHARE: Final = 0.5  # of the shortest patience: what a batch may take, were it no faster than its tasks
_OVERDUE_AFTER: Final = 1 << 10
"""Choices in which a block may be passed over: those of a cut model often are, for tasks that are due
sooner."""

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


def arrangements(
    known: Sequence[Times],
    most_blocks: Sequence[int],
    default: ExecutorOptions,
    cores: int,
    patience_s: Sequence[float | None],
) -> Iterator[Arrangement]:
    """Those that are tried, whole models on a lane per core first, on a GPU last.

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
        yield Arrangement(lanes, width, (1,) * len(known), whole)
        seconds = [one.get(options) for one, options in zip(usable, whole, strict=True)]
        seen = {(1,) * len(known)}
        for share in BLOCK_SHARES:
            counts = tuple(map(min, block_counts(seconds, patience_s, share), most_blocks))
            if counts in seen:
                continue
            seen.add(counts)
            run_by = tuple(
                fastest({o: with_borders(o, t, number) for o, t in one.items()}, single)
                for one, number in zip(usable, counts, strict=True)
            )
            yield Arrangement(lanes, width, counts, run_by)


def _on_gpu(known: Sequence[Times], patience_s: Sequence[float | None]) -> Iterator[Arrangement]:
    """Whole models, each way that all of them were measured in."""
    shared = [
        options
        for options in (known[0] if known else ())
        if options.name in ON_GPU and all(one.get(options, math.inf) < math.inf for one in known)
    ]
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


def arranged_plan(models: Sequence[ModelChoice], found: Arrangement, cores: Sequence[int]) -> Plan:
    """The plan of an arrangement."""
    cut = [
        replace(
            one,
            partition=even_cuts(one.graph, number),
            replicas=found.lanes,
            batch=batch if one.graph.batchable and one.batch == 1 else one.batch,
            queue=replace(one.queue, rule=QueueRule.DEADLINE),
        )
        for one, number, batch in zip(
            models, found.blocks, found.batches or (one.batch for one in models), strict=True
        )
    ]
    options = list(dict.fromkeys(found.run_by))
    plan = compose(
        cut,
        scheduler="sequential",
        lanes=found.lanes,
        executor=options[0],
        rules=Rules(
            step_choice=StepChoice.DEADLINE,
            max_skips=_OVERDUE_AFTER,
            run_ahead=1,  # what waits behind a step cannot be overtaken
        ),
    )
    if not found.width:
        return plan
    ends = range(found.width, found.lanes * found.width + 1, found.width)
    return replace(
        plan,
        combined=tuple(
            replace(block, executor=options.index(found.run_by[block.members[0].model]))
            for block in plan.combined
        ),
        further_executors=tuple(options[1:]),
        resources=tuple(Resource(cores=tuple(cores[end - found.width : end])) for end in ends),
        lane_resources=tuple(range(found.lanes)),
    )


def block_counts(
    seconds: Sequence[float | None], patience_s: Sequence[float | None], share: float
) -> list[int]:
    """Into how many blocks each model is to be cut; `seconds` and `patience_s` per model, if known.

    A block takes at most `share` of the shortest patience of any model. Returns [num_models].
    """
    longest_s = share * min((one for one in patience_s if one is not None), default=math.inf)
    return [1 if one in (None, math.inf) else max(1, math.ceil(one / longest_s)) for one in seconds]


def even_cuts(graph: Graph, blocks: int) -> tuple[int, ...]:
    """Base cuts for so many blocks of about equal shares of the arithmetic, as far as there are such cuts."""
    if blocks < 2 or not graph.base_cuts:
        return ()
    done = list(accumulate(operator.flop for operator in graph.operators))
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
