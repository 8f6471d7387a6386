"""What the log is told while a store fails: its cause and remedy in a line, and not with every batch."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from stageloom.shared.errors import StageloomError, StorageError, UnavailableError

log = logging.getLogger(__name__)

AGAIN_S: Final = 60.0
"""Devices send again within a second or two; that a database is still away need not be said as often."""


class Complaints:
    """What may last is told once per cause, and again after `AGAIN_S`. Any thread may complain."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._told_s: dict[str, float] = {}  # by cause, those of the last AGAIN_S
        self._lock = threading.Lock()

    def about(self, what: str, error: Exception) -> None:
        """Log that `what` failed. An error that nobody raised on purpose is a defect: with its traceback."""
        if not isinstance(error, StageloomError):
            log.error("%s", what, exc_info=error)
        elif not isinstance(error, StorageError | UnavailableError) or self._due(str(error)):
            log.warning("%s: %s", what, error)

    def _due(self, cause: str) -> bool:
        now_s = self._now_s()
        with self._lock:
            self._told_s = {one: at_s for one, at_s in self._told_s.items() if now_s - at_s < AGAIN_S}
            if cause in self._told_s:
                return False
            self._told_s[cause] = now_s
            return True
