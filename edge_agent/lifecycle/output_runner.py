"""Drives one comparison of outputs, as a trial of a new version that cannot be compared by its speed. Pure.

The control serves all the time: nothing is launched into the candidate. Once the trial's record is durable
the engine process runs both versions on inputs of real tasks (`CompareOutputs`) and answers with what they
gave. Without an answer, or without a task, nothing is known, and the trial may be tried again.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from stageloom.edge_agent.lifecycle.events import Action
from stageloom.edge_agent.worker.messages import CompareOutputs, OutputsCompared, WindowMeasured
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.engine.trial import TrialConfig, TrialRecord, TrialResult, Verdict, lasting
from stageloom.shared.engine.windows import Side

INPUTS: Final = 32
"""Of each model whose version is new."""


class OutputRunner:
    """One comparison; with a `result` it is over. The methods are those of a `TrialRunner`."""

    side: Final = Side.CONTROL
    settling: Final = False
    stalled: Final = False

    def __init__(
        self,
        record: TrialRecord,
        models: tuple[str, ...],
        keys: tuple[PlanKey, PlanKey],
        *,
        tolerance: float,
        begins: Callable[[str], list[Action]],
        number: int,
        config: TrialConfig,
    ) -> None:
        """`keys` of the control and of the candidate, which both are loaded. `begins`: see `TrialRunner`.

        `number` is unique in this agent.
        """
        self.record = record
        self.result: TrialResult | None = None
        self._models = models
        self._keys = keys
        self._tolerance = tolerance
        self._begins = begins
        self._number = number
        self._config = config
        self._began_s = 0.0
        self._ordered_s: float | None = None

    @property
    def over(self) -> bool:
        return self.result is not None

    def progress(self, now: float) -> tuple[int, float | None, float]:
        """No pairs, no ratio, and seconds left at most."""
        since_s = now - self._ordered_s if self._ordered_s is not None else 0.0
        return 0, None, max(self._config.limit_s - since_s, 0.0)

    def begin(self, now: float) -> list[Action]:
        self._began_s = now
        return self.again()

    def again(self) -> list[Action]:
        """Until the record is durable."""
        if self.over or self._ordered_s is not None:
            return []
        return self._begins(f"outputs are compared for up to {lasting(self._config.limit_s)}")

    def recorded(self, now: float) -> list[Action]:
        """The record is durable: the engine process may run the candidate."""
        if self.over or self._ordered_s is not None:
            return []
        self._ordered_s = now
        control, candidate = self._keys
        limit_s = self._config.limit_s
        return [
            CompareOutputs(self._number, control, candidate, self._models, self._tolerance, INPUTS, limit_s)
        ]

    def compared(self, report: OutputsCompared, now: float) -> list[Action]:
        """What the engine process found."""
        if self.over or report.number != self._number:
            return []
        verdict = report.verdict
        if verdict is not None:
            agrees = Verdict.COMMIT if verdict.agrees else Verdict.REJECT
            reason = "; ".join(filter(None, (verdict.text(), report.reason)))
            return self._end(TrialResult(verdict=agrees, reason=reason, outputs=verdict), now)
        failed = Verdict.REJECT if report.failed else Verdict.ABANDONED
        return self._end(TrialResult(verdict=failed, reason=report.reason), now)

    def crashed(self, how: str, now: float) -> list[Action]:
        """The engine process ended while the candidate ran on its inputs."""
        if self._ordered_s is None:
            return self.abandon(f"the control crashed: {how}", now)
        reason = f"the engine crashed while the new version ran beside the old one: {how}"
        return self._end(TrialResult(verdict=Verdict.REJECT, reason=reason), now)

    def abandon(self, reason: str, now: float) -> list[Action]:
        return self._end(TrialResult(verdict=Verdict.ABANDONED, reason=reason), now)

    def tick(self, now: float) -> list[Action]:
        """End what is not answered."""
        since_s = self._began_s if self._ordered_s is None else self._ordered_s + self._config.limit_s
        if now <= since_s + self._config.stall_s:
            return []
        return self.abandon("the outputs could not be compared: no answer came", now)

    # A comparison has no windows.

    def activated(self, side: Side, now: float) -> list[Action]:
        return []

    def settled(self, side: Side, now: float) -> list[Action]:
        return []

    def measured(self, figures: WindowMeasured, now: float) -> list[Action]:
        return []

    def _end(self, result: TrialResult, now: float) -> list[Action]:
        if not self.over:
            self.result = replace(result, seconds_s=now - self._began_s)
        return []
