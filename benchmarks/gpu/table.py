"""The whole table: builds every variant, runs the rounds, and adds rows and figures."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import product
from random import Random
from typing import Any, Final

from benchmarks.gpu.device import Device, require_cuda
from benchmarks.gpu.networks import Subject
from benchmarks.gpu.ours import Ours
from benchmarks.gpu.plans import (
    Candidate,
    Knowledge,
    mix_candidates,
    model_candidates,
    sequential_candidate,
)
from benchmarks.gpu.results import Deadline, Results, Settings, Skip
from benchmarks.gpu.rivals import (
    EAGER,
    GRAPH,
    MIX,
    PROVIDERS,
    Provider,
    TorchRows,
    compiled_variant,
    provider_variant,
    row_name,
    why_not,
)
from benchmarks.gpu.rounds import Ratio, Rounds, Variant, faster, shape_of_rounds, summarise
from stageloom.shared.ids import OpId
from stageloom.shared.schedule import Schedule

_WARM: Final = 200
_WARM_S: Final = 0.3
_TOLERANCE: Final = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 2e-2}
_OVER_EAGER: Final = 1.5
_MOST: Final = 0.15  # however far off torch itself is


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
        self.ours: Ours | None = None
        self.variants: list[Variant] = []
        self.candidates: dict[tuple[str, str], Candidate] = {}
        self.chosen_us: dict[str, dict[str, float]] = {}  # by subject, what ours took when one was chosen
        self.measured = Rounds(device, rng)
        self._building = building

    # Building

    def build_torch(self) -> None:
        """Baselines 1, 2, 7 and 8."""
        rows = TorchRows(self.device, self.subjects, self.settings.precision)
        for subject, name, make in rows.all(self.settings):
            self._try(subject, name, make)

    def build_ours(self) -> None:
        """Baselines 4 to 6 and our own plans, all in our executor; the fastest of each subject is chosen."""
        with self.results.attempt(self.part, f"executor {self.settings.executor}"):
            self.ours = Ours(self.settings.executor, self.subjects)
        if self.ours is None:
            return
        natures: dict[str, Mapping[OpId, Any]] = {}
        known = Knowledge(self.settings.executor, self.settings.precision, natures)
        chosen: dict[str, Schedule] = {}
        for subject in self.subjects:
            with self.results.attempt(self.part, f"{subject.name}: schedules"):
                first = sequential_candidate(subject, known)
                self._load(self.ours, [first])
                natures[subject.name] = self.ours.natures(first)
                self._load(self.ours, model_candidates(subject, known)[1:])
            if best := self._choose(subject.name):
                chosen[subject.name] = best.plan.combined[0].schedule
        with self.results.attempt(self.part, "mix: schedules"):
            self._load(self.ours, mix_candidates(self.subjects, known, chosen))
        self._choose(MIX)

    def _load(self, ours: Ours, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            self.candidates[candidate.key] = candidate
            self._try(*candidate.key, partial(ours.variant, candidate))

    def _choose(self, subject: str) -> Candidate | None:
        """The fastest of ours in a few short rounds; the main rounds measure it anew."""
        own = [
            variant
            for variant in self.variants
            if variant.subject == subject and variant.key in self.candidates
        ]
        quick = Rounds(self.device, self.measured.rng)
        window_s = 0.002 if self.settings.quick else 0.02
        quick.measure(own, rounds=3, window_s=window_s, on_failure=self._note_failure)
        self.chosen_us[subject] = medians_us(quick, own)
        best = self.best(subject)
        return None if best is None else self.candidates[subject, best]

    def best(self, subject: str) -> str | None:
        """Our plan that was fastest when one was chosen; None without any."""
        taken_us = self.chosen_us.get(subject, {})
        return min(taken_us, key=lambda name: taken_us[name], default=None)

    def build_compiled(self, ready: Collection[tuple[str, str]]) -> None:
        """Baseline 3, of what child processes compiled: by model and mode."""
        for mode, subject in product(self.settings.modes, self.subjects):
            self._try(subject.name, row_name(mode), partial(self._compiled, subject, mode, ready))

    def _compiled(self, subject: Subject, mode: str, ready: Collection[tuple[str, str]]) -> Variant:
        require_cuda(self.device)
        if (subject.name, mode) not in ready:
            raise Skip("not compiled in time")
        return compiled_variant(self.device, subject, mode, self.settings.precision)

    def build_providers(self, deadline: Deadline) -> None:
        """Baseline 10, while the time lasts that a session takes to make."""
        for provider, subject in product(PROVIDERS, self.subjects):
            self._try(subject.name, provider.row, partial(self._provided, subject, provider, deadline))

    def _provided(self, subject: Subject, provider: Provider, deadline: Deadline) -> Variant:
        if reason := why_not(provider, self.device):
            raise Skip(reason)
        if deadline.left_s < provider.build_s:
            raise Skip("the time was up")
        stream = self.device.streams[-1]
        return provider_variant(self.device, subject, provider, self.settings.precision, stream)

    def _try(self, subject: str, name: str, make: Callable[[], Variant]) -> None:
        with self.results.attempt(self.part, f"{subject}, {name}"):
            if self._building is not None and self._building.over:
                raise Skip("the time was up")
            self.variants.append(make())

    def _note_failure(self, variant: Variant, error: Exception) -> None:
        self.results.fail(self.part, f"{variant.subject}, {variant.name}", error)

    # Correctness

    def check(self) -> None:
        """Every variant's logits against float32 on the CPU; a wrong variant is not measured."""
        eager = {variant.subject: variant.error for variant in self.variants if variant.name == EAGER}
        allowed = allowed_errors(eager, self.settings.precision)
        wrong = {variant.key for variant in self.variants if not variant.error <= allowed[variant.subject]}
        for variant in sorted(self.variants, key=lambda variant: variant.key):
            self.results.add(
                {},
                part="correctness",
                name=f"{variant.subject}, {variant.name}",
                error=variant.error,
                allowed=allowed[variant.subject],
                right=variant.key not in wrong,
            )
        worst = max((variant.error for variant in self.variants), default=0.0)
        self.variants = [variant for variant in self.variants if variant.key not in wrong]
        slug = f"correctness.{self.settings.precision}"
        self.results.add({f"{slug}.worst_error": worst, f"{slug}.wrong_variants": float(len(wrong))})

    # Measuring

    def measure(self, deadline: Deadline) -> None:
        """All variants in interleaved rounds until the deadline, and a row for each."""
        warmed = []
        for variant in self.variants:
            with self.results.attempt(self.part, f"warm {variant.subject}, {variant.name}"):
                self._warm(variant)
                warmed.append(variant)
        self.variants = warmed
        rounds, window_s = shape_of_rounds(len(self.variants), deadline.left_s)
        if self.settings.quick:
            rounds, window_s = 3, 0.002
        with self.results.attempt(self.part, "rounds"):
            whole = self.measured.measure(
                self.variants,
                rounds=rounds,
                window_s=window_s,
                until=lambda: deadline.over,
                on_failure=self._note_failure,
            )
            slug = self.part.replace(" ", ".")
            self.results.add({f"{slug}.rounds": float(whole), f"{slug}.window_ms": window_s * 1e3})
        for variant in self.variants:
            self._report(variant)

    def _warm(self, variant: Variant) -> None:
        began_s = self.measured.clock()
        for _ in range(3 if self.settings.quick else _WARM):
            variant.run()
            if self.measured.clock() - began_s > _WARM_S:
                break
        self.device.synchronize()

    def _report(self, variant: Variant) -> None:
        """A row beside its subject's sequential graph."""
        columns = summarise(self.measured.samples, *variant.key)
        if not columns:
            self.results.skip(self.part, f"{variant.subject}, {variant.name}", "no round was kept")
            return
        ratio = self.faster(variant.subject, GRAPH, variant.name)
        slug = f"{variant.subject}.{variant.name}".replace(" ", "_").replace(",", "")
        self.results.add(
            {f"device_us.{self.settings.precision}.{slug}": columns["device_us"]},
            part=self.part,
            name=f"{variant.subject}, {variant.name}",
            over_torch_graph=None if ratio is None else ratio.text,
            best=self.best(variant.subject) == variant.name,
            **columns,
        )

    def faster(self, subject: str, than: str, variant: str) -> Ratio | None:
        """How many times faster one row is than another."""
        return faster(self.measured.samples, subject, than, variant)

    def times_us(self, subject: str) -> dict[str, float]:
        """Median device microseconds of every variant of a subject that was measured."""
        return medians_us(self.measured, [own for own in self.variants if own.subject == subject])

    def close(self) -> None:
        if self.ours is not None:
            self.ours.executor.close()


def allowed_errors(eager: Mapping[str, float], precision: str) -> dict[str, float]:
    """By subject; `eager` are torch's own errors in that precision.

    Seeded weights make rounding grow from layer to layer: in half precision torch eager is up to 7 % off on
    models with many layers. A variant may be half as far off again, within a bound that no plain error stays
    under. Models are in the mix, too.
    """
    least = _TOLERANCE[precision]
    own = {subject: max(least, min(_OVER_EAGER * error, _MOST)) for subject, error in eager.items()}
    return defaultdict(lambda: least, own | {MIX: max(own.values(), default=least)})


def medians_us(rounds: Rounds, variants: Sequence[Variant]) -> dict[str, float]:
    """By name; without those of which no round was kept."""
    summaries = {variant.name: summarise(rounds.samples, *variant.key) for variant in variants}
    return {name: columns["device_us"] for name, columns in summaries.items() if columns}
