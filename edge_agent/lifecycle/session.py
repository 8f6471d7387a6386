"""The connection to the planner: hello, heartbeats, reports, and when to drop it and come back. Pure.

Nothing of it survives a restart. Every method that sends takes the report of what is true now.
"""

from dataclasses import dataclass
from typing import Final

from msgspec import structs

from stageloom.edge_agent.lifecycle.events import Action, Reconnect, SendMessage
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.messages.control import Alarm, AlarmAck, Heartbeat, Hello, Report, Reported, Welcome
from stageloom.shared.policy.trigger import Cause

_UNWANTED: Final = (
    RefusalCode.REVOKED,
    RefusalCode.UNKNOWN_KEY,
    RefusalCode.QUARANTINED,
    RefusalCode.SUPERSEDED,
)


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """Who this agent is, and its pace until the planner says otherwise."""

    boot: int
    agent_version: str = ""
    hello_again_s: float = 2.0
    silent_after_s: float = 4.0
    fetch_again_s: float = 2.0
    storage_again_s: float = 5.0
    refused_again_s: float = 60.0
    alarm_again_s: float = 1.0
    local_wait_s: float = 5.0  # how long a connected planner has to answer an alarm before a local plan does
    local_again_s: float = 5.0


class PlannerSession:
    """What both sides know of each other on the connection that is."""

    def __init__(self, config: LinkConfig) -> None:
        self.device: str | None = None  # the name we are enrolled under, once welcomed
        self.denied: Refused | None = None  # why the planner will not have us
        self.bulk_credits = 1
        self.welcomed = False
        self.environment = ""  # what this device is now, power mode and all: its class
        self._config = config
        self._connected = False
        self._connection = 0
        self._superseded = 0
        self._hello_first_s = 0.0
        self._hello_sent_s = 0.0
        self._heard_s = 0.0
        self._heartbeat_sent_s = 0.0
        self._heartbeat_interval_s = 1.0
        self._reported_sent_s = float("-inf")
        self._sent_revision = -1
        self._stored_revision = 0

    # -- what happens to it ---------------------------------------------------------------------------------

    def connected(self, report: Report, now_s: float) -> list[Action]:
        """A connection stands: say who we are."""
        self._connected, self.welcomed = True, False
        self._connection += 1
        return self._hello(report, now_s)

    def is_now(self, environment: str, report: Report, now_s: float) -> list[Action]:
        """This device is another one now, or was told what it is: say so where a hello has said otherwise."""
        changed, self.environment = environment != self.environment, environment
        return self._hello(report, now_s, again=True) if changed and self.welcomed else []

    def lost(self) -> None:
        self._connected = self.welcomed = False

    def heard(self, now_s: float) -> None:
        """A message came, whatever it says."""
        self._heard_s = now_s

    def welcome(self, message: Welcome) -> None:
        """The planner accepted the hello."""
        self.welcomed, self.denied, self.device = True, None, message.device
        self._heartbeat_interval_s = message.heartbeat_interval_s
        self.bulk_credits = message.bulk_credits
        self._stored_revision = 0

    def stored(self, revision: int) -> None:
        """The planner has stored the report of this revision."""
        self._stored_revision = revision

    def refused(self, refused: Refused, report: Report, now_s: float) -> list[Action]:
        """The planner does not take what we sent, or does not want us."""
        config = self._config
        ours = refused.boot in (0, config.boot)
        if refused.code is RefusalCode.HELLO_FIRST or (refused.code is RefusalCode.SUPERSEDED and ours):
            if now_s - self._hello_sent_s < config.hello_again_s / 4:
                return []  # our hello and this refusal passed each other
            return self._hello(report, now_s)
        if refused.code in _UNWANTED:
            again_s = config.refused_again_s
            if refused.code is RefusalCode.SUPERSEDED:
                # A late hello of our life before, or a copy of this device: come back soon, then ever later.
                again_s = min(again_s, config.hello_again_s * 4**self._superseded)
                self._superseded = min(self._superseded + 1, 8)
            self.lost()
            self.denied = refused
            return [Reconnect(f"{refused.code.value}: {refused.reason}", again_s)]
        return []

    # -- what we send ---------------------------------------------------------------------------------------

    def tick(self, report: Report, now_s: float) -> list[Action]:
        """A heartbeat that is due, a hello that was not answered, or the end of a silent connection."""
        if not self._connected:
            return []
        silent_s = max(self._config.silent_after_s, 3 * self._heartbeat_interval_s)
        if now_s - max(self._heard_s, self._hello_first_s) > silent_s:
            self.lost()
            return [Reconnect(f"the planner has been silent for {silent_s:g} s")]
        if not self.welcomed:
            due = now_s - self._hello_sent_s >= self._config.hello_again_s
            return self._hello(report, now_s, again=True) if due else []
        if now_s - self._heartbeat_sent_s < self._heartbeat_interval_s:
            return []
        self._heartbeat_sent_s = now_s
        if now_s - self._hello_sent_s > self._config.refused_again_s:
            self._superseded = 0
        heartbeat = Heartbeat(
            boot=self._config.boot,
            epoch=report.epoch,
            generation=report.generation,
            state=report.state,
            revision=report.revision,
        )
        return [SendMessage(heartbeat)]

    def keep_told(self, report: Report, now_s: float) -> list[Action]:
        """Report what the planner has not stored: at once, then once per heartbeat interval."""
        if not self.welcomed or report.revision == self._stored_revision:
            return []
        overdue = now_s - self._reported_sent_s >= self._heartbeat_interval_s
        if report.revision == self._sent_revision and not overdue:
            return []
        self._sent_revision = report.revision
        return self.send_report(report, now_s)

    def send_report(self, report: Report, now_s: float) -> list[Action]:
        """Send it, unless the hello will carry it."""
        if not self.welcomed:
            return []
        self._reported_sent_s = now_s
        return [SendMessage(Reported(boot=self._config.boot, report=report))]

    def _hello(self, report: Report, now_s: float, *, again: bool = False) -> list[Action]:
        self._hello_sent_s = self._reported_sent_s = now_s
        self._sent_revision = report.revision
        if not again:
            self._hello_first_s = now_s
        hello = Hello(
            boot=self._config.boot,
            connection=self._connection,
            agent_version=self._config.agent_version,
            device_class=self.environment,
            report=report,
        )
        return [SendMessage(hello)]


