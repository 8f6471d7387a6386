"""A device's answers to requests for measurements: which of them are taken, and why others are not.

Costs are shared by all devices of a class, so a device tells only what it was asked, of the class that it is.
"""

from collections.abc import Iterable
from typing import Final, TypeAlias

from sqlalchemy.orm import Session

from stageloom.planner.store.devices import known_device
from stageloom.planner.store.tables import ProfileRow, StageProfileRow
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.telemetry import OperatorTiming, ProfileResult, StageProfileResult, StageTiming

Request: TypeAlias = ProfileRow | StageProfileRow

MOST_US: Final = 3600e6
"""No operator or stage takes longer: a request may spend an hour at most (`ProfileRequest.budget_s`)."""

LEAST_US: Final = 1e-3
"""Nor less: clocks count whole nanoseconds. What divides by a time stays within bounds, too."""

_LINE: Final = 512  # characters of a reason


def not_open(request: Request | None, device: DeviceId, number: int) -> str:
    """Why a device has nothing to say about a request; empty where it was asked and has not answered."""
    if request is None or request.device != device:
        return f"request {number} was not made of this device"
    return "" if request.answered_at_us is None else f"request {number} was answered before"


def foreign(session: Session, device: DeviceId, request: Request, environment: str) -> str:
    """Why measurements of an environment are not the device's to tell; empty where they are.

    They are of the class that it was when it was asked, or is now: its power mode may change in between.
    """
    own = known_device(session, device).device_class
    if environment in ("", own, request.environment):
        return ""
    return f"it measured in {environment!r}, and is {own!r}"


def implausible(timings: Iterable[OperatorTiming | StageTiming]) -> str:
    """Why these cannot be times; empty where they can. NaN and infinity have not passed the decoder."""
    for timing in timings:
        if not LEAST_US <= timing.median_us <= MOST_US:
            return f"a time of {timing.median_us:g} us is outside {LEAST_US:g} to {MOST_US:g}"
        if not 0.0 <= timing.spread_us <= MOST_US or timing.runs < 1:
            return f"a spread of {timing.spread_us:g} us over {timing.runs} runs cannot be"
    return ""


def note(
    request: Request,
    result: ProfileResult | StageProfileResult,
    environment: str,
    refusal: str,
    now_us: int,
) -> None:
    """Enter part of an answer into its request. Refused ones end it as well: the device sends no other."""
    if not refusal:
        request.environment = environment
    if result.reason or refusal:
        request.reason = (f"refused: {refusal}" if refusal else result.reason)[:_LINE]
    if result.last:
        request.answered_at_us = now_us
