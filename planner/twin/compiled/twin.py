"""The twin on compiled kernels: calls and windows of `stageloom.planner.twin.reference.Twin`, much faster.

It lacks tasks that several models share, and plans whose models differ from one deployment to the next. Cuts,
replicas, batches, lanes, rules and partitions may differ. Everything else is equal, step by step and bit by
bit, which a property test holds against the engine core itself.

Importing this module imports numba; the first `run` compiles (seconds), later processes read the machine code
from the user's cache.
"""

import copy
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stageloom.planner.twin.arrivals import Process, Tape
from stageloom.planner.twin.compiled import engine, layout
from stageloom.planner.twin.compiled.jit import compile_for
from stageloom.planner.twin.compiled.layout import NOBODY, Records, World
from stageloom.planner.twin.compiled.tables import WorldMemory, loaded_programs, plan_tables, program_of
from stageloom.planner.twin.lanes import noise_factors
from stageloom.planner.twin.times import BlockTimes, PlanTimes, StepTimes
from stageloom.planner.twin.window import ModelWindow, StepsWindow, Window, usual_samples
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.patience import PATIENCE_S
from stageloom.shared.engine.stats import Counts, ModelQueue, QueueSnapshot
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.errors import InputError, PlanError
from stageloom.shared.ids import Digest


