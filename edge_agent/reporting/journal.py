"""What a person may want to know of the last hours, and telemetry on its way to the link."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from stageloom.shared.messages.telemetry import Event, RowData

_log = logging.getLogger(__name__)

_PROBLEMS: Final = 16
_CODE_CHARS: Final = 128
_TEXT_CHARS: Final = 512


class Journal:
    """Every note goes to the log, to `status` while it is among the newest, and to the planner."""

    def __init__(self, keep: Callable[[Sequence[RowData]], None]) -> None:
        """`keep`: the link's part for telemetry."""
        self.problems: deque[str] = deque(maxlen=_PROBLEMS)
        self._keep = keep

    def found(self, problem: str) -> None:
        """Something was wrong with the state that the agent found at its start."""
        _log.warning("%s", problem)
        self.problems.append(problem)
        self.record([Event("state", problem[:_TEXT_CHARS])])

    def note(self, code: str, text: str) -> None:
        """Something happened just now."""
        _log.warning("%s: %s", code, text)
        self.problems.append(f"{time.strftime('%H:%M:%S')} {code}: {text}")
        self.record([Event(code[:_CODE_CHARS], text[:_TEXT_CHARS])])

    def record(self, rows: Sequence[RowData]) -> None:
        """Telemetry for the planner."""
        if rows:
            self._keep(rows)
