"""The whole table: builds every variant, runs the rounds, and adds rows and figures.

Our executor's programs are variants: a plan is loaded, prepared off the clock, and run step by step. On
CUDA the prepared graph runs on what lies in the plan's buffers, so inputs and outputs stay on the device,
as they do for every rival; unlike them it also converts the float32 image and the logits, which is part
of the program. Elsewhere each run is a whole step with its copies from and to the host.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, Final

import numpy as np

from benchmarks.gpu.device import Device
from benchmarks.gpu.networks import Subject
from benchmarks.gpu.plans import SEQUENTIAL, Candidate, Knowledge, mix_candidates, model_candidates
from benchmarks.gpu.results import Deadline, Results, Settings, why
from benchmarks.gpu.rivals import (
    AGAIN,
    EAGER,
    GRAPH,
    IN_TURN,
    IN_TURN_AGAIN,
    JOINT,
    MIX,
    PROVIDERS,
    SLICING,
    Compiling,
    Rows,
    Slices,
    batch_name,
    compiled_variant,
    provider_variant,
    row_name,
    streams_name,
    why_not,
)
from benchmarks.gpu.rounds import Rounds, Variant, faster, shape_of_rounds, summarise
from stageloom.edge_agent.executor.base import Executor
from stageloom.edge_agent.executor.cuda.device import GraphDevice
from stageloom.edge_agent.executor.executors import make_executor
from stageloom.edge_agent.executor.torch.builder import Effort
from stageloom.edge_agent.executor.torch.cuda import CudaGraphDevice
from stageloom.edge_agent.executor.torch.executor import TorchCudaExecutor
from stageloom.shared.bound import bind
from stageloom.shared.engine.steps import InstanceId, PlanKey, ProgramKey, Step, StepMember
from stageloom.shared.ids import StepId, TaskId
from stageloom.shared.plan import MAX_LANES
from stageloom.shared.schedule import Schedule

_GRAPH_BYTES: Final = 24 << 30
_EFFORT: Final = Effort(form_rounds=0)


class ResidentExecutor(TorchCudaExecutor):
    """Every schedule keeps its own form, so that a row measures what it names; no graph is given up."""

    def __init__(self, device: GraphDevice | None = None) -> None:
        """
        Raises:
            ExecutorError: there is no CUDA device.
        """
        super().__init__(device or CudaGraphDevice(), effort=_EFFORT, graph_bytes=_GRAPH_BYTES)

    def replay(self, program: ProgramKey) -> Callable[[], None] | None:
        """Launches a prepared program's graph on torch's current stream; None where it was not captured."""
        graph: Any = self._built[program].graph  # torch's own
        if graph is None:
            return None
        launch: Callable[[], None] = graph.replay
        return launch


_LANE: Final = MAX_LANES  # the one behind all that plans have, and numbers that no engine counts to
_numbers = itertools.count(1 << 48)


class Loaded:
    """One candidate, loaded and prepared."""

    def __init__(self, executor: Executor, candidate: Candidate, subjects: Sequence[Subject]) -> None:
        """
        Raises:
            PlanError: the plan is not legal. ExecutorError: it cannot be loaded or prepared.
        """
        self._executor = executor
        wanted = {model.artifact for model in candidate.plan.models}
        self._subjects = {
            subject.artifact.digest: subject for subject in subjects if subject.artifact.digest in wanted
        }
        artifacts = {digest: subject.artifact for digest, subject in self._subjects.items()}
        bound = bind(candidate.plan, {digest: artifact.graph for digest, artifact in artifacts.items()})
        self.key = PlanKey(next(_numbers))
        executor.load(self.key, bound, artifacts)
        (combined,) = bound.combined
        self._members = [(member, bound.models[member.model]) for member in combined.members]
        buckets = tuple(model.buckets[-1] for _, model in self._members)
        self.program = ProgramKey(self.key, 0, combined.full_mask, buckets)
        executor.prepare(self.program)

    def step(self) -> list[tuple[Subject, np.ndarray]]:
        """One whole step from and to the host: the logits of every replica and row, with their subject."""
        members, subjects = [], []
        feeds: dict[InstanceId, list[dict[str, np.ndarray]]] = {}
        for position, (member, model) in enumerate(self._members):
            instance, batch = InstanceId(next(_numbers)), model.buckets[-1]
            members.append(StepMember(position, member, instance, (TaskId(0),) * batch, last=True))
            subjects.append(self._subjects[model.plan.artifact])
            feeds[instance] = [subjects[-1].feeds] * batch
        step = Step(StepId(next(_numbers)), _LANE, self.program, tuple(members), after=())
        self._executor.issue(step, feeds)
        outputs = self._executor.wait(step.id).outputs
        return [
            (subject, row[subject.logits])
            for member, subject in zip(members, subjects, strict=True)
            for row in outputs[member.instance]
        ]

    def replay(self) -> Callable[[], None] | None:
        """The program on what lies in its buffers, on the device's current stream; None without one."""
        if not isinstance(self._executor, ResidentExecutor):
            return None
        return self._executor.replay(self.program)


