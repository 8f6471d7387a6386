"""A plan's timeline as the page draws it."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from stageloom.planner.api.page.rendering import render
from stageloom.planner.api.page.timeline import WIDTH, TimelineDrawing, draw


def drawn(spans: Iterable[tuple[int, float, float]]) -> tuple[TimelineDrawing, str]:
    """The drawing, and its HTML, of spans by track, begin and length in microseconds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": f"lane {tid}"}} for tid in (1, 2, 3)
    ]
    events += [
        {"ph": "X", "name": "a", "ts": ts, "dur": dur, "tid": tid, "args": {"combined_block": 0}}
        for tid, ts, dur in spans
    ]
    drawing = draw(json.dumps({"traceEvents": events, "otherData": {"costs": "estimated"}}))
    return drawing, render("timeline.html", {"drawing": drawing, "plan": "p"}).decode()


def test_of_too_many_spans_all_lanes_are_drawn_up_to_the_first_that_is_left_out() -> None:
    """A step of 30 ms, and two lanes of 3,000 spans, of which a trace has the second behind the first."""
    steps = [(tid, 10.0 * number, 10.0) for tid in (2, 3) for number in range(3000)]
    drawing, text = drawn([(1, 0.0, 30_000.0), *steps])
    assert Counter(bar.lane for bar in drawing.bars) == {"lane 1": 1, "lane 2": 2000, "lane 3": 1999}
    assert (drawing.end_ms, drawing.predicted_ms, drawing.cut) == (19.99, 30.0, 2001)
    assert max(bar.x + bar.width for bar in drawing.bars) <= WIDTH + 0.5
    assert "One run of every replica with a whole batch, predicted: 30 ms" in text
    assert "The first 20 ms are drawn: what begins later (2,001 spans)" in text


def test_texts_of_moments_end_at_them_so_that_none_leaves_the_drawing() -> None:
    drawing, text = drawn([(1, 0.0, 10.0)])
    ends = re.findall(r'<text class="axis" text-anchor="end" x="([\d.]+)"', text)
    assert len(ends) == len(drawing.ticks) > 4 and all(float(end) < WIDTH for end in ends)
