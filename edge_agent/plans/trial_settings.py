"""Settings of trials and guards, as the agent's settings file spells them; see docs/trial.md."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from stageloom.shared.engine.interval_guard import GuardConfig
from stageloom.shared.engine.trial import TrialConfig

_Seconds = Annotated[float, Meta(gt=0.0, le=86_400.0)]
_Share = Annotated[float, Meta(ge=0.0, le=10.0)]


class TrialSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a trial is run: the fields of `stageloom.shared.engine.trial.TrialConfig`, and what comes before
    it."""

    timing_s: _Seconds = 10.0  # the models are timed for so long at most before the windows begin
    shortest_window_s: _Seconds = 0.25
    instance_times: Annotated[float, Meta(ge=1.0, le=10_000.0)] = 20.0
    cut: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.1
    min_pairs: Annotated[int, Meta(ge=2, le=10_000)] = 8
    confidence: Annotated[float, Meta(ge=0.5, lt=1.0)] = 0.95
    gain: _Share = 0.02
    limit_s: _Seconds = 60.0
    guard: _Share = 0.2
    age_floor_s: _Seconds = 0.01
    brake_age_s: _Seconds = 1.0
    stall_s: _Seconds = 10.0
    min_failed: Annotated[int, Meta(ge=1, le=1_000_000)] = 3
    max_failed_share: _Share = 0.1

    def trial(self) -> TrialConfig:
        """For the state machine."""
        fields = msgspec.structs.asdict(self)
        del fields["timing_s"]
        return TrialConfig(**fields)


class GuardSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a plan that is activated without a trial is guarded:
    `stageloom.shared.engine.interval_guard.GuardConfig`."""

    length_s: _Seconds = 10.0
    worsening: _Share = 0.2
    min_tasks: Annotated[int, Meta(ge=1, le=1_000_000)] = 100
    age_floor_s: _Seconds = 0.01
    sample_s: _Seconds = 0.25

    def guard(self) -> GuardConfig:
        """For the state machine."""
        return GuardConfig(**msgspec.structs.asdict(self))