class Ours:
    """One executor and the candidates that it has loaded."""

    def __init__(self, executor: Executor, subjects: Sequence[Subject]) -> None:
        self.executor = executor
        self._subjects = subjects
        self._loaded: dict[tuple[str, str], Loaded] = {}

    def variant(self, candidate: Candidate) -> Variant:
        """Load a candidate and run it once from the host, so that its buffers hold the images.

        Raises:
            PlanError, ExecutorError: see Loaded.
        """
        loaded = Loaded(self.executor, candidate, self._subjects)
        self._loaded[candidate.subject, candidate.name] = loaded
        error = max(subject.error_of(logits) for subject, logits in loaded.step())
        run: Callable[[], Any] = loaded.replay() or loaded.step
        run()
        precision = candidate.plan.executor.precision
        return Variant(candidate.subject, candidate.name, run, candidate.units, precision, error)

    def stable(self, key: tuple[str, str], repeats: int, pause: Callable[[], None]) -> bool:
        """Whether repeats with pauses before groups give the same bits, and so do those without."""

        def bits() -> list[bytes]:
            return [logits.tobytes() for _, logits in self._loaded[key].step()]

        first = bits()
        self.executor.pause = pause
        try:
            again = [bits() for _ in range(repeats)]
        finally:
            self.executor.pause = None
        again += [bits() for _ in range(repeats)]
        return all(repeat == first for repeat in again)

    def unload(self) -> None:
        """Free every candidate; the executor keeps what it knows of kernels."""
        for loaded in self._loaded.values():
            self.executor.unload(loaded.key)
        self._loaded = {}


def executor_of(name: str) -> Executor:
    """One whose programs can be run on what lies on the device, where there is such.

    Raises:
        ExecutorError: the executor cannot be made here.
    """
    if name == ResidentExecutor.name:
        return ResidentExecutor()
    return make_executor(name)


_WARM: Final = 200
_WARM_S: Final = 0.3
_TOLERANCE: Final = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 2e-2}
_SLICED_RUNS: Final = 8


