"""Seeded random graphs, schedules and plans, and the settings of every property test beside them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from random import Random

from hypothesis import settings
from hypothesis import strategies as st

from stageloom.shared.bitmask import bits
from stageloom.shared.blocks import CombinedGraph
from stageloom.shared.digest import digest_bytes
from stageloom.shared.graph import Graph, Operator, Tensor
from stageloom.shared.ids import Digest, TensorId
from stageloom.shared.launch_list import Barrier
from stageloom.shared.partition import Axis, Split
from stageloom.shared.plan import (
    CombinedBlock,
    ExecutorOptions,
    IssueOrder,
    Member,
    ModelPlan,
    Place,
    PlacementPolicy,
    Plan,
    QueuePlan,
    QueueRule,
    Resource,
    StepChoice,
    Wait,
)
from stageloom.shared.schedule import Launch, Schedule, Stage, StageSchedule, StreamSchedule, stage_of

thorough = settings(max_examples=150, deadline=None, derandomize=True, database=None)
"""Repeatable and without a clock, so that a slow machine never fails a property."""


def random_graph(random: Random, num_ops: int, *, all_cuts: bool = False) -> Graph:
    """A graph with several inputs and outputs, passed-through inputs and operators of two outputs."""
    tensors: list[Tensor] = []

    def tensor() -> TensorId:
        tensors.append(Tensor(f"t{len(tensors)}", random.choice(["float32", "int8"]), (1, len(tensors) + 1)))
        return TensorId(len(tensors) - 1)

    inputs = [tensor() for _ in range(random.randint(1, 2))]
    made = list(inputs)
    operators = []
    for op in range(num_ops):
        reads = random.sample(made, k=min(len(made), random.randint(0 if op else 1, 3)))
        outputs = [tensor() for _ in range(random.choice([1, 1, 1, 2]))]
        made += outputs
        operators.append(
            Operator("Conv", f"op{op}", (op,), tuple(sorted(reads)), tuple(outputs), 2 * op, 4 * op, op)
        )
    read = {t for operator in operators for t in operator.inputs}
    outputs = [t for t in made if t not in read and t not in inputs]
    outputs += [t for t in random.sample(made, k=min(2, len(made))) if t not in outputs]
    places = range(1, num_ops)
    cuts = tuple(places) if all_cuts else tuple(sorted(p for p in places if random.random() < 0.4))
    return Graph(
        name=f"random-{num_ops}",
        tensors=tuple(tensors),
        operators=tuple(operators),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        base_cuts=cuts,
        partitions=(("whole", ()), ("base", cuts)),
        batchable=random.random() < 0.5,
    )


def dag(num_ops: int, edges: Sequence[tuple[int, int]], sizes: Sequence[int] = ()) -> CombinedGraph:
    """A combined graph from its edges; `sizes` are operators per member (default: one member)."""
    offsets = [0]
    for size in sizes or [num_ops]:
        offsets.append(offsets[-1] + size)
    predecessors = [0] * num_ops
    for before, after in edges:
        predecessors[after] |= 1 << before
    starts = tuple(0 for _ in offsets[1:])
    return with_merges(CombinedGraph(tuple(offsets), starts, tuple(predecessors)))


def with_merges(graph: CombinedGraph) -> CombinedGraph:
    """The graph in which operators of one member with the same predecessors, or none, may merge."""
    classes: dict[tuple[int, int], int] = {}
    keys = list(zip(graph.member_of, graph.predecessors, strict=True))
    return replace(graph, merge_class=tuple(classes.setdefault(key, len(classes)) for key in keys))


def random_dag(random: Random, sizes: Sequence[int], density: float = 0.4) -> CombinedGraph:
    """A combined graph of members with `sizes` operators."""
    edges, start = [], 0
    for size in sizes:
        ops = range(start, start + size)
        edges += [(a, b) for b in ops for a in ops if a < b and random.random() < density]
        start += size
    return dag(start, edges, sizes)


def random_topological(random: Random, graph: CombinedGraph) -> list[int]:
    """A random order of all operators that respects the edges."""
    order: list[int] = []
    done = 0
    while len(order) < graph.size:
        ready = [op for op in range(graph.size) if not done >> op & 1 and not graph.predecessors[op] & ~done]
        order.append(random.choice(ready))
        done |= 1 << order[-1]
    return order


def random_stages(random: Random, graph: CombinedGraph) -> StageSchedule:
    """A legal stage schedule: a topological order cut at random, each piece split into components."""
    order = random_topological(random, graph)
    stages = []
    while order:
        size = random.randint(1, min(5, len(order)))
        piece, order = order[:size], order[size:]
        groups = tuple(sorted(tuple(op for op in piece if op in part) for part in components(piece, graph)))
        merge = all(len(group) == 1 for group in groups) and graph.may_merge([g[0] for g in groups])
        merge = merge and random.random() < 0.8
        stages.append(Stage(groups, merge))
    return StageSchedule(tuple(stages))


def components(ops: Sequence[int], graph: CombinedGraph) -> list[set[int]]:
    """The connected components of `ops`, by joining the sets at both ends of every edge."""
    parts = [{op} for op in ops]
    for after in ops:
        for before in bits(graph.predecessors[after]):
            if before in ops:
                left = next(part for part in parts if before in part)
                right = next(part for part in parts if after in part)
                if left is not right:
                    parts.remove(right)
                    left |= right
    return parts


def random_streams(random: Random, graph: CombinedGraph, num_streams: int = 3) -> StreamSchedule:
    """A legal stream schedule: a topological order, each operator on a random stream."""
    return StreamSchedule(
        tuple(Launch(op, random.randrange(num_streams)) for op in random_topological(random, graph))
    )


def random_schedule(random: Random, graph: CombinedGraph) -> Schedule:
    """A legal schedule of either kind."""
    return random_stages(random, graph) if random.random() < 0.5 else random_streams(random, graph)


def set_partitions(ops: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to split `ops` into nonempty sets."""
    if not ops:
        yield []
        return
    first, *rest = ops
    for parts in set_partitions(rest):
        yield [[first], *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], [first, *part], *parts[i + 1 :]]


