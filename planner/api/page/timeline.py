"""A plan's timeline as rectangles: lanes from top to bottom, time from left to right."""

from typing import Any, Final, NamedTuple

import msgspec

WIDTH: Final = 1000.0
_LANE: Final = 34
_HEAD: Final = 24
_GUTTER: Final = 80.0
_CHARACTER: Final = 6.6  # of a bar's text
_MOST_BARS: Final = 4000
_TONES: Final = 6


class Bar(NamedTuple):
    """One span: its place in the drawing, what fits into it as text, and what it is."""

    x: float
    y: int
    width: float
    label: str
    tone: int
    lane: str
    name: str
    begin_ms: float
    took_ms: float
    operators: str


class TimelineLane(NamedTuple):
    """A track and the y of its top."""

    name: str
    y: int


class AxisTick(NamedTuple):
    """A moment of the axis."""

    x: float
    text: str


class TimelineDrawing(NamedTuple):
    """`cut` counts spans that are too many to be drawn; the axis ends at `end_ms`, where the first of them
    begins. `predicted_ms`: of all."""

    height: int
    lanes: list[TimelineLane]
    bars: list[Bar]
    ticks: list[AxisTick]
    end_ms: float
    predicted_ms: float
    costs: str
    cut: int


def draw(trace: str) -> TimelineDrawing:
    """Of a Chrome trace as `stageloom.planner.export.perfetto` makes it."""
    document: dict[str, Any] = msgspec.json.decode(trace)
    events = document["traceEvents"]
    tracks = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    lanes = {
        tid: TimelineLane(tracks[tid], _HEAD + _LANE * place) for place, tid in enumerate(sorted(tracks))
    }
    spans = sorted((event for event in events if event["ph"] == "X"), key=lambda span: span["ts"])
    drawn, left = spans[:_MOST_BARS], spans[_MOST_BARS:]
    predicted_us = max((span["ts"] + span["dur"] for span in spans), default=0.0)
    end_us = (left[0]["ts"] if left else predicted_us) or 1.0
    scale = (WIDTH - _GUTTER) / end_us
    bars = [
        _bar(span, lanes[span["tid"]], end_us, scale) for span in sorted(drawn, key=lambda span: span["tid"])
    ]
    return TimelineDrawing(
        height=_HEAD + _LANE * len(lanes) + 4,
        lanes=list(lanes.values()),
        bars=bars,
        ticks=_ticks(end_us / 1e3, scale * 1e3),
        end_ms=end_us / 1e3,
        predicted_ms=predicted_us / 1e3,
        costs=document["otherData"]["costs"],
        cut=len(left),
    )


def _bar(span: dict[str, Any], lane: TimelineLane, end_us: float, scale: float) -> Bar:
    width = max(min(span["dur"], end_us - span["ts"]) * scale, 0.5)
    room = int((width - 6) / _CHARACTER)
    name = span["name"]
    _, _, stage = name.rpartition(": ")
    label = next((text for text in (name, stage, stage.removeprefix("stage ")) if len(text) <= room), "")
    return Bar(
        x=round(_GUTTER + span["ts"] * scale, 2),
        y=lane.y,
        width=round(width, 2),
        label=label,
        tone=span["args"]["combined_block"] % _TONES,
        lane=lane.name,
        name=name,
        begin_ms=span["ts"] / 1e3,
        took_ms=span["dur"] / 1e3,
        operators=span["args"].get("operators", ""),
    )


def _ticks(end_ms: float, scale: float) -> list[AxisTick]:
    """Four to ten round moments."""
    step = 10.0**-6
    while end_ms / step > 10:
        step = _next_step(step)
    return [
        AxisTick(round(_GUTTER + step * number * scale, 2), f"{step * number:g} ms")
        for number in range(int(end_ms / step) + 1)
    ]


def _next_step(step: float) -> float:
    """1, 2, 5, 10, ... of any power of ten."""
    text = f"{step:.0e}"
    return step * (2.5 if text.startswith("2") else 2.0)
