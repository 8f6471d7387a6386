"""The whole table: builds every variant, runs the rounds, and adds rows and figures."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Final

from benchmarks.gpu import compiled, provider_rows
from benchmarks.gpu.device import Device
from benchmarks.gpu.networks import Subject
from benchmarks.gpu.ours import Ours, executor_of
from benchmarks.gpu.plans import SEQUENTIAL, Candidate, Knowledge, mix_candidates, model_candidates
from benchmarks.gpu.provider_rows import Provider
from benchmarks.gpu.results import Deadline, Results, why
from benchmarks.gpu.rounds import Rounds, Variant, faster, shape_of_rounds, summarise
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.slicing import NAME as SLICING
from benchmarks.gpu.slicing import Slices
from benchmarks.gpu.torch_rows import (
    AGAIN,
    EAGER,
    GRAPH,
    IN_TURN,
    IN_TURN_AGAIN,
    JOINT,
    MIX,
    Rows,
    batch_name,
    streams_name,
)
from stageloom.edge_agent.executor.base import Executor
from stageloom.shared.schedule import Schedule

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
        self._errors: dict[tuple[str, str], float] = {}
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
        self._errors.update(self.rows.errors)

    def build_slices(self, slices: Slices | None) -> None:
        """Baseline 7, time slicing; the processes are ready."""
        if slices is None:
            self.results.skip(self.part, SLICING, "child processes were not wanted")
            return

        def make() -> Variant:
            found = slices.variant(_SLICED_RUNS)
            self._errors[found.key] = slices.error
            return found

        self._try(MIX, make, SLICING)

    def build_compiled(
        self, compiling: compiled.Compiling | None, deadline: Deadline, least_s: float
    ) -> None:
        """Baseline 3, from what the children compiled, while more than `least_s` are left."""
        for mode in self.settings.modes:
            for subject in self.subjects:
                name = f"{subject.name}, {compiled.row_name(mode)}"
                reason = "needs CUDA" if compiling is None else compiling.failed.get((subject.name, mode), "")
                if not reason and deadline.left_s < least_s:
                    reason = "the time was up"
                if reason:
                    self.results.skip(self.part, name, reason)
                    continue

                def make(subject: Subject = subject, mode: str = mode) -> Variant:
                    found, error = compiled.variant(self.device, subject, mode, self.settings.precision)
                    self._errors[found.key] = error
                    return found

                self._try(subject.name, make, compiled.row_name(mode))

    def build_ours(self, known: Knowledge) -> None:
        """Baselines 4 to 6 and our own plans, all in our executor."""
        ours: Ours | None = None
        with self.results.attempt(self.part, f"executor {self.settings.executor}"):
            self.ours = ours = Ours(self.device, executor_of(self.settings.executor), self.subjects)
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
        self._errors.update(ours.errors)

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
        for provider in provider_rows.PROVIDERS:
            missing = provider_rows.why_not(provider, self.device)
            for subject in self.subjects:
                name = f"{subject.name}, {provider.row}"
                short = deadline.left_s < least_s + provider.build_s
                if reason := missing or ("the time was up" if short else ""):
                    self.results.skip(self.part, name, reason)
                    continue

                def make(subject: Subject = subject, provider: Provider = provider) -> Variant:
                    found, error = provider_rows.variant(
                        self.device, subject, provider, self.settings.precision, self.device.streams[-1]
                    )
                    self._errors[found.key] = error
                    return found

                self._try(subject.name, make, provider.row)

    # Correctness

    def check(self) -> None:
        """Every variant's logits against float32 on the CPU; a wrong variant is not measured."""
        allowed = _TOLERANCE[self.settings.precision]
        for key, error in sorted(self._errors.items()):
            right = error <= allowed
            self.results.add(
                {}, part="correctness", name=f"{key[0]}, {key[1]}", error=error, allowed=allowed, right=right
            )
            if not right:
                self.variants = [one for one in self.variants if one.key != key]
        wrong = [error for error in self._errors.values() if error > allowed]
        worst = max(self._errors.values(), default=0.0)
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

    def resident(self) -> bool:
        """Whether our variants leave their tensors on the device, as the rivals do."""
        return self.ours is not None and self.ours.resident

    def hand_over(self) -> Executor | None:
        """Our executor with nothing loaded; our variants can run no more, until `take_back`."""
        if self.ours is None:
            return None
        ours, self.ours = self.ours, None
        ours.unload()
        return ours.executor

    def take_back(self, executor: Executor) -> list[Variant]:
        """Our chosen plans, built anew on the executor that was handed over, and what is not ours."""
        self.ours = ours = Ours(self.device, executor, self.subjects)
        found = [one for one in self.variants if one.key not in self.candidates]
        for key in self.best.items():
            with self.results.attempt(self.part, f"{', '.join(key)}, again"):
                found.append(ours.variant(self.candidates[key]))
        return found

    def close(self) -> None:
        """Free everything."""
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
