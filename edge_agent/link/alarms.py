"""The newest alarm on its way to the planner: sent, and sent again until it is acknowledged. Pure.

Only the newest one counts, since it says all that an older one did, but later. It is kept over reconnects and
forgotten with the boot: what a device saw before it stopped asks for nothing now.
"""

from stageloom.edge_agent.link.events import AlarmRaised
from stageloom.shared.messages.control import Alarm, AlarmAck


class AlarmBox:
    """At most one alarm that is not acknowledged."""

    def __init__(self, boot: int) -> None:
        self._boot = boot
        self._raised = 0  # of this boot
        self._open: Alarm | None = None
        self._sent_s = float("-inf")

    @property
    def open(self) -> Alarm | None:
        """The alarm that the planner is not known to have."""
        return self._open

    def take(self, raised: AlarmRaised, environment: str) -> None:
        """A trigger fired in this environment; an older alarm that was not acknowledged gives way."""
        self._raised += 1
        self._sent_s = float("-inf")
        self._open = Alarm(
            boot=self._boot,
            number=self._raised,
            at_us=raised.at_us,
            cause=raised.cause,
            value=raised.value,
            threshold=raised.threshold,
            plan=raised.plan,
            loads=raised.loads,
            samples=raised.samples,
            environment=environment,
        )

    def acknowledged(self, ack: AlarmAck) -> None:
        """The planner has it; an acknowledgement of another boot or of an older alarm changes nothing."""
        if self._open is not None and (ack.boot, ack.number) == (self._boot, self._open.number):
            self._open = None

    def connected(self) -> None:
        """A new session: what was sent on the one before may be lost."""
        self._sent_s = float("-inf")

    def due(self, now_s: float, again_s: float) -> Alarm | None:
        """What to send now, on a session that stands."""
        if self._open is None or now_s - self._sent_s < again_s:
            return None
        self._sent_s = now_s
        return self._open
