"""What the agent tells systemd, and when it stops saying that it lives. The watchdog sees real progress.

A turn of the main loop brings each beat here, so a loop that hangs is silent. Beyond that the engine process
must have shown a sign of life: it speaks at least every statistics interval while it serves, and may be quiet
for the length of a load while it starts or loads a plan. The agent itself ends an engine that is silent or
loads for too long, and `_GRACE_S` gives it the time to. What is left for the watchdog is an agent whose own
remedy does not work.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stageloom.shared.systemd.notify import Notifier

_GRACE_S = 15.0
_BEATS = 4  # per watchdog interval; systemd asks for at least two


@dataclass(frozen=True, slots=True)
class EngineSigns:
    """The engine process as the main loop sees it."""

    sign_s: float  # when it last spoke, was started, or was seen to end
    serving: bool  # it is up and loads nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the engine process may show no sign, in seconds."""

    silent_s: float  # while it serves
    load_limit_s: float  # while it starts, loads a plan or is about to be started again

    def stalled(self, signs: EngineSigns, now_s: float) -> bool:
        """Whether it has been quiet for longer than anything legitimate takes."""
        limit_s = self.silent_s if signs.serving else max(self.silent_s, self.load_limit_s)
        return now_s - signs.sign_s > limit_s + _GRACE_S


class Heartbeat:
    """`up` once, `beat` on every tick of the main loop, `stopping` once."""

    def __init__(self, notifier: Notifier, patience: Patience) -> None:
        self._notifier = notifier
        self._patience = patience
        self._said = ""
        self._next_s = 0.0

    def up(self) -> None:
        """The local socket answers. An agent without a plan is up: it waits for one and must not time out."""
        self._notifier.send(READY="1")

    def beat(self, now_s: float, signs: EngineSigns, summary: Callable[[], str]) -> None:
        """Say the summary where it has changed, and that the agent lives where it does."""
        if not self._notifier.listens:
            return
        if (status := summary()) != self._said:
            self._said = status
            self._notifier.send(STATUS=status)
        interval_s = self._notifier.watchdog_s
        if interval_s is None or now_s < self._next_s or self._patience.stalled(signs, now_s):
            return
        self._next_s = now_s + interval_s / _BEATS
        self._notifier.send(WATCHDOG="1")

    def stopping(self) -> None:
        """Tasks are being finished."""
        self._notifier.send(STOPPING="1", STATUS="stopping")

    def close(self) -> None:
        """Tell nothing more."""
        self._notifier.close()
