"""What two versions of models gave for the same inputs."""

from typing import Annotated

from msgspec import Meta

from stageloom.planner.schema.base import Reply
from stageloom.shared.messages.base import DeviceName, MicroSeconds, Real, ShortText, SmallCount


class OutputsInfo(Reply, frozen=True, kw_only=True):
    """What two versions of models gave for the same inputs, and the output that differs most, as
    `stageloom.shared.messages.outputs.OutputsVerdict` says."""

    tolerance: Real
    inputs: SmallCount
    agrees: bool
    model: ShortText
    output: ShortText
    difference: Real | None
    max_abs: Real | None
    max_rel: Real | None
    agreement: Real
    index: Annotated[tuple[SmallCount, ...], Meta(max_length=16)]
    old: ShortText
    new: ShortText


class OutputsOnDevice(Reply, frozen=True, kw_only=True):
    """What a device found of a plan's new versions, and when by its clock."""

    device: DeviceName
    decided_us: MicroSeconds
    outputs: OutputsInfo
