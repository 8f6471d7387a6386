"""What the main process knows of a plan that it has checked, and whether two plans can be compared. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stageloom.edge_agent.ingest.messages import ModelSignature, TensorInfo
from stageloom.shared.engine.interval_guard import never_below_arrivals
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Plan
from stageloom.shared.shape_ranges import range_text

_SHOWN = 3  # tensors in a reason

_ARRIVALS_SLACK = 0.95
"""Rates over a few seconds are noisy: an interval starves a model only if it is longer by more than this."""


@dataclass(frozen=True)
class PlanFacts:
    """A plan that can be loaded."""

    digest: Digest
    models: Mapping[str, ModelSignature]  # by name, what it takes and gives
    artifacts: Mapping[str, Digest]  # by model
    members: tuple[tuple[str, ...], ...] = ()  # per combined block the models of its members
    strict_s: Mapping[str, float] | None = (
        None  # launch intervals that are waited for even while a lane idles
    )
    structure: Digest | None = None  # the plan without its launch intervals
    lanes: int = 1

    def compares_with(self, other: "PlanFacts") -> bool:
        """They do the same work: then a trial can tell which does it better."""
        return self.digest != other.digest and dict(self.artifacts) == dict(other.artifacts)

    def same_but_intervals(self, other: "PlanFacts") -> bool:
        """They differ in launch intervals and in nothing else."""
        return self.structure is not None and self.structure == other.structure

    def new_versions(self, running: "PlanFacts") -> tuple[str, ...]:
        """Models that both serve, from different artifacts."""
        theirs = running.artifacts
        return tuple(
            name for name, artifact in self.artifacts.items() if theirs.get(name, artifact) != artifact
        )

    def new_interface(self, running: "PlanFacts") -> str:
        """Which model has other inputs or outputs than under the plan that runs, or nothing."""
        for name, ours in self.models.items():
            if (theirs := running.models.get(name)) is None:
                continue
            for ends, now, before in (
                ("inputs", ours.inputs, theirs.inputs),
                ("outputs", ours.outputs, theirs.outputs),
            ):
                if now != before:
                    return (
                        f"model {name!r} has other {ends} than under the plan that runs: "
                        f"{_tensors_text(now, before)}, not {_tensors_text(before, now)}; "
                        "if its applications know, push it with --now"
                    )
        return ""

    def starves(self, arrivals_per_s: Mapping[str, float]) -> str:
        """Why its launch intervals would admit fewer tasks than arrive, or nothing."""
        strict_s = self.strict_s or {}
        limited_s = never_below_arrivals(strict_s, arrivals_per_s)
        for model, interval_s in strict_s.items():
            if limited_s[model] < _ARRIVALS_SLACK * interval_s:
                return (
                    f"it launches a task of {model!r} every {interval_s * 1e3:.1f} ms at most, "
                    f"and {arrivals_per_s[model]:.1f} arrive per second; shorten its launch interval"
                )
        return ""


def strict_intervals_s(plan: Plan) -> dict[str, float]:
    """Launch intervals in seconds per task, of the models whose intervals bound their rate."""
    return {
        model.name: model.launch_interval_us * 1e-6
        for model in plan.models
        if model.launch_interval_us and not model.work_conserving
    }


def _tensors_text(tensors: Sequence[TensorInfo], others: Sequence[TensorInfo]) -> str:
    """Those that are not among the others, or the order if all are."""
    shown = [one for one in tensors if one not in others] or tensors
    return ", ".join(
        f"{one.name!r} {one.dtype} {range_text(one.smallest or one.shape, one.shape)}"
        for one in shown[:_SHOWN]
    )
