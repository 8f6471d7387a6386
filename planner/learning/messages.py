"""What a planner and a training's process tell each other: a JSON object a line.

The planner writes one `TrainingTask` to the process's stdin and leaves that open: a process whose stdin ends
has no planner any more. The process writes `TrainingStep` now and then, and at last `Trained`, `Checked` or
`TrainingFailed`. SIGINT ends a training with its best so far, and a check without a verdict.
"""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from stageloom.planner.schema.job import ProblemDetails
from stageloom.planner.schema.policy import PolicyCheckRequest, PolicyVerdict
from stageloom.planner.schema.training import (
    GpgTrainingReply,
    GpgTrainingRequest,
    MaddpgTrainingReply,
    MaddpgTrainingRequest,
)


class TrainingTask(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to train or to check (one of the three), from the store of this data directory."""

    data_dir: str
    gpg: GpgTrainingRequest | None = None
    maddpg: MaddpgTrainingRequest | None = None
    check: PolicyCheckRequest | None = None


class TrainingStep(Struct, frozen=True, kw_only=True, tag="step"):
    """How far it is, as `stageloom.planner.api.jobs.Job.progress` takes it."""

    text: str
    done: int = 0
    size: int = 0
    figures: dict[str, float] = {}


class Trained(Struct, frozen=True, kw_only=True, tag="trained"):
    """What a training leaves: rows of the store, and the reply. `plan`: a plan's canonical bytes.

    `verdict`: that of the policy's check; None for a policy that needs none, or that was not checked.
    `run`: the folder of a run that is over, which `forget_run` deletes once all of this is stored.
    """

    policy: str
    device_class: str
    checkpoint: bytes
    provenance: dict[str, Any]
    curves: list[dict[str, Any]]
    plan: bytes = b""
    verdict: PolicyVerdict | None = None
    gpg: GpgTrainingReply | None = None
    maddpg: MaddpgTrainingReply | None = None
    run: str = ""


class Checked(Struct, frozen=True, kw_only=True, tag="checked"):
    """What a check leaves."""

    verdict: PolicyVerdict


class TrainingFailed(Struct, frozen=True, kw_only=True, tag="failed"):
    """There is no result, and why."""

    problem: ProblemDetails


TrainingMessage = TrainingStep | Trained | Checked | TrainingFailed

Tell = Callable[[TrainingStep], None]
"""Tells the planner how far a training is."""
