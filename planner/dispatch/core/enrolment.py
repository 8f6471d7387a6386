"""The enrolment lane: strangers with a one-time secret, at a limited rate per address."""

from dataclasses import dataclass

from planner.dispatch import events as ev
from planner.dispatch.core.fleet import DispatchConfig, Fleet
from planner.dispatch.ports import EnrolAttempt, FleetMember
from planner.dispatch.rate import TokenBuckets
from shared.digest import digest_bytes
from shared.messages import enrol
from shared.messages.base import RefusalCode


@dataclass(frozen=True)
class _Open:
    route: bytes
    correlation: int
    attempt: EnrolAttempt


class EnrolmentCore:
    """Decisions of the enrolment lane."""

    def __init__(self, fleet: Fleet, config: DispatchConfig) -> None:
        self._fleet = fleet
        self._open: dict[int, _Open] = {}  # by ticket
        self._rate = TokenBuckets(per_s=config.enrol_per_s, burst=config.enrol_burst)

    def received(self, event: ev.EnrolReceived, now_s: float) -> list[ev.Action]:
        """A stranger wants in."""
        request = event.message
        if not self._rate.take(event.address, now_s):
            self._fleet.counts["enrol_rate"] += 1
            return [self._refuse(event, RefusalCode.RATE, "too many attempts; wait a minute")]
        if request.public_key != event.key:
            reason = "the key in the message is not the connection's"
            return [self._refuse(event, RefusalCode.MALFORMED, reason)]
        attempt = EnrolAttempt(
            digest_bytes([request.secret]),
            event.key,
            request.device,
            request.agent_version,
            request.device_class,
        )
        ticket = self._fleet.ticket()
        self._open[ticket] = _Open(event.route, request.correlation, attempt)
        return [ev.Enrol(ticket, attempt)]

    def done(self, event: ev.Enrolled | ev.EnrolDenied) -> list[ev.Action]:
        """The store answered."""
        done = self._open.pop(event.ticket, None)
        if done is None:
            return []
        lane = ev.Lane.ENROL
        if isinstance(event, ev.EnrolDenied):
            self._fleet.counts["enrol_refused"] += 1
            return [self._fleet.refuse(lane, done.route, done.correlation, event.code, event.reason)]
        known = self._fleet.get(event.device)
        if known is None or known.member.public_key != done.attempt.public_key:
            # A revoked device joined again with a new key. The name keeps what it was to run: the store does.
            desired = known.member.desired if known is not None else None
            self._fleet.add(FleetMember(event.device, done.attempt.public_key, desired=desired))
        reply = enrol.EnrolReply(correlation=done.correlation, device=event.device)
        return [ev.Send(lane, done.route, reply)]

    def _refuse(self, event: ev.EnrolReceived, code: RefusalCode, reason: str) -> ev.Action:
        return self._fleet.refuse(ev.Lane.ENROL, event.route, event.message.correlation, code, reason)
