"""Rollouts: a version of a model that goes to selected devices in waves."""

from enum import Enum
from typing import Annotated

from msgspec import Meta

from stageloom.planner.schema.base import After, PageSize, Reply, Request
from stageloom.planner.schema.device import Labels, Selection
from stageloom.shared.messages.base import (
    NO_NUL,
    DeviceName,
    Epoch,
    Generation,
    Line,
    MicroSeconds,
    ModelVersion,
    Name,
    NameOrVersion,
    SmallCount,
)


class RolloutState(str, Enum):
    """How far a rollout is. In the last three nothing is asked any more."""

    RUNNING = "running"
    PAUSED = "paused"  # until it is resumed; devices that were asked still decide
    STOPPED = "stopped"  # by itself: too many devices failed
    ABORTED = "aborted"
    COMPLETED = "completed"


class AskState(str, Enum):
    """How far a device of a rollout is."""

    WAITING = "waiting"  # not asked yet
    ASKED = "asked"
    DONE = "done"  # it keeps the version
    FAILED = "failed"  # its trial did not let the version in, or nothing could be planned with it
    UNREACHED = "unreached"  # offline for longer than the rollout waits; it was given its old plan back
    SKIPPED = "skipped"  # there is nothing to ask of it, or somebody else gave it another plan
    WITHDRAWN = "withdrawn"  # asked and undecided when the rollout ended; it was given its old plan back
    RETURNED = "returned"  # it kept the version, and was given its old plan back


Reach = Annotated[float, Meta(ge=1.0, le=31_536_000.0)]
"""Seconds that a device may be offline before a rollout goes on without it."""


class RolloutCreateRequest(Request, frozen=True, kw_only=True):
    """Bring a version of a model (`NAME@VERSION`, else the newest) to the devices with all labels of
    `label` (none: all) that should run the model.

    `waves`: numbers or shares of the devices up to the end of each wave. More than `max_failed` failures stop
    it. `rollout`: its name; without one it is named after the version.
    """

    model: NameOrVersion
    label: Selection = ()
    waves: Annotated[str, Meta(min_length=1, max_length=512, pattern=NO_NUL)] = "1,10%,100%"
    max_failed: SmallCount = 0
    reach_s: Reach = 1800.0
    rollout: Name | None = None


class RolloutInfo(Reply, frozen=True, kw_only=True):
    """A rollout. `wave`: the current one of `waves`, from 1; `reason`: of its state. Then numbers of devices,
    in all and by state."""

    rollout: Name
    model: Name
    version: ModelVersion
    state: RolloutState
    reason: Line
    wave: SmallCount
    waves: SmallCount
    labels: Labels
    max_failed: SmallCount
    reach_s: Reach
    created_at_us: MicroSeconds
    changed_at_us: MicroSeconds
    devices: SmallCount
    waiting: SmallCount = 0
    asked: SmallCount = 0
    done: SmallCount = 0
    failed: SmallCount = 0
    unreached: SmallCount = 0
    skipped: SmallCount = 0
    withdrawn: SmallCount = 0
    returned: SmallCount = 0


class RolloutListRequest(Request, frozen=True, kw_only=True):
    """Rollouts, newest first."""

    after: After = ""
    limit: PageSize = 128


class RolloutShowRequest(Request, frozen=True, kw_only=True):
    rollout: Name


class RolloutDevicesRequest(Request, frozen=True, kw_only=True):
    """The devices of a rollout, by wave and name."""

    rollout: Name
    after: After = ""
    limit: PageSize = 128


class RolloutDeviceInfo(Reply, frozen=True, kw_only=True):
    """A device of a rollout. Plans are empty and the generation is 0 until it is asked."""

    device: DeviceName
    wave: SmallCount
    state: AskState
    reason: Line
    old_plan: Name | None
    new_plan: Name | None
    epoch: Epoch
    generation: Generation
    changed_at_us: MicroSeconds


class RolloutPauseRequest(Request, frozen=True, kw_only=True):
    """Ask no further device until it is resumed. Devices that were asked still decide."""

    rollout: Name


class RolloutResumeRequest(Request, frozen=True, kw_only=True):
    """Go on; without the devices that its wave did not reach, where it paused for those."""

    rollout: Name


class RolloutAbortRequest(Request, frozen=True, kw_only=True):
    """End a rollout. Devices that are undecided get their old plan back; with `rollback` also those that
    keep the version."""

    rollout: Name
    rollback: bool = False