def all_stage_schedules(num_ops: int) -> Iterator[StageSchedule]:
    """Every stage schedule, legal or not, that runs each operator once."""

    def stages(ops: list[int]) -> Iterator[Stage]:
        for parts in set_partitions(ops):
            yield from orders(parts, ())

    def orders(parts: list[list[int]], groups: tuple[tuple[int, ...], ...]) -> Iterator[Stage]:
        if not parts:
            yield Stage(tuple(sorted(groups)))
            return
        for order in permutations(parts[0]):
            yield from orders(parts[1:], (*groups, order))

    def sequences(pieces: Sequence[list[int]]) -> Iterator[tuple[Stage, ...]]:
        if not pieces:
            yield ()
            return
        for stage in stages(pieces[0]):
            for rest in sequences(pieces[1:]):
                yield (stage, *rest)

    for parts in set_partitions(range(num_ops)):
        for pieces in permutations(parts):
            for chosen in sequences(pieces):
                yield StageSchedule(chosen)


def name_digest(text: str) -> Digest:
    """A digest to stand for an artifact."""
    return digest_bytes([text.encode()])


_op = st.integers(0, 300) | st.integers(0, (1 << 16) - 1)
_group = st.lists(_op, min_size=1, max_size=6).map(tuple)
_ascending = st.integers(0, 1000).flatmap(lambda a: st.integers(1, 9).map(lambda n: tuple(range(a, a + n))))
_stage = st.builds(
    Stage,
    st.lists(_group | _ascending, min_size=1, max_size=4).map(lambda g: tuple(sorted(g))),
    st.booleans(),
)
_placed = st.builds(
    lambda groups, data: stage_of(groups, False, data[: len(groups)]),
    st.lists(_group | _ascending, min_size=1, max_size=4).map(lambda g: tuple(sorted(g))),
    st.lists(st.integers(-1, 15), min_size=4, max_size=4),
)
_splits = st.tuples(st.integers(0, 1000), st.integers(1, 4), st.integers(-1, 2), st.integers(-1, 2)).map(
    lambda drawn: [
        stage
        for op in range(drawn[0], drawn[0] + 3 * drawn[1], 3)
        for stage in (stage_of(((op,), (op + 1,)), False, drawn[2:]), Stage(((op + 2,),)))
    ]
)
_singles = st.integers(0, 1000).flatmap(
    lambda a: st.integers(1, 9).map(lambda n: [Stage(((op,),)) for op in range(a, a + n)])
)
_stages = st.lists((_stage | _placed).map(lambda s: [s]) | _singles | _splits, min_size=1, max_size=8).map(
    lambda parts: StageSchedule(tuple(stage for part in parts for stage in part))
)
_streams = st.lists(st.builds(Launch, _op, st.integers(0, 3) | st.integers(0, 1023)), min_size=1).map(
    lambda launches: StreamSchedule(tuple(launches))
)
schedules: st.SearchStrategy[Schedule] = _stages | _streams
"""Any schedule that can be written, legal for some graph or not."""

