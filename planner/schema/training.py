"""Trainings of the learned policies: gpg, which schedules models, and maddpg, which combines and launches."""

from typing import Annotated, Literal

from msgspec import Meta

from stageloom.planner.schema.base import LongText, Reply, Request
from stageloom.planner.schema.plan import ArrivalRate, ModelOptions
from stageloom.planner.schema.policy import PolicyVerdict
from stageloom.planner.schema.prediction import Twin
from stageloom.shared.messages.base import (
    NO_NUL,
    Count,
    DeviceName,
    DigestText,
    Line,
    Name,
    NameOrVersion,
    Real,
    Seconds,
    ShortText,
)

TrainingBudget = Annotated[float, Meta(gt=0.0, le=31 * 86_400.0)]
"""Seconds that a training may take; the best so far is kept."""

Setting = bool | int | float | str | list[int] | None


class GpgTrainingRequest(Request, frozen=True, kw_only=True):
    """Train gpg on random combined blocks of models, and keep the policy in the store.

    `models` empty: all of the store. `device`: the costs that its class measured; None: estimates of many
    devices. First it imitates exact search on `imitation_steps` blocks, then it learns from `episodes`
    blocks that it tries. `members_max`: blocks in a combined one at most. Equal seeds give equal policies.
    After `budget_s` it ends with the best so far.

    A training that was interrupted goes on when the same is asked again, from its last validation.
    """

    models: Annotated[tuple[NameOrVersion, ...], Meta(max_length=64)] = ()
    device: DeviceName | None = None
    imitation_steps: Annotated[int, Meta(ge=0, le=500_000)] = 400
    episodes: Annotated[int, Meta(ge=0, le=500_000)] = 300
    members_max: Annotated[int, Meta(ge=1, le=8)] = 3
    seed: Count = 0
    budget_s: TrainingBudget = 900.0


class GpgValidation(Reply, frozen=True, kw_only=True):
    """One validation of gpg, for the curves. `ratio`: the cost of its schedules over that of one operator
    after another, mean over blocks that no step draws."""

    step: Count
    phase: ShortText
    ratio: Real
    losses: dict[ShortText, Real]


class GpgTrainingReply(Reply, frozen=True, kw_only=True):
    """A training that has ended: done, no better for a while, time, or interrupted.

    `checkpoint` is the policy's digest. `costs`: the device class whose costs it learned, or `analytic`.
    `resumed_steps`: steps of it before this request.
    """

    checkpoint: DigestText
    ended: ShortText
    train_s: Seconds
    steps: Count
    resumed_steps: Count = 0
    validation_ratio: Real
    costs: ShortText
    models: dict[DigestText, Name]
    settings: dict[ShortText, Setting]
    versions: dict[ShortText, ShortText]
    curves: tuple[GpgValidation, ...]


class MaddpgTrainingRequest(Request, frozen=True, kw_only=True):
    """Train maddpg on a device's twin; keep the policy and the best plan found on the way.

    `models` empty: those of the plan that the device runs, cut as there. `twin`: a device to simulate instead
    of the one for the device's class. Without `rates` tasks arrive as the device counted in its newest
    `last_s` of telemetry. `members_max` (H) None: TOP's for the device. `transitions`: steps of experience.
    `workers` simulate side by side; None: one less than the cores. With one, equal seeds give equal policies.
    `ray_address`: a Ray cluster for them, or `local`; empty: processes. `budget_s` has the seconds before an
    interruption in it. `scheduler`: finds the stages of the combined blocks that the training meets; gpg by
    the policy that is kept for the device's class, or the packaged one.

    It ends with the policy's check, which the budget does not count. A policy that does not pass is kept and
    has no say, unless it is `unchecked`. A training that was interrupted goes on when the same is asked
    again, at most one validation earlier.
    """

    device: DeviceName
    models: Annotated[tuple[ModelOptions, ...], Meta(max_length=64)] = ()
    twin: Twin = ""
    rates: Annotated[tuple[ArrivalRate, ...], Meta(max_length=64)] = ()
    last_s: Annotated[float, Meta(ge=1.0, le=1e9)] = 600.0
    members_max: Annotated[int, Meta(ge=1, le=8)] | None = None
    transitions: Annotated[int, Meta(ge=20, le=1_000_000)] = 2000
    seed: Annotated[int, Meta(ge=0, le=10_000)] = 0
    workers: Annotated[int, Meta(ge=1, le=1024)] | None = None
    ray_address: Annotated[str, Meta(max_length=256, pattern=NO_NUL)] = ""
    budget_s: TrainingBudget = 600.0
    unchecked: bool = False
    scheduler: Literal["beam", "gpg"] = "beam"


class TrainedScore(Reply, frozen=True, kw_only=True):
    """Means over the seeds; a spread is half of the highest less the lowest. `met`: the share of the tasks
    that were served."""

    throughput_per_s: Real
    throughput_spread: Real
    p99_s: Real
    p99_spread: Real
    utilisation: Real
    utilisation_spread: Real
    queue_variance: Real
    queue_variance_spread: Real
    variance_growth: Real
    met: Real


class MaddpgValidation(Reply, frozen=True, kw_only=True):
    """One validation of maddpg, for the curves; the best plan so far beside the policy."""

    transitions: Count
    updates: Count
    policy: TrainedScore
    best: TrainedScore
    losses: dict[ShortText, Real]


class MaddpgTrainingReply(Reply, frozen=True, kw_only=True):
    """A training that has ended: done, time, or interrupted.

    `checkpoint` is the policy's digest, `plan` the best plan's name. `rows`: every block alone, the best
    rival, the policy and the best plan, all on arrivals that chose none of them. `twin` and `arrivals`
    say where the simulated times and the load are from; `device_file` is the simulated device's. `resumed_s`:
    seconds of it before this request. `verdict`: that of the policy's check, None where there was none.
    """

    checkpoint: DigestText
    plan: Name
    ended: ShortText
    train_s: Seconds
    resumed_s: Seconds = 0.0
    transitions: Count
    updates: Count
    twin: Line
    arrivals: Line
    arrivals_per_s: tuple[Real, ...]
    rows: dict[ShortText, TrainedScore]
    curves: tuple[MaddpgValidation, ...]
    device_file: LongText
    verdict: PolicyVerdict | None = None
