"""Chains of blocks on lanes: the cases of `benchmarks.lanes`, and what one of them gives."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from random import Random
from typing import Any

from benchmarks.lanes.device import StepSeconds, VirtualDevice
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.graph import Graph, Operator, Tensor
from stageloom.shared.ids import Digest, TensorId
from stageloom.shared.plan import QueuePlan
from stageloom.shared.search.compose import ModelChoice, Rules, compose

COMPLETIONS = 300


@dataclass(frozen=True)
class Chains:
    """Models that are chains of equal blocks, every block for itself; no member ever waits for another."""

    lanes: int
    replicas: int
    blocks: int
    run_ahead: int
    models: int
    tasks: int  # in the system at any time
    random_times: bool

    def plan(self) -> BoundPlan:
        graph = chain_graph(self.blocks)
        artifacts = [Digest(f"{index:064x}") for index in range(self.models)]
        choices = [
            ModelChoice(
                name=f"m{index}",
                artifact=artifact,
                graph=graph,
                partition=graph.base_cuts,
                replicas=self.replicas,
                queue=QueuePlan(max_tasks=10_000),
            )
            for index, artifact in enumerate(artifacts)
        ]
        plan = compose(choices, lanes=self.lanes, rules=Rules(run_ahead=self.run_ahead))
        return bind(plan, dict.fromkeys(artifacts, graph))

    def seconds(self) -> StepSeconds:
        """1 s a block, or drawn with a mean of 1 s and a spread from a fifth of that."""
        if not self.random_times:
            return lambda step: 1.0
        random = Random(self.blocks)
        return lambda step: 0.2 + random.expovariate(1.25)

    @property
    def bound_tasks_per_s(self) -> float:
        """What equal times allow: min(L / W, R / max(t_b + t_{b+1})), as adjacent blocks never overlap."""
        adjacent_s = min(self.blocks, 2)
        return min(self.lanes / self.blocks, self.models * self.replicas / adjacent_s)


def chain_graph(blocks: int) -> Graph:
    """Operators one after another; every position between two of them is a base cut."""
    return Graph(
        name="chain",
        tensors=tuple(Tensor(f"t{at}", "float32", (2,)) for at in range(blocks + 1)),
        operators=tuple(
            Operator("Conv", f"op{at}", (at,), (TensorId(at),), (TensorId(at + 1),), 1, 1, fused_unit=at)
            for at in range(blocks)
        ),
        inputs=(TensorId(0),),
        outputs=(TensorId(blocks),),
        base_cuts=tuple(range(1, blocks)),
        batchable=True,
    )


def sweep(
    *, lanes: Sequence[int], replicas: Sequence[int], blocks: Sequence[int], models: Sequence[int]
) -> Iterator[Chains]:
    """All combinations, under few and under many tasks, run-ahead 1 and 2, equal and random times."""
    for of_lanes, of_replicas, of_blocks, of_models, run_ahead, random_times in product(
        lanes, replicas, blocks, models, (1, 2), (False, True)
    ):
        for tasks in dict.fromkeys((of_lanes, 2 * of_lanes, 2 * of_replicas * of_models * of_blocks)):
            if tasks >= of_lanes:
                yield Chains(of_lanes, of_replicas, of_blocks, run_ahead, of_models, tasks, random_times)


def chain_row(case: Chains, completions: int = COMPLETIONS) -> dict[str, Any]:
    use = VirtualDevice(case.plan(), case.seconds(), seed=0, tasks=case.tasks, even=True).run(completions)
    row = {**asdict(case), "busy": use.busy, "could_idle": use.could_idle}
    row["most_skips_over_bound"] = use.beyond_bound
    row["work_per_s"] = use.busy * case.lanes
    saturated = case.tasks >= 2 * case.replicas * case.models * case.blocks
    if not case.random_times and saturated:
        row["rate_over_bound"] = use.completed / use.seconds / case.bound_tasks_per_s
    return row


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    by_depth = {depth: [row for row in rows if row["run_ahead"] == depth] for depth in (1, 2)}
    return {
        "could_idle_max": max(row["could_idle"] for row in rows),
        **{
            f"could_idle_max_run_ahead_{depth}": max(row["could_idle"] for row in own)
            for depth, own in by_depth.items()
        },
        "rate_min": min(row["busy"] for row in rows if row["replicas"] >= row["lanes"]),
        "rate_over_bound": min(row["rate_over_bound"] for row in rows if "rate_over_bound" in row),
        "most_skips_over_bound": max(row["most_skips_over_bound"] for row in rows),
        "lane_more_min": min(lane_more(rows)),
        "cases": float(len(rows)),
    }


def worst_of(rows: Sequence[dict[str, Any]], count: int = 10) -> list[dict[str, Any]]:
    """The rows that decide the figures: the worst by each measure."""
    fed = [row for row in rows if row["replicas"] >= row["lanes"]]
    bounded = [row for row in rows if "rate_over_bound" in row]
    worst = [
        *sorted(rows, key=lambda row: -row["could_idle"])[:count],
        *sorted(rows, key=lambda row: -row["most_skips_over_bound"])[:count],
        *sorted(fed, key=lambda row: row["busy"])[:count],
        *sorted(bounded, key=lambda row: row["rate_over_bound"])[:count],
    ]
    return list({id(row): row for row in worst}.values())


def lane_more(rows: Iterable[dict[str, Any]]) -> list[float]:
    """Throughput with one lane more over that without it, all else equal; in seconds of steps per second.

    Counting work and not tasks leaves out that random times were drawn anew.
    """
    varied = ("replicas", "blocks", "run_ahead", "models", "tasks", "random_times")
    by_case: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for row in rows:
        by_case.setdefault(tuple(row[name] for name in varied), []).append((row["lanes"], row["work_per_s"]))
    return [more / fewer for own in by_case.values() for (_, fewer), (_, more) in pairwise(sorted(own))]