class CompiledTwin:
    """A simulated device; satisfies `stageloom.planner.twin.window.TargetDevice`.

    `arrivals`, `seed`, `deadlines_s` and `patience_s` are those of the reference twin. With `prepared` all
    programs are ready when their plan is deployed; else each after its first step, as in the reference. With
    `trace` every step is kept until `take_trace`.
    """

    def __init__(
        self,
        times: StepTimes,
        arrivals: Mapping[str, Process],
        *,
        seed: int = 0,
        deadlines_s: Mapping[str, float] | None = None,
        prepared: bool = False,
        trace: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.times = times
        self._sources = tuple(arrivals)
        self._tape = Tape(list(arrivals.values()), seed)
        self._deadlines_s = dict(deadlines_s or {})
        self._patience_s = patience_s
        self._prepared = prepared
        self._traces = trace
        self._noise = np.array(noise_factors(times.device.noise, seed), np.float64)
        self._known: dict[BlockTimes, Records] = {}
        self._memory: WorldMemory | None = None
        self._plans: list[tuple[BoundPlan, PlanTimes]] = []
        self.ended: Records = layout.records(layout.END, 0)
        """Tasks that ended in the last window and in the deployments before it, in order (`layout.END`)."""
        self._ends: list[Records] = []
        self._trace: list[Records] = []
        self._next_key = 0
        self._names: tuple[str, ...] = ()
        self._models: tuple[tuple[str, Digest], ...] = ()
        self._executors: dict[tuple[frozenset[str], str], int] = {}
        self._active: int = NOBODY
        self._arrivals: Records = layout.records(layout.ARRIVAL, 0)
        self._samples = _samples((), 1)

    @property
    def now_s(self) -> float:
        return 0.0 if self._memory is None else float(self._memory.world.clock[0].now_s)

    @property
    def state(self) -> World:
        """All that changes, and what the plans fix: to be read.

        Raises:
            PlanError: no plan was deployed.
        """
        return self._deployed().world

    def _deployed(self) -> WorldMemory:
        if self._memory is None:
            raise PlanError("nothing is deployed on the twin", remedy="deploy a plan first")
        return self._memory

    def copy(self) -> "CompiledTwin":
        """A twin that goes on from here by itself; both see the same arrivals."""
        other = copy.copy(self)
        if self._memory is not None:
            other._memory = self._memory.copy()
        other._plans, other._ends, other._trace = list(self._plans), list(self._ends), list(self._trace)
        return other

    def deploy(self, bound: BoundPlan) -> None:
        """Send new launches to this plan (`EngineCore.activate`); it costs no time.

        Raises:
            PlanError: the plan serves other models than the first one, places its blocks, or is too large for
                the kernels.
            InputError: tasks arrive for a model that no plan has.
        """
        if bound.plan.places:
            raise PlanError(
                f"the compiled twin places no blocks, as placement {bound.plan.placement.value} asks for",
                remedy="simulate it step by step",
            )
        models = tuple((model.name, model.artifact) for model in bound.plan.models)
        names = frozenset(one.name for one in bound.plan.executors)
        executors = [
            self._executors.setdefault((names, precision), len(self._executors))
            for precision in bound.precisions
        ]
        tables = plan_tables(bound, self._next_key, executors)
        if self._memory is None:
            self._models = models
            self._memory = self._first_memory(tuple(name for name, _ in models))
        elif models != self._models:
            raise PlanError("the plan serves other models than the twin began with", remedy="use a new twin")
        memory = self._memory
        index = memory.place(tables, lanes=bound.plan.lanes, run_ahead=bound.plan.run_ahead)
        times = self.times.of_plan(bound)
        self._plans[index : index + 1] = [(bound, times)]
        self._fill_times(index)
        self._next_key += 1
        clock = memory.world.clock[0]
        clock.loaded += 1
        self._go_on(float(clock.now_s), index)
        self._active = index

    def _first_memory(self, names: tuple[str, ...]) -> WorldMemory:
        if strangers := [source for source in self._sources if source not in names]:
            raise InputError(f"tasks arrive for {strangers[0]!r}, which the plan does not serve")
        self._names = names
        memory = WorldMemory(len(names), self.times.device, self._noise, self._patience_s)
        clock = memory.world.clock[0]
        clock.traces = self._traces
        for model, name in zip(memory.world.models, names, strict=False):
            if name in self._deadlines_s:
                model.deadline_s = self._deadlines_s[name]
                clock.deadlines = 1
        return memory

    def _fill_times(self, index: int) -> None:
        """Write down what is known of the plan's steps, NaN for the others."""
        memory = self._deployed()
        world = memory.world
        bound, times = self._plans[index]
        first = memory.areas[index]["times"].start
        programs = 0
        for combined, block in enumerate(times.blocks):
            known = self._known.get(block)
            loaded = loaded_programs(bound, combined)
            programs += len(loaded)
            if known is None:
                size = _num_programs(bound, combined)
                known = layout.records(layout.TIME, size)
                known.alone_s = np.nan
                known.status = layout.READY if self._prepared else layout.UNASKED
                known.status[list(loaded)] = layout.READY
                self._known[block] = known
            world.times[first : first + len(known)] = known
            first += len(known)
        world.plans[index].programs = programs

    # Running

    def run(self, seconds: float, *, sample_at_s: Sequence[float] | None = None) -> Window:
        """Go on for `seconds`; see `Device.run`.

        Raises:
            PlanError: no plan was deployed.
        """
        world = self.state
        before = _Counters(world)
        begin_s = before.now_s
        end_s = begin_s + seconds
        if sample_at_s is None:
            sample_at_s = usual_samples(seconds)
        self._open_window([min(begin_s + at_s, end_s) for at_s in sample_at_s], end_s)
        self._go_on(end_s, NOBODY)
        return self._window(before, end_s)

    def _open_window(self, samples_s: Sequence[float], end_s: float) -> None:
        """Set out what comes in a window, and count anew."""
        world = self.state
        clock = world.clock[0]
        times_s, sources = self._tape.between(int(clock.next_task), end_s)
        self._arrivals = layout.records(layout.ARRIVAL, len(times_s))
        self._arrivals.at_s = times_s
        self._arrivals.model = np.array([self._names.index(name) for name in self._sources], np.int64)[
            sources
        ]
        self._samples = _samples(samples_s, len(self._names))
        clock.arrival = clock.sample = 0
        world.tallies[: self._deployed().areas[-1]["times"].stop] = 0
        world.models.busy_s = 0.0

    def _go_on(self, end_s: float, deploy: int) -> None:
        """Run the kernels, and give them what they stop for."""
        memory = self._deployed()
        while memory.world.clock[0].open + 1 > len(memory.world.ends):  # all may end in one event
            memory.double()
        while True:
            stopped = self._kernels(memory, end_s, deploy)
            deploy = NOBODY
            clock = memory.world.clock[0]
            if stopped == layout.LACKS_DURATION:
                self._work_out(memory.world.steps[clock.lacking])
                continue
            self._ends.append(memory.world.ends[: clock.ends].copy())
            self._trace.append(memory.world.trace[: clock.traced].copy())
            clock.ends = clock.traced = 0
            if stopped == layout.DONE:
                return
            if clock.open + 1 > len(memory.world.ends):
                memory.double()

    def _kernels(self, memory: WorldMemory, end_s: float, deploy: int) -> int:
        """Let the kernels run; why they stopped."""
        return engine.run(memory.block, self._arrivals, self._samples, end_s, deploy)

    def _work_out(self, step: Any) -> None:
        """What the steps of a program take, which was met for the first time."""
        world = self.state
        home = world.combined[step.combined]
        bound, times = self._plans[home.plan]
        number = int(step.time - home.first_time)
        mask, buckets = program_of(bound, int(home.index), number)
        ready = times.step(int(home.index), mask, buckets)
        apart = times.step(int(home.index), mask, buckets, fallback=True)
        for written in (world.times[step.time], self._known[times.blocks[home.index]][number]):
            written.alone_s, written.share, written.crowded_s, written.crowded_share, written.items = ready
            written.apart_s, written.apart_share = apart.seconds, apart.share
            written.apart_crowded_s, written.apart_crowded_share = apart.crowded_s, apart.crowded_share
            written.apart_items = apart.items

    # What happened

    def _window(self, before: "_Counters", end_s: float) -> Window:
        after = _Counters(self.state)
        ends = np.concatenate(self._ends)
        self.ended, self._ends = ends.view(np.recarray), []
        completed = ends[ends["outcome"] == layout.COMPLETED]
        latencies_s = completed["at_s"] + self.times.device.task_s - completed["arrived_s"]
        busy_s = self.state.models["busy_s"].tolist()
        models = tuple(
            ModelWindow(
                name=name,
                submitted=after.arrived[index] - before.arrived[index],
                ended=Counts(
                    completed=after.completed[index] - before.completed[index],
                    refused=after.refused[index] - before.refused[index],
                    expired=after.expired[index] - before.expired[index],
                ),
                queued=after.queued[index],
                busy_s=busy_s[index],
                latencies_s=tuple(latencies_s[completed["model"] == index].tolist()),
            )
            for index, name in enumerate(self._names)
        )
        return Window(
            plan=self._plans[self._active][0].plan.digest,
            began_s=before.now_s,
            seconds=end_s - before.now_s,
            busy_s=after.busy_s - before.busy_s,
            used_s=after.used_s - before.used_s,
            models=models,
            steps=self._steps(),
            glances=self._glances(),
            open_before=before.open,
            open_after=after.open,
        )

    def _steps(self) -> tuple[StepsWindow, ...]:
        """Of the active plan alone, as an agent reports them."""
        world = self.state
        bound, _ = self._plans[self._active]
        area = self._deployed().areas[self._active]
        tallies = world.tallies[area["times"]].view(np.ndarray)
        ran = np.flatnonzero(tallies["count"])
        first_times = world.combined["first_time"][area["combined"]][: len(bound.combined)]
        firsts = (first_times - area["times"].start).tolist()
        steps = []
        for at, (sum_s, max_s, count) in zip(ran.tolist(), tallies[ran].tolist(), strict=True):
            combined = bisect_right(firsts, at) - 1
            mask, _ = program_of(bound, combined, at - firsts[combined])
            steps.append(StepsWindow(combined=combined, mask=mask, count=count, sum_s=sum_s, max_s=max_s))
        return tuple(sorted(steps, key=lambda one: (one.combined, one.mask)))

    def _glances(self) -> tuple[QueueSnapshot, ...]:
        clock = self.state.clock[0]
        active = PlanKey(int(self.state.plans[self._active].key))
        blocks = [model.num_blocks for model in self._plans[self._active][0].plan.models]
        seen = self._samples[: clock.sample].view(np.ndarray)
        fields = ("at_s", "arrived", "queued", "oldest_age_s", "progress", "tightest_s")
        glances = []
        for rows in zip(*(seen[name].tolist() for name in fields), strict=True):
            (at_s, *_), *queues, tightest_s = rows
            known_s = [None if one == layout.NEVER else one for one in tightest_s]
            glances.append(
                QueueSnapshot(
                    at_s,
                    active,
                    min((one for one in known_s if one is not None), default=None),
                    tuple(
                        ModelQueue(name, arrived, queued, age_s, num_blocks, progress, deadline_s)
                        for name, num_blocks, arrived, queued, age_s, progress, deadline_s in zip(
                            self._names, blocks, *queues, known_s, strict=True
                        )
                    ),
                )
            )
        return tuple(glances)

    def take_trace(self) -> Records:
        """The members of all steps that were issued since the last call, in order (`layout.TRACE`)."""
        taken: Records = np.concatenate([np.zeros(0, layout.TRACE), *self._trace]).view(np.recarray)
        self._trace = []
        return taken


def compile_kernels(scale: int) -> None:
    """Compile the kernels for a memory of this scale, or load what is kept of that."""
    memory = layout.records(layout.memory_type(scale), 1)
    compile_for(engine.run, memory, layout.records(layout.ARRIVAL, 0), _samples((), 1), 0.0, NOBODY)


def _samples(at_s: Sequence[float], num_models: int) -> Records:
    """What is to be seen at these times. [num_samples, num_models]"""
    samples = layout.records(layout.SAMPLE, len(at_s), num_models)
    samples.at_s = np.array(at_s).reshape(-1, 1)
    return samples


class _Counters:
    """What counts up, at one instant."""

    def __init__(self, world: World) -> None:
        clock, models = world.clock[0], world.models
        self.now_s = float(clock.now_s)
        self.busy_s, self.used_s, self.open = float(clock.busy_s), float(clock.used_s), int(clock.open)
        self.arrived, self.queued = models["arrived"].tolist(), models["queued"].tolist()
        self.completed, self.refused = models["completed"].tolist(), models["refused"].tolist()
        self.expired = models["expired"].tolist()


def _num_programs(bound: BoundPlan, combined: int) -> int:
    size = 1
    for member in bound.combined[combined].members:
        size *= 1 + len(bound.models[member.model].buckets)
    return size
