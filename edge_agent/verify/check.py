"""Compare a model under a schedule with the whole model in onnxruntime: every block border and output.

Section "Executors" of docs/architecture.md explains the comparison. The tests plant defects in an executor
and require that they are found.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from stageloom.edge_agent.executor.base import Executor, TimingRequest
from stageloom.edge_agent.executor.executors import make_executor
from stageloom.edge_agent.verify.engine_run import EngineRun, Place, TaskTrace
from stageloom.edge_agent.verify.inputs import ValueRange
from stageloom.edge_agent.verify.pairs import Differences, Pair, find_pair, seed_model
from stageloom.edge_agent.verify.reduced import LargestAgree
from stageloom.edge_agent.verify.report import Before, Compared, VerifyReport
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.bound import BoundPlan, bind
from stageloom.shared.errors import InputError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, OpId
from stageloom.shared.importer.api import artifact_path, import_model
from stageloom.shared.plan import ExecutorOptions
from stageloom.shared.search.analytic import DeviceRates
from stageloom.shared.search.compose import ModelChoice, compose
from stageloom.shared.search.costs import CostTable
from stageloom.shared.search.registry import reads_costs

if TYPE_CHECKING:
    import numpy as np

Progress: TypeAlias = Callable[[str], None]
DEFAULT_REPEATS = 3
PRECISIONS = ("fp32", "bf16")
"""With a rule of how far results may differ."""

_TIMING = TimingRequest(repeats=3, limit_s=10.0)


def verify(
    model_path: Path,
    schedule: str,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    ranges: Mapping[str, ValueRange] | None = None,
    partition: str | None = None,
    executor: str = "onnx",
    precision: str = "fp32",
    seed: int = 0,
    repeats: int = DEFAULT_REPEATS,
    delays: bool = True,
    progress: Progress = lambda line: None,
) -> VerifyReport:
    """Import a model and compare it under the scheduler `schedule` with the whole model.

    `partition` is by default `paper` where the file carries borders, else `base`, so that there are borders
    to compare. Each of a pair of inputs runs `repeats` times, from the second time on with random `delays`.
    In the `precision` bf16 results are approximate, and may differ by what rounding to it explains.

    Raises:
        ModelError, UnpinnedShape: the model cannot be imported.
        InputError: a range or an option cannot be used. SettingError: no such scheduler.
        ExecutorError: the backend is missing, or fails outside a task.
    """
    with tempfile.TemporaryDirectory(prefix="stageloom-verify-") as name:
        folder = Path(name)
        progress("importing")
        imported = import_model(model_path, shapes=shapes or {}, out_dir=folder)
        artifact = open_artifact(artifact_path(folder, imported.digest))
        return verify_artifact(
            artifact,
            schedule,
            make_executor(executor),
            precision=precision,
            ranges=ranges,
            partition=partition,
            seed=seed,
            repeats=repeats,
            delays=delays,
            progress=progress,
        )


def verify_artifact(
    artifact: Artifact,
    schedule: str,
    executor: Executor,
    *,
    precision: str = "fp32",
    ranges: Mapping[str, ValueRange] | None = None,
    partition: str | None = None,
    seed: int = 0,
    repeats: int = DEFAULT_REPEATS,
    delays: bool = True,
    progress: Progress = lambda line: None,
) -> VerifyReport:
    """Compare an imported model as `verify` does; closes the executor.

    Raises:
        InputError, SettingError, ExecutorError: as `verify`.
    """
    import numpy as np

    if repeats < 1:
        raise InputError(f"{repeats} repeats compare nothing", remedy="use 1 or more")
    if precision not in PRECISIONS:
        raise InputError(
            f"there is no rule for results in {precision!r}", remedy=f"use one of {', '.join(PRECISIONS)}"
        )
    partition = partition or default_partition(artifact.graph)
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="stageloom-verify-") as name:
        folder = Path(name)
        progress("seeding weights")
        seeded = seed_model(artifact, ranges or {}, rng, folder)
        costs = _costs(seeded.artifact, schedule, executor, progress)
        bound = _bind(
            seeded.artifact,
            schedule,
            partition,
            ExecutorOptions(name=executor.name, precision=precision),
            costs,
        )
        progress("drawing inputs")
        places = _places(bound)
        names = [name for _, name in places]
        pair = find_pair(seeded, names, ranges or {}, rng, folder, bfloat16=precision == "bf16")
        del seeded.model  # a parsed copy of all weights, which the engine does not need
        tasks = len(pair.feeds) * repeats
        progress(f"running {tasks} tasks")
        engine_run = EngineRun(executor, bound, seeded.artifact)
        try:
            tally = _run(engine_run, pair, places, seeded.outputs, repeats, rng if delays else None)
        finally:
            engine_run.close()
    blocks = bound.models[0].blocks
    return VerifyReport(
        model=artifact.graph.name,
        scheduler=schedule,
        partition=partition,
        executor=executor.name,
        precision=precision,
        operators=len(artifact.graph.operators),
        blocks=len(blocks),
        seeded_weights=len(seeded.names),
        pairs=pair.drawn,
        inputs=len(pair.feeds),
        runs=tasks,
        compared=tuple(
            Compared(
                tensor=name,
                block=None if place[0] == len(blocks) else place[0],
                difference=difference,
                noise=standard.noise,
                tolerance=standard.tolerance,
                jumps=standard.jumps,
                agrees=difference <= standard.tolerance,
                doubtful=standard.tolerance < difference <= standard.doubtful,
            )
            for place, name, difference, standard in tally.differences.over_inputs()
        ),
        before=tuple(
            Before(kind=head.kind, output=output, tensor=head.reads)
            for output in seeded.outputs
            for head in seeded.endings[output].heads
        ),
        sensitivity=pair.sensitivity,
        largest_agree=tally.largest.share,
        stable=tally.stable,
        failed_tasks=tally.failed,
        reason=tally.reason,
    )


def default_partition(graph: Graph) -> str:
    """Return `paper` if the model's file carries borders, else `base`."""
    return "paper" if "paper" in dict(graph.partitions) else "base"


