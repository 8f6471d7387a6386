"""Figures and moments as the pages show them."""

import math
from datetime import datetime, timezone
from typing import Final

from stageloom.shared.policy.trigger import Cause

_CAUSES: Final = {
    Cause.POWER_MODE: "the power mode changed",
    Cause.REGIME: "arrivals moved by a factor of {value}, more than {threshold}",
    Cause.VARIANCE: "queues drifted apart: their variance was {value}, above {threshold}",
    Cause.OLDEST_AGE: "a task had waited for {value} s, longer than {threshold} s",
    Cause.DRIFT: "latency differed from the plan by a factor of {value}, more than {threshold}",
}

_WHOLE: Final = 999.5
"""From here on three digits would be written with an exponent."""

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def cause_text(cause: str, value: float, threshold: float) -> str:
    """What fired an alarm, in words; a cause of a later agent as it is spelled."""
    known = next((text for one, text in _CAUSES.items() if one.value == cause), None)
    if known is None:
        return f"{cause.replace('_', ' ')}: {figure(value)}, limit {figure(threshold)}"
    return known.format(value=figure(value), threshold=figure(threshold))


def moment(at_us: int) -> str:
    """Date and time in UTC; `never` for 0."""
    if not at_us:
        return "never"
    try:
        return datetime.fromtimestamp(at_us / 1e6, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "a moment that no calendar has"


def count(number: int, noun: str) -> str:
    """`1 device`, `2 devices`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(octets: int) -> str:
    """Bytes in a unit that fits."""
    power = min(int(math.log(octets, 1024)), len(_UNITS) - 1) if octets > 0 else 0
    return f"{figure(octets / 1024**power)} {_UNITS[power]}" if power else f"{octets} B"


def figure(value: float | None) -> str:
    """Three digits that count; a dash for what is not known."""
    if value is None:
        return "\N{EN DASH}"
    return f"{value:,.0f}" if abs(value) >= _WHOLE else f"{value:.3g}"


def latency(value_ms: float) -> str:
    """Milliseconds; a dash for 0, which is no task's: it would look like a very good one."""
    return f"{figure(value_ms)} ms" if value_ms else figure(None)


def ratio(value: float | None, low: float | None, high: float | None) -> str:
    """A ratio with its interval of 95 %."""
    if value is None:
        return ""
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


def generation(epoch: int, number: int) -> str:
    """`epoch.generation`; a dash before the first."""
    return f"{epoch}.{number}" if number else "\N{EN DASH}"
