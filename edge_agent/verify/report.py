"""What a verification found, as a value and as text."""

import math
from dataclasses import dataclass
from typing import Any

from edge_agent.verify.compare import MAX_DIFFERENCE, MIN_SENSITIVITY
from shared.errors import ExitCode
from shared.text import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The two numbers of section "Executors" in docs/architecture.md, and what they were taken over."""

    model: str
    scheduler: str
    partition: str
    executor: str
    operators: int
    blocks: int
    seeded_weights: int  # weights that said nothing and were replaced
    pairs: int  # pairs of inputs drawn until one was good enough
    runs: int  # tasks through the engine
    tensors: int  # block-border tensors and outputs compared per task
    difference: float  # largest over all of them; infinite where one is not finite or has another shape
    worst: str  # where the difference is largest
    sensitivity: float
    stable: bool  # every repeat had the same bits
    failed_tasks: int = 0  # tasks that the engine did not complete
    reason: str = ""  # of the first failed task

    @property
    def agrees(self) -> bool:
        """Everything that was compared is the same, whatever that proves."""
        return self.difference <= MAX_DIFFERENCE and self.stable and not self.failed_tasks

    @property
    def exit_code(self) -> ExitCode:
        """OK only where results agree and could have differed."""
        if not self.agrees:
            return ExitCode.FAILED
        return ExitCode.OK if self.sensitivity > MIN_SENSITIVITY else ExitCode.CANNOT_FAIL

    def to_json(self) -> dict[str, Any]:
        """Plain values; JSON knows no infinity, so a difference that is none is null."""
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "difference": self.difference if math.isfinite(self.difference) else None,
            "agrees": self.agrees,
            "exit_code": int(self.exit_code),
        }

    def to_text(self) -> str:
        """A few lines for people, the verdict last."""
        blocks = f"partition {self.partition} of {counted(self.blocks, 'block')}"
        where = f" at {self.worst}" if self.worst else ""
        rows = {
            "model": f"{self.model}, {self.operators} operators, {self.seeded_weights} weights seeded",
            "schedule": f"{self.scheduler}, {blocks}, executor {self.executor}",
            "compared": f"{counted(self.tensors, 'tensor')} in {counted(self.runs, 'run')}, "
            f"{counted(self.pairs, 'pair')} of inputs drawn",
            "difference": f"{self.difference:.3g} (at most {MAX_DIFFERENCE:g}){where}",
            "sensitivity": f"{self.sensitivity:.3g} (more than {MIN_SENSITIVITY:g})",
            "stable": "yes" if self.stable else "no",
        }
        return "\n".join([*(f"{name:12} {value}" for name, value in rows.items()), self._verdict()])

    def _verdict(self) -> str:
        if self.failed_tasks:
            return f"FAILED: {self.failed_tasks} tasks did not complete: {self.reason}"
        if not self.stable:
            return "FAILED: repeats of one input gave different bits"
        if not self.agrees:
            return "FAILED: the schedule does not compute what the model computes"
        if self.exit_code is ExitCode.CANNOT_FAIL:
            return (
                "PROVES NOTHING: the outputs hardly depend on the inputs; "
                "give valid values of the inputs with --range NAME=LO:HI"
            )
        return "OK"