class Table:
    """Variants and what became of them."""

    def __init__(
        self,
        device: Device,
        subjects: Sequence[Subject],
        settings: Settings,
        results: Results,
        *,
        rng: Random,
        building: Deadline | None = None,
    ) -> None:
        """`building`: what is not built by then is skipped."""
        self.device = device
        self.subjects = subjects
        self.settings = settings
        self.results = results
        self.part = f"table {settings.precision}"
        self.rows = Rows(device, subjects, settings.precision)
        self.ours: Ours | None = None
        self.variants: list[Variant] = []
        self.candidates: dict[tuple[str, str], Candidate] = {}
        self.best: dict[str, str] = {}  # by subject, ours that was fastest when it was chosen
        self.quick_us: dict[str, dict[str, float]] = {}  # by subject, what ours took then
        self.measured = Rounds(device, rng)
        self._building = building

    # Building

    def build_torch(self) -> None:
        """Baselines 1, 2, 7 and 8."""
        rows = self.rows
        for subject in self.subjects:
            self._try(subject.name, partial(rows.eager, subject), EAGER)
            self._try(subject.name, partial(rows.graph, subject), GRAPH)
            self._try(subject.name, partial(rows.graph, subject, AGAIN), AGAIN)
            for count in self.settings.instances:
                self._try(subject.name, partial(rows.streams, subject, count), streams_name(count))
            for size in self.settings.batches:
                self._try(subject.name, partial(rows.batch, subject, size), batch_name(size))
        self._try(MIX, rows.mix_in_turn, IN_TURN)
        self._try(MIX, partial(rows.mix_in_turn, IN_TURN_AGAIN), IN_TURN_AGAIN)
        for count in self.settings.mix_instances:
            self._try(MIX, partial(rows.mix_streams, count), f"{count} instances of each")
        self._try(MIX, rows.mix_joint, JOINT)

    def build_slices(self, slices: Slices | None) -> None:
        """Baseline 7, time slicing; the processes are ready."""
        if slices is None:
            self.results.skip(self.part, SLICING, "child processes were not wanted")
            return

        self._try(MIX, partial(slices.variant, _SLICED_RUNS), SLICING)

    def build_compiled(self, compiling: Compiling | None, deadline: Deadline, least_s: float) -> None:
        """Baseline 3, from what the children compiled, while more than `least_s` are left."""
        for mode in self.settings.modes:
            for subject in self.subjects:
                name = f"{subject.name}, {row_name(mode)}"
                reason = "needs CUDA" if compiling is None else compiling.failed.get((subject.name, mode), "")
                if not reason and deadline.left_s < least_s:
                    reason = "the time was up"
                if reason:
                    self.results.skip(self.part, name, reason)
                    continue

                precision = self.settings.precision
                make = partial(compiled_variant, self.device, subject, mode, precision)
                self._try(subject.name, make, row_name(mode))

    def build_ours(self, known: Knowledge) -> None:
        """Baselines 4 to 6 and our own plans, all in our executor."""
        ours: Ours | None = None
        with self.results.attempt(self.part, f"executor {self.settings.executor}"):
            self.ours = ours = Ours(executor_of(self.settings.executor), self.subjects)
        if ours is None:
            return
        chosen: dict[str, Schedule] = {}
        for subject in self.subjects:
            own: list[Candidate] = []
            with self.results.attempt(self.part, f"{subject.name}: schedules"):
                own = model_candidates(subject, known)
            self._load(own)
            if best := self._choose(subject.name, own):
                chosen[subject.name] = best.plan.combined[0].schedule
        mixed: list[Candidate] = []
        with self.results.attempt(self.part, "mix: schedules"):
            mixed = mix_candidates(self.subjects, known, chosen)
        self._load(mixed)
        self._choose(MIX, mixed)

    def _load(self, candidates: Sequence[Candidate]) -> None:
        ours = self.ours
        assert ours is not None
        for one in candidates:
            self.candidates[one.subject, one.name] = one
            self._try(one.subject, partial(ours.variant, one), one.name)

    def _choose(self, subject: str, candidates: Sequence[Candidate]) -> Candidate | None:
        """The fastest in a few short rounds; the main rounds measure it anew."""
        names = {one.name for one in candidates}
        own = [one for one in self.variants if one.subject == subject and one.name in names]
        quick = Rounds(self.device, self.measured.rng)
        window_s = 0.002 if self.settings.quick else 0.02
        quick.measure(own, rounds=3, window_s=window_s, until=lambda: False, on_failure=self._note_failure)
        taken = {
            one.name: found.device_us
            for one in own
            if (found := summarise(quick.samples, subject, one.name)) is not None
        }
        if not taken:
            return None
        self.quick_us[subject] = taken
        self.best[subject] = min(taken, key=lambda name: taken[name])
        return self.candidates[subject, self.best[subject]]

    def _note_failure(self, variant: Variant, error: Exception) -> None:
        name = f"{variant.subject}, {variant.name}"
        self.results.add({}, part=self.part, name=name, failed=why(error))

    def _try(self, subject: str, make: Callable[[], Variant], name: str) -> None:
        if self._building is not None and not self._building.left_s:
            self.results.skip(self.part, f"{subject}, {name}", "the time was up")
            return
        with self.results.attempt(self.part, f"{subject}, {name}"):
            self.variants.append(make())

    def build_providers(self, deadline: Deadline, least_s: float) -> None:
        """Baseline 10, while more than `least_s` and what a session takes to make are left."""
        for provider in PROVIDERS:
            missing = why_not(provider, self.device)
            for subject in self.subjects:
                name = f"{subject.name}, {provider.row}"
                short = deadline.left_s < least_s + provider.build_s
                if reason := missing or ("the time was up" if short else ""):
                    self.results.skip(self.part, name, reason)
                    continue

                stream = self.device.streams[-1]
                precision = self.settings.precision
                make = partial(provider_variant, self.device, subject, provider, precision, stream)
                self._try(subject.name, make, provider.row)

    # Correctness

    def check(self) -> None:
        """Every variant's logits against float32 on the CPU; a wrong variant is not measured."""
        allowed = _TOLERANCE[self.settings.precision]
        wrong = {variant.key for variant in self.variants if not variant.error <= allowed}
        for variant in sorted(self.variants, key=lambda variant: variant.key):
            self.results.add(
                {},
                part="correctness",
                name=f"{variant.subject}, {variant.name}",
                error=variant.error,
                allowed=allowed,
                right=variant.key not in wrong,
            )
        worst = max((variant.error for variant in self.variants), default=0.0)
        self.variants = [variant for variant in self.variants if variant.key not in wrong]
        slug = f"correctness.{self.settings.precision}"
        self.results.add({f"{slug}.worst_error": worst, f"{slug}.wrong_variants": float(len(wrong))})

    # Measuring

    def measure(self, seconds: float, until: Callable[[], bool]) -> None:
        """All variants in interleaved rounds of about `seconds` in all."""
        warmed = []
        for variant in self.variants:
            with self.results.attempt(self.part, f"warm {variant.subject}, {variant.name}"):
                self._warm(variant)
                warmed.append(variant)
        self.variants = warmed
        rounds, window_s = shape_of_rounds(len(self.variants), seconds)
        if self.settings.quick:
            rounds, window_s = 3, 0.002
        done = self.measured.measure(
            self.variants, rounds=rounds, window_s=window_s, until=until, on_failure=self._note_failure
        )
        self.results.add(
            {
                f"{self.part}.rounds".replace(" ", "."): float(done),
                f"{self.part}.window_ms".replace(" ", "."): window_s * 1e3,
                f"{self.part}.variants".replace(" ", "."): float(len(self.variants)),
            }
        )

    def _warm(self, variant: Variant) -> None:
        began_s = self.measured.clock()
        for _ in range(3 if self.settings.quick else _WARM):
            variant.run()
            if self.measured.clock() - began_s > _WARM_S:
                break
        self.device.synchronize()

    def report(self) -> None:
        """One row per variant, beside its subject's sequential graph."""
        samples = self.measured.samples
        for variant in self.variants:
            found = summarise(samples, *variant.key)
            if found is None:
                self.results.skip(self.part, f"{variant.subject}, {variant.name}", "no round was kept")
                continue
            ratio = faster(
                samples, variant.subject, IN_TURN if variant.subject == MIX else GRAPH, variant.name
            )
            slug = f"{variant.subject}.{variant.name}".replace(" ", "_").replace(",", "")
            self.results.add(
                {f"device_us.{self.settings.precision}.{slug}": found.device_us},
                part=self.part,
                name=f"{variant.subject}, {variant.name}",
                device_us=found.device_us,
                device_p95_us=found.device_p95_us,
                host_us=found.host_us,
                alone_us=found.alone_us,
                alone_p95_us=found.alone_p95_us,
                over_torch_graph=None if ratio is None else ratio.text,
                rounds=found.rounds,
                dropped=found.dropped,
                sm_mhz=found.sm_mhz,
                best=self.best.get(variant.subject) == variant.name,
            )

    def hand_over(self) -> Executor | None:
        """Our executor with nothing loaded; our variants can run no more, until `take_back`."""
        if self.ours is None:
            return None
        ours, self.ours = self.ours, None
        ours.unload()
        return ours.executor

    def take_back(self, executor: Executor) -> list[Variant]:
        """Our chosen plans, built anew on the executor that was handed over, and what is not ours."""
        self.ours = ours = Ours(executor, self.subjects)
        found = [one for one in self.variants if one.key not in self.candidates]
        for key in self.best.items():
            with self.results.attempt(self.part, f"{', '.join(key)}, again"):
                found.append(ours.variant(self.candidates[key]))
        return found

    def close(self) -> None:
        executor = self.hand_over()
        if executor is not None:
            executor.close()


def sequential_rows(subject: str) -> tuple[str, ...]:
    """Sequential graphs of a subject, torch's and ours."""
    return (IN_TURN if subject == MIX else GRAPH, SEQUENTIAL)


def again_row(subject: str) -> tuple[str, str]:
    """A baseline and its second copy."""
    return (IN_TURN, IN_TURN_AGAIN) if subject == MIX else (GRAPH, AGAIN)


def known_times(table: Table, subject: str) -> Mapping[str, float]:
    """Median device microseconds of every variant of a subject."""
    return {
        variant.name: found.device_us
        for variant in table.variants
        if variant.subject == subject
        and (found := summarise(table.measured.samples, *variant.key)) is not None
    }
