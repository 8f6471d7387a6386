"""The result of a verification, as a value, JSON and text."""

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from stageloom.edge_agent.verify.standards import MIN_SENSITIVITY
from stageloom.shared.errors import ExitCode
from stageloom.shared.text import counted

_NAMED = 3  # final operators named in the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One tensor at one place, with the numbers of `stageloom.edge_agent.verify.standards`."""

    tensor: str
    block: int | None  # the block it was seen behind; None: in the task's answer
    difference: float  # infinite where one is not finite or has another shape
    noise: float  # by which onnxruntime differs from itself there
    tolerance: float
    jumps: bool  # rounding may flip an element: it agrees if a quarter of the inputs do
    agrees: bool
    doubtful: bool  # beyond the tolerance, but not beyond what the noise explains

    @property
    def where(self) -> str:
        """Return the tensor and its place as text."""
        place = "in the answer" if self.block is None else f"behind block {self.block}"
        return f"{self.tensor} {place}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values; infinity becomes null, as JSON has none."""
        return {name: _finite(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """A final operator that hides what it reads, and the tensor that is compared instead."""

    kind: str
    output: str
    tensor: str


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The numbers of section "The comparison that could fail" in docs/architecture.md, tensor by tensor."""

    model: str
    scheduler: str
    partition: str
    executor: str
    precision: str = "fp32"
    operators: int
    blocks: int
    seeded_weights: int  # weights that said nothing and were replaced
    pairs: int  # pairs of inputs drawn until one was good enough
    inputs: int  # run: the pair, or more where rounding may flip an element
    runs: int  # tasks through the engine
    compared: tuple[Compared, ...]
    before: tuple[Before, ...]
    sensitivity: float
    stable: bool  # every repeat had the same bits
    largest_agree: float | None = None  # share of the outputs' rows that have their largest element in place
    failed_tasks: int = 0  # tasks that the engine did not complete
    reason: str = ""  # of the first failed task

    @property
    def tensors(self) -> int:
        """Return the number of tensors compared per task."""
        return len(self.compared)

    @cached_property
    def worst(self) -> Compared | None:
        """Return the tensor that exceeds its tolerance most or comes closest; None if no task completed."""
        return max(
            self.compared,
            key=lambda tensor: (not tensor.agrees, not tensor.doubtful, _ratio(tensor)),
            default=None,
        )

    @property
    def difference(self) -> float:
        """Return the difference at `worst`."""
        return self.worst.difference if self.worst else 0.0

    @property
    def noise(self) -> float:
        """Return onnxruntime's noise at `worst`."""
        return self.worst.noise if self.worst else 0.0

    @property
    def tolerance(self) -> float:
        """Return the tolerance at `worst`."""
        return self.worst.tolerance if self.worst else 0.0

    @property
    def agrees(self) -> bool:
        """Return whether all that was compared is the same, whatever that proves."""
        return self.stable and not self.failed_tasks and all(tensor.agrees for tensor in self.compared)

    @property
    def doubtful(self) -> bool:
        """Return whether onnxruntime differs from itself so much that no verdict is possible."""
        return (
            not self.agrees
            and self.stable
            and not self.failed_tasks
            and all(tensor.agrees or tensor.doubtful for tensor in self.compared)
        )

    @property
    def approximate(self) -> bool:
        """Return whether it was computed in fewer bits than the model says."""
        return self.precision != "fp32"

    @property
    def _noise_is(self) -> str:
        return (
            "and itself on rounded weights and inputs"
            if self.approximate
            else "with and without optimisation"
        )

    @property
    def exit_code(self) -> ExitCode:
        """Return OK only if the results agree and could have differed."""
        if self.doubtful:
            return ExitCode.CANNOT_FAIL
        if not self.agrees:
            return ExitCode.FAILED
        return ExitCode.OK if self.sensitivity > MIN_SENSITIVITY else ExitCode.CANNOT_FAIL

    def to_json(self) -> dict[str, Any]:
        """Return plain values; infinity becomes null, as JSON has none."""
        plain = asdict(self)
        return {
            **plain,
            "difference": _finite(self.difference),
            "noise": _finite(self.noise),
            "tolerance": _finite(self.tolerance),
            "worst": self.worst.where if self.worst else "",
            "agrees": self.agrees,
            "doubtful": self.doubtful,
            "exit_code": int(self.exit_code),
            "tensors": self.tensors,
            "compared": [tensor.to_json() for tensor in self.compared],
        }

    def to_text(self) -> str:
        """Return a few lines of text, the verdict last."""
        blocks = f"partition {self.partition} of {counted(self.blocks, 'block')}"
        rows = {
            "model": f"{self.model}, {self.operators} operators, {self.seeded_weights} weights seeded",
            "schedule": f"{self.scheduler}, {blocks}, executor {self.executor}"
            + (f" in {self.precision}: approximate" if self.approximate else ""),
            "compared": f"{counted(self.tensors, 'tensor')} in {counted(self.runs, 'run')}, "
            f"{counted(self.pairs, 'pair')} of inputs drawn",
            **({"judged": self._judged()} if self.before else {}),
            **self._numbers(),
            **({"largest": self._largest()} if self.approximate else {}),
            "sensitivity": f"{self.sensitivity:.3g} (more than {MIN_SENSITIVITY:g})",
            "stable": "yes" if self.stable else "no",
        }
        return "\n".join([*(f"{name:12} {value}" for name, value in rows.items()), self._verdict()])

    def _numbers(self) -> dict[str, str]:
        worst = self.worst
        if worst is None:
            return {}
        agreeing = ", on the quarter of the inputs that agree best" if worst.jumps else ""
        return {
            "difference": f"{worst.difference:.3g} (at most {worst.tolerance:.3g}), {worst.where}{agreeing}",
            "noise": f"{worst.noise:.3g} there between onnxruntime {self._noise_is}",
        }

    def _largest(self) -> str:
        if self.largest_agree is None:
            return "no output has one"
        return (
            f"{100 * self.largest_agree:.1f} % of the outputs' rows have their largest element in its place"
        )

    def _judged(self) -> str:
        named = [
            f"before the final {tensor.kind} of {tensor.output}, at {tensor.tensor}"
            for tensor in self.before[:_NAMED]
        ]
        rest = len(self.before) - len(named)
        return "; ".join(named) + (f"; and {rest} more" if rest else "")

    def _verdict(self) -> str:
        if self.failed_tasks:
            return f"FAILED: {self.failed_tasks} tasks did not complete: {self.reason}"
        if not self.stable:
            return "FAILED: repeats of one input gave different bits"
        if self.doubtful and self.worst:
            return (
                f"CANNOT JUDGE: onnxruntime {'on rounded weights and inputs ' if self.approximate else ''}"
                f"differs from itself by {self.worst.noise:.3g} at "
                f"{self.worst.tensor}, which explains the difference but would hide a wrong schedule; "
                "give valid values of the inputs with --range NAME=LO:HI, or another --seed"
            )
        if not self.agrees:
            more = f", nor what rounding to {self.precision} explains" if self.approximate else ""
            return f"FAILED: the schedule does not compute what the model computes{more}"
        if self.exit_code is ExitCode.CANNOT_FAIL:
            return (
                "PROVES NOTHING: the outputs hardly depend on the inputs; "
                "give valid values of the inputs with --range NAME=LO:HI"
            )
        return f"OK, approximate: rounding to {self.precision} explains it" if self.approximate else "OK"


def _ratio(tensor: Compared) -> float:
    """Return difference over tolerance; infinite for a difference where none is allowed."""
    if tensor.tolerance:
        return tensor.difference / tensor.tolerance
    return math.inf if tensor.difference else 0.0


def _finite(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else None