_OF_QUEUES: Final = (Cause.VARIANCE.value, Cause.OLDEST_AGE.value)
_QUEUES_S: Final = 120.0
"""What queues were longer ago asks for nothing now; where they diverge yet, there is a newer alarm."""


def _rank(alarm: Alarm) -> int:
    """An alarm takes the place of those of its rank and above, as it says all that they did, but later.

    Only a drift has costs renewed, and what stands behind one of queues was told once.
    """
    if alarm.cause == Cause.DRIFT.value:
        return 0
    return 2 if alarm.cause in _OF_QUEUES else 1


class AlarmBox:
    """Sends the newest alarm until it is acknowledged, and before it a drift that is not.

    One of queues is dropped after two minutes: then what stands behind it is the newest. Alarms are kept over
    reconnects and forgotten with the boot: what a device saw before it stopped asks for nothing now, and the
    next start raises other arrivals and another power mode anew.
    """

    def __init__(self, boot: int) -> None:
        self.dropped = 0  # alarms of queues that the planner never heard of
        self._boot = boot
        self._raised = 0  # of this boot
        self._open: list[Alarm] = []  # that the planner is not known to have, one of a rank, in that order
        self._queues_until_s = 0.0
        self._once = 0  # the newest alarm that says what is told once, be it for one whose place it took
        self._sent_s: dict[int, float] = {}

    def take(self, raised: Alarm, environment: str, now_s: float) -> None:
        """A trigger fired in this environment, where costs are others than in the one before.

        `raised` has yet to get its boot and number.
        """
        self._raised += 1
        alarm = structs.replace(raised, boot=self._boot, number=self._raised, environment=environment)
        if _rank(alarm) == 1 or (_rank(alarm) == 0 and self._once):
            self._once = alarm.number
        behind = [one for one in self._open if _rank(one) < _rank(alarm)]
        self._open = [one for one in behind if _rank(one) or one.environment == environment] + [alarm]
        if alarm.cause in _OF_QUEUES:
            self._queues_until_s = now_s + _QUEUES_S

    def acknowledged(self, ack: AlarmAck) -> None:
        """The planner has it, and so what it says of older ones; one of another boot changes nothing."""
        if ack.boot == self._boot:
            if ack.number >= self._once:
                self._once = 0
            self._open = [
                one
                for one in self._open
                if one.number > ack.number or (_rank(one) == 0 and one.number != ack.number)
            ]

    @property
    def told_once(self) -> bool:
        """Whether the planner may not have heard yet of other arrivals, or of another power mode."""
        return self._once > 0

    def connected(self) -> None:
        """A new session: what was sent on the one before may be lost."""
        self._sent_s.clear()

    def due(self, now_s: float, again_s: float) -> Alarm | None:
        """What to send now, on a session that stands; called again, what is to follow it."""
        if now_s > self._queues_until_s:
            before = len(self._open)
            self._open = [one for one in self._open if one.cause not in _OF_QUEUES]
            self.dropped += before - len(self._open)
        self._sent_s = {one.number: self._sent_s.get(one.number, float("-inf")) for one in self._open}
        for alarm in self._open:
            if _rank(alarm) and alarm is not self._open[-1]:
                continue
            if now_s - self._sent_s[alarm.number] >= again_s:
                self._sent_s[alarm.number] = now_s
                return alarm
        return None
