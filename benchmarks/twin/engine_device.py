"""An engine in this process, under seeded arrivals in real time; it gives the twin's `Window`s."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stageloom.edge_agent.executor.base import StepResult
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.worker.inprocess import InProcessEngine
from stageloom.edge_agent.worker.messages import TaskDone
from stageloom.planner.twin.arrivals import ArrivalStream, Process
from stageloom.planner.twin.window import ModelWindow, Window, counts_between
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.stats import EngineStats
from stageloom.shared.engine.steps import Outcome, Step
from stageloom.shared.ids import Digest


@dataclass(frozen=True, slots=True)
class StepSpan:
    """A step that ran; a mask of -1: its members one after another, for want of a program."""

    lane: int
    combined: int
    mask: int
    buckets: tuple[int, ...]
    began_s: float
    ended_s: float
    models: tuple[int, ...]

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s

    def share_s(self, model: int) -> float:
        """A model's part: a step's time is shared equally by its members."""
        return self.seconds * self.models.count(model) / len(self.models)


class EngineDevice:
    """Use it as a context manager: it has threads. One plan at a time is loaded after another."""

    def __init__(
        self, artifacts: Mapping[Digest, Artifact], arrivals: Mapping[str, Process], *, seed: int = 0
    ) -> None:
        self._artifacts = dict(artifacts)
        self._steps: list[StepSpan] = []  # appended to by the lanes' threads
        self._ends: list[tuple[str, TaskDone]] = []
        self._submitted: list[tuple[str, float]] = []
        self._shell = InProcessEngine(OnnxExecutor(), on_step=self._on_step)
        self._streams = {
            model: ArrivalStream(process, np.random.default_rng([seed, index]))
            for index, (model, process) in enumerate(arrivals.items())
        }
        self._run_s = 0.0  # on the arrivals' clock
        self._bound: BoundPlan | None = None

    def deploy(self, bound: BoundPlan) -> None:
        """Load, wait until all is prepared, and activate."""
        key = self._shell.load(bound.plan, self._artifacts)
        self._shell.activate(key)
        self._bound = bound
        rng = np.random.default_rng(0)
        self._inputs = {
            model.plan.name: {
                tensor.name: rng.standard_normal(tensor.shape).astype(tensor.dtype)
                for tensor in (model.graph.tensors[one] for one in model.graph.inputs)
            }
            for model in bound.models
        }

    def warm_up(self, tasks: int = 3) -> None:
        """Run a few tasks of every model, so that the first window finds warm caches."""
        for _ in range(tasks):
            for future in [self._shell.submit(name, inputs) for name, inputs in self._inputs.items()]:
                future.result(timeout=60.0)
        self.drained()

    def run(self, seconds: float) -> Window:
        """Serve what arrives for so long, without samples of the queues."""
        assert self._bound is not None
        coming = sorted(
            (at_s - self._run_s, name)
            for name, stream in self._streams.items()
            for at_s in stream.until(self._run_s + seconds).tolist()
        )
        for events in (self._steps, self._ends, self._submitted):
            events.clear()
        before = self._shell.stats()
        began_s = time.monotonic()
        for at_s, name in coming:
            time.sleep(max(began_s + at_s - time.monotonic(), 0.0))
            self._submit(name)
        time.sleep(max(began_s + seconds - time.monotonic(), 0.0))
        after = self._shell.stats()
        self._run_s += seconds
        return self._window(before, after, began_s, time.monotonic())

    def drained(self, timeout_s: float = 60.0) -> None:
        """Wait until every task has ended.

        Raises:
            RuntimeError: some never do; the message shows the engine.
        """
        until_s = time.monotonic() + timeout_s
        while (stats := self._shell.stats()).open_tasks:
            if time.monotonic() > until_s:
                raise RuntimeError(f"tasks did not end in {timeout_s:.0f} s: {stats}")
            time.sleep(0.01)

    @property
    def steps(self) -> list[StepSpan]:
        """The steps that ended since the last window began."""
        return list(self._steps)

    def arrived_s(self, began_s: float) -> dict[str, tuple[float, ...]]:
        """When the tasks of the last window really came, by model, in seconds since its begin."""
        found: dict[str, list[float]] = {name: [] for name in self._streams}
        for name, at_s in self._submitted:
            found[name].append(max(at_s - began_s, 0.0))
        return {name: tuple(sorted(times)) for name, times in found.items()}

    def __enter__(self) -> "EngineDevice":
        return self

    def __exit__(self, *error: object) -> None:
        self._shell.close()

    def _submit(self, name: str) -> None:
        self._submitted.append((name, time.monotonic()))
        future = self._shell.submit(
            name, self._inputs[name], on_end=lambda end: self._ends.append((name, end))
        )
        future.add_done_callback(lambda done: done.exception())  # what was refused is counted, not raised

    def _on_step(self, step: Step, result: StepResult) -> None:
        combined, mask, buckets = step.program.combined, step.program.mask, step.program.buckets
        models = tuple(member.member.model for member in step.members)
        mask = -1 if step.fallback else mask
        span = StepSpan(step.lane, combined, mask, buckets, result.started_s, result.ended_s, models)
        self._steps.append(span)

    def _window(self, before: EngineStats, after: EngineStats, began_s: float, ended_s: float) -> Window:
        assert self._bound is not None
        steps = [step for step in self._steps if step.ended_s <= ended_s]
        completed = [
            (name, end.ended_s - end.queued_s)
            for name, end in list(self._ends)
            if end.outcome is Outcome.COMPLETED and end.ended_s <= ended_s
        ]
        earlier = {model.name: model for model in before.models}
        models = [
            ModelWindow(
                name=model.name,
                submitted=sum(name == model.name for name, _ in self._submitted),
                ended=counts_between(earlier[model.name].ended, model.ended),
                queued=model.queued,
                busy_s=sum(step.share_s(index) for step in steps),
                latencies_s=tuple(latency_s for name, latency_s in completed if name == model.name),
            )
            for index, model in enumerate(after.models)
        ]
        return Window(
            plan=self._bound.plan.digest,
            began_s=began_s,
            seconds=ended_s - began_s,
            busy_s=_union_s([(max(step.began_s, began_s), step.ended_s) for step in steps]),
            used_s=None,
            models=tuple(models),
            steps=(),
            glances=(),
            open_before=before.open_tasks,
            open_after=after.open_tasks,
        )


def _union_s(spans: Sequence[tuple[float, float]]) -> float:
    total_s, reached_s = 0.0, -np.inf
    for began_s, ended_s in sorted(spans):
        total_s += max(ended_s - max(began_s, reached_s), 0.0)
        reached_s = max(reached_s, ended_s)
    return float(total_s)