def _costs(artifact: Artifact, schedule: str, executor: Executor, progress: Progress) -> CostTable:
    """Time the operators in this process if the scheduler reads costs; estimate those that take too long.

    Groups are assumed not to slow each other down: that gives the most parallel schedules that the search may
    find, and those are the ones that can go wrong.
    """
    measured: dict[tuple[Digest, OpId], float] = {}
    if reads_costs(schedule):
        progress("timing operators")
        times = executor.time_operators(artifact, _TIMING, lambda: True)
        measured = {
            (artifact.digest, OpId(op)): time.median_us / 1e6 for op, time in enumerate(times) if time.runs
        }
    return CostTable(measured_s=measured, rates=DeviceRates(contention=0.0))


def _bind(
    artifact: Artifact, schedule: str, partition: str, executor: ExecutorOptions, costs: CostTable
) -> BoundPlan:
    choice = ModelChoice(
        name=artifact.graph.name, artifact=artifact.digest, graph=artifact.graph, partition=partition
    )
    plan = compose([choice], scheduler=schedule, costs=costs, executor=executor)
    return bind(plan, {artifact.digest: artifact.graph})


def _places(bound: BoundPlan) -> tuple[Place, ...]:
    """Return block and name of every tensor to compare: behind every block, and in the task's answer."""
    graph, blocks = bound.models[0].graph, bound.models[0].blocks
    borders = [(block.index, graph.tensors[t].name) for block in blocks for t in block.live_out]
    return (*borders, *((len(blocks), graph.tensors[t].name) for t in graph.outputs))


def _run(
    engine_run: EngineRun,
    pair: Pair,
    places: tuple[Place, ...],
    outputs: tuple[str, ...],
    repeats: int,
    delays: "np.random.Generator | None",
) -> "_Tally":
    """Run all inputs `repeats` times, forwards and backwards: a slot that keeps an old value shows."""
    tally = _Tally(pair, places, outputs)
    inputs = range(len(pair.feeds))
    for repeat in range(repeats):
        order = inputs if repeat % 2 == 0 else inputs[::-1]
        traces = engine_run.run([pair.feeds[which] for which in order], delays if repeat else None)
        for which, trace in zip(order, traces, strict=True):
            tally.add(which, trace)
    return tally


class _Tally:
    """Differences, failures and stability over all traces."""

    def __init__(self, pair: Pair, places: tuple[Place, ...], outputs: tuple[str, ...]) -> None:
        self.differences: Differences[Place] = Differences()
        self.largest = LargestAgree()
        self.stable = True
        self.failed = 0
        self.reason = ""
        self._pair = pair
        self._places = places
        self._outputs = outputs  # of the model as it was given
        self._first: dict[int, TaskTrace] = {}

    def add(self, which: int, trace: TaskTrace) -> None:
        """Compare the trace of input `which` with the reference, and with the first trace of that input."""
        if trace.error is not None:
            self.failed += 1
            self.reason = self.reason or str(trace.error)
            return
        for place in self._places:
            self.differences.add(self._pair, place, place[1], which, trace.tensors.get(place))
        last = max(block for block, _ in self._places)
        answer = {name: array for (block, name), array in trace.tensors.items() if block == last}
        self.largest.add(answer, {name: self._pair.expected[which][name] for name in self._outputs})
        first = self._first.setdefault(which, trace)
        self.stable = self.stable and all(
            first.tensors[place].tobytes() == trace.tensors[place].tobytes()
            for place in self._places
            if place in first.tensors and place in trace.tensors
        )
