"""Five charts as inline SVG, so that the report opens anywhere without a network or a script."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 920, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 14, 40
COLORS = ("var(--c0)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)")


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover low..high."""
    if high <= low:
        high = low + 1.0
    raw = (high - low) / count
    power = 10.0 ** floor(log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)
    return [round(index * step, 12) for index in range(floor(low / step), ceil(high / step) + 1)]


class _Frame:
    """Axes with ticks; maps data to pixels."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], *, height: int = HEIGHT) -> None:
        self.x_ticks = [t for t in nice_ticks(*x, count=8) if x[0] <= t <= x[1]]
        self.y_ticks = nice_ticks(*y)
        self.x0, self.x1 = x[0], max(x[1], x[0] + 1e-9)
        self.y0, self.y1 = self.y_ticks[0], self.y_ticks[-1]
        self.height = height

    def px(self, value: float) -> float:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - _LEFT - _RIGHT)

    def py(self, value: float) -> float:
        span = self.height - _TOP - _BOTTOM
        return _TOP + (self.y1 - value) / (self.y1 - self.y0) * span

    def axes(self, x_label: str, y_label: str) -> list[str]:
        bottom = self.height - _BOTTOM
        parts = []
        for tick in self.y_ticks:
            y = self.py(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
            )
        for tick in self.x_ticks:
            x = self.px(tick)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
            )
        parts.append(
            f'<text class="label" x="{(WIDTH + _LEFT) / 2:.0f}" y="{self.height - 6}" '
            f'text-anchor="middle">{escape(x_label)}</text>'
        )
        middle = (_TOP + bottom) / 2
        parts.append(
            f'<text class="label" x="14" y="{middle:.0f}" text-anchor="middle" '
            f'transform="rotate(-90 14 {middle:.0f})">{escape(y_label)}</text>'
        )
        return parts


def _svg(parts: Sequence[str], height: int, title: str) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *parts, "</svg>"])


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    marks: Sequence[tuple[float, str]] = (),
    limit: tuple[float, str] | None = None,
) -> str:
    """One line per series over shared axes, with vertical marks for moments of decision.

    `limit` is a value of the y axis that a dashed line shows, and its name.
    """
    points = [point for line in series.values() for point in line] or [(0.0, 0.0)]
    highest = max([y for _, y in points] + ([limit[0]] if limit else [])) or 1.0
    frame = _Frame((min(x for x, _ in points), max(x for x, _ in points)), (0.0, highest))
    parts = frame.axes(x_label, y_label)
    if limit:
        y = frame.py(limit[0])
        parts.append(f'<line class="mark" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{WIDTH - _RIGHT - 4}" y="{y - 5:.1f}" text-anchor="end">'
            f"{escape(limit[1])}</text>"
        )
    for at, text, row in _in_rows(marks, lambda at: frame.px(at)):
        x = frame.px(at)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{x + 4:.1f}" y="{_TOP + 10 + 13 * row}">{escape(text)}</text>')
    for index, (name, line) in enumerate(series.items()):
        path = " ".join(f"{frame.px(x):.1f},{frame.py(y):.1f}" for x, y in line)
        color = COLORS[index % len(COLORS)]
        parts.append(
            f'<polyline class="line" style="stroke:{color}" points="{path}">'
            f"<title>{escape(name)}</title></polyline>"
        )
    return _svg(parts, HEIGHT, title)


def _in_rows(
    marks: Sequence[tuple[float, str]], px: Callable[[float], float]
) -> Iterator[tuple[float, str, int]]:
    """Each mark with the row of its text, so that neighbours do not write over each other."""
    ends: list[float] = []
    for at, text in sorted(marks):
        begin = px(at)
        row = next((row for row, end in enumerate(ends) if end <= begin), len(ends))
        ends[row : row + 1] = [begin + 8 + 6.5 * len(text)]
        yield at, text, row


def scatter_chart(
    points: Mapping[str, Sequence[tuple[float, float, str]]], *, title: str, x_label: str, y_label: str
) -> str:
    """Points (x, y, what it is) of each series in equal units, and the diagonal on which x equals y."""
    highest = max((max(x, y) for series in points.values() for x, y, _ in series), default=1.0)
    frame = _Frame((0.0, highest), (0.0, highest), height=320)
    parts = frame.axes(x_label, y_label)
    parts.append(
        f'<line class="mark" x1="{frame.px(0):.1f}" y1="{frame.py(0):.1f}" '
        f'x2="{frame.px(highest):.1f}" y2="{frame.py(highest):.1f}"/>'
    )
    for index, series in enumerate(points.values()):
        for x, y, text in series:
            parts.append(
                f'<circle cx="{frame.px(x):.1f}" cy="{frame.py(y):.1f}" r="4" '
                f'style="fill:{COLORS[index % len(COLORS)]}"><title>{escape(text)}</title></circle>'
            )
    return _svg(parts, 320, title)


def interval_chart(points: Mapping[str, tuple[float, float, float]], *, title: str, x_label: str) -> str:
    """One row per name: a value between the ends of its interval, beside the line at 1."""
    row, left = 30, 300
    height = _TOP + _BOTTOM + len(points) * row
    ends = [end for _, low, high in points.values() for end in (low, high)]
    ticks = nice_ticks(min([0.9, *ends]), max([1.1, *ends]), 8)

    def px(value: float) -> float:
        return left + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (WIDTH - left - _RIGHT)

    bottom = height - _BOTTOM
    parts = []
    for tick in ticks:
        x = px(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<line class="mark" x1="{px(1.0):.1f}" x2="{px(1.0):.1f}" y1="{_TOP}" y2="{bottom}"/>')
    for index, (name, (value, low, high)) in enumerate(points.items()):
        y = _TOP + row * (index + 0.5)
        color = COLORS[index % len(COLORS)]
        parts.append(
            f'<text class="label" x="{left - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>'
            f'<line class="line" style="stroke:{color}" x1="{px(low):.1f}" x2="{px(high):.1f}" y1="{y:.1f}" '
            f'y2="{y:.1f}"/><circle cx="{px(value):.1f}" cy="{y:.1f}" r="5" style="fill:{color}">'
            f"<title>{escape(name)}: {value:.3f} ({low:.3f} to {high:.3f})</title></circle>"
        )
    parts.append(
        f'<text class="label" x="{(WIDTH + left) / 2:.0f}" y="{height - 6}" '
        f'text-anchor="middle">{escape(x_label)}</text>'
    )
    return _svg(parts, height, title)


def distribution_chart(samples: Mapping[str, Sequence[float]], *, title: str, x_label: str) -> str:
    """The cumulative distribution of each series of samples; p50 and p99 can be read off the grid."""
    series = {}
    for name, values in samples.items():
        ordered = sorted(values)
        series[name] = [(value, 100.0 * (rank + 1) / len(ordered)) for rank, value in enumerate(ordered)]
    return line_chart(series, title=title, x_label=x_label, y_label="tasks at or below, %")


def timeline_chart(
    rows: Sequence[tuple[str, bool, Sequence[tuple[float, float, int, str]]]], *, title: str
) -> str:
    """One row per stream and whether it is drawn pale; bars are (start ms, end ms, color, what ran)."""
    bar, gap = 22, 8
    height = _TOP + _BOTTOM + len(rows) * (bar + gap)
    ends = [end for _, _, bars in rows for _, end, _, _ in bars] or [1.0]
    left = 170
    scale = (WIDTH - left - _RIGHT) / max(ends)
    parts = []
    for tick in nice_ticks(0.0, max(ends), 8):
        if tick > max(ends):
            continue
        x = left + tick * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - _BOTTOM + 16}" text-anchor="middle">{tick:g}</text>'
        )
    for index, (name, pale, bars) in enumerate(rows):
        opacity = 0.45 if pale else 1.0
        y = _TOP + index * (bar + gap)
        parts.append(
            f'<text class="tick" x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>'
        )
        for start, end, color, text in bars:
            width = max((end - start) * scale, 0.6)
            parts.append(
                f'<rect x="{left + start * scale:.2f}" y="{y}" width="{width:.2f}" height="{bar}" rx="2" '
                f'style="fill:{COLORS[color % len(COLORS)]};opacity:{opacity:g}"><title>{escape(text)} '
                f"({end - start:.3f} ms)</title></rect>"
            )
    parts.append(
        f'<text class="label" x="{(WIDTH + left) / 2:.0f}" y="{height - 6}" text-anchor="middle">ms</text>'
    )
    return _svg(parts, height, title)
