"""The curves of a training of gpg, as flat rows, as JSON and as a picture; without torch."""

import json
from collections.abc import Sequence
from typing import Any, Final

from stageloom.planner.schema.training import GpgValidation

_WIDTH: Final = 640
_HEIGHT: Final = 300
_MARGIN: Final = 48


def rows(history: Sequence[GpgValidation]) -> list[dict[str, Any]]:
    """A flat object per validation."""
    return [
        {
            "step": validation.step,
            "phase": validation.phase,
            "ratio": validation.ratio,
            **{f"loss_{k}": v for k, v in validation.losses.items()},
        }
        for validation in history
    ]


def to_json(history: Sequence[GpgValidation]) -> str:
    """All validations as a JSON list."""
    return json.dumps(rows(history), indent=1)


def to_svg(history: Sequence[GpgValidation]) -> str:
    """The validation's ratio to sequential over the steps; a dashed line where reinforcement begins."""
    steps = [validation.step for validation in history]
    ratios = [validation.ratio for validation in history]
    low, high = min(ratios), max(ratios)
    last, room = max(*steps, 1), max(high - low, 1e-9)

    def at(step: float, ratio: float) -> str:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * step / last
        y = _MARGIN + (_HEIGHT - 2 * _MARGIN) * (high - ratio) / room
        return f"{x:.1f},{y:.1f}"

    line = " ".join(at(step, ratio) for step, ratio in zip(steps, ratios, strict=True))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_MARGIN}" y="24">cost over sequential, validation blocks (best {low:.4f})</text>',
        f'<polyline points="{line}" fill="none" stroke="#1f6feb" stroke-width="2"/>',
        f'<text x="6" y="{_MARGIN + 4}">{high:.3f}</text>',
        f'<text x="6" y="{_HEIGHT - _MARGIN + 4}">{low:.3f}</text>',
        f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 16}" text-anchor="end">{last} steps</text>',
    ]
    turn = next((validation.step for validation in history if validation.phase == "reinforcement"), 0)
    if turn and history[0].phase == "imitation":
        before = max(validation.step for validation in history if validation.phase == "imitation")
        top, bottom = at(before, high), at(before, low)
        x = top.split(",")[0]
        parts.append(
            f'<line x1="{x}" x2="{x}" y1="{top.split(",")[1]}" y2="{bottom.split(",")[1]}" stroke="#888" '
            'stroke-dasharray="4"/>'
        )
    return "\n".join([*parts, "</svg>", ""])