_drawn_splits = st.tuples(
    st.integers(0, 3) | st.integers(0, 9000),
    st.integers(0, 5) | st.integers(0, 9000),
    st.sampled_from(Axis),
    st.integers(1, 1 << 20),
)


def spread_splits(rows: Sequence[tuple[int, int, Axis, int]]) -> tuple[Split, ...]:
    """Splits behind each other: operators skipped, further operators, axis and boundary of each."""
    found, behind = [], 0
    for gap, further, axis, boundary in rows:
        found.append(Split(behind + gap, behind + gap + further, axis, boundary))
        behind += gap + further + 1
    return tuple(found)


_us = st.integers(0, 60_000_000)
_models = st.builds(
    ModelPlan,
    name=st.text("abcXYZ0189_-. é模", min_size=1, max_size=20),
    artifact=st.binary(max_size=4).map(lambda raw: digest_bytes([raw])),
    cuts=st.lists(st.integers(1, 1 << 20), max_size=5).map(tuple),
    replicas=st.integers(1, 64),
    batch=st.integers(1, 1024),
    batch_max_delay_us=_us,
    launch_interval_us=_us,
    work_conserving=st.booleans(),
    weight=st.integers(1, 1 << 20),
    queue=st.builds(
        QueuePlan,
        rule=st.sampled_from(QueueRule),
        max_tasks=st.integers(1, 1 << 24),
        max_bytes=st.integers(1, 1 << 40),
    ),
    splits=st.just(()) | st.lists(_drawn_splits, max_size=5).map(lambda rows: spread_splits(rows)),
)


_small = st.integers(0, 16)


def _plans(models: list[ModelPlan]) -> st.SearchStrategy[Plan]:
    members = st.builds(
        Member, st.integers(0, max(0, len(models) - 1)), st.integers(0, 70), st.integers(0, 1 << 20)
    )
    blocks = st.builds(
        CombinedBlock,
        st.lists(members, max_size=4 if models else 0).map(tuple),
        schedules,
        st.sampled_from([0, 0, 0, 1, 16]),
        st.lists(st.integers(0, 16), max_size=2).map(tuple),
        st.lists(st.builds(Place, _small, _small, st.none() | schedules), max_size=2).map(tuple),
    )
    executors = st.builds(
        ExecutorOptions,
        name=st.text("abc_", min_size=1, max_size=9),
        intra_op_threads=st.integers(1, 256),
        precision=st.sampled_from(["fp32", "fp16"]),
        issue=st.sampled_from(IssueOrder),
    )
    return st.builds(
        Plan,
        models=st.just(tuple(models)),
        combined=st.lists(blocks, max_size=4).map(tuple),
        lanes=st.integers(1, 16),
        run_ahead=st.integers(1, 64),
        step_choice=st.sampled_from(StepChoice),
        wait=st.sampled_from(Wait),
        wait_timeout_us=_us,
        max_skips=st.integers(1, 1 << 20),
        barrier=st.sampled_from(Barrier),
        executor=executors,
        further_executors=st.lists(executors, max_size=2).map(tuple),
        resources=st.lists(
            st.builds(
                Resource,
                cores=st.lists(st.integers(0, 1023), max_size=3).map(tuple),
                memory=st.sampled_from([0, 0, 1, 15]),
                executor=st.sampled_from([None, None, 0, 15]),
            ),
            max_size=3,
        ).map(tuple),
        lane_resources=st.lists(st.integers(0, 16), max_size=4).map(tuple),
        placement=st.sampled_from(PlacementPolicy),
    )


plans: st.SearchStrategy[Plan] = st.lists(_models, max_size=4).flatmap(_plans)
"""Any plan that can be written, whether or not it fits graphs."""
