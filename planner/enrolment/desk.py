"""Who is enrolled: one request's frame to one reply's frame."""

from collections.abc import Callable
from typing import Final

from stageloom.planner.dispatch.complaints import Complaints
from stageloom.planner.dispatch.ports import EnrolAttempt, EnrolRefused
from stageloom.planner.dispatch.rate import TokenBuckets
from stageloom.shared.clock import Clock
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import DecodeError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import enrol
from stageloom.shared.messages.base import RefusalCode, Refused

PER_PEER_S: Final = 5.0
BURST_PER_PEER: Final = 10
PER_S: Final = 50.0
"""Of all peers together: each attempt takes the database's writer for a moment."""


class EnrolmentDesk:
    """Answers strangers with a one-time secret, at a limited rate; used by one thread."""

    def __init__(
        self,
        enrol: Callable[[EnrolAttempt], DeviceId],
        admit: Callable[[DeviceId, str], None],
        clock: Clock,
    ) -> None:
        """`enrol` commits a key (`stageloom.planner.store.devices.enrol_device`).

        `admit(device, public_key)` returns when a connection with the key will be let in.
        """
        self._enrol = enrol
        self._admit = admit
        self._clock = clock
        self._complaints = Complaints(clock.monotonic_s)
        self._peers = TokenBuckets(per_s=PER_PEER_S, burst=BURST_PER_PEER)
        self._all = TokenBuckets(per_s=PER_S, burst=int(PER_S))

    def answer(self, peer: str, frame: bytes) -> bytes:
        """The reply to a request from the network address `peer`."""
        try:
            request = enrol.TO_PLANNER.decode(frame)
        except DecodeError as error:
            return _refusal(0, RefusalCode.MALFORMED, str(error))
        now_s = self._clock.monotonic_s()
        if not (self._peers.take(peer, now_s) and self._all.take("", now_s)):
            return _refusal(request.correlation, RefusalCode.RATE, "too many attempts; wait a minute")
        attempt = EnrolAttempt(
            digest_bytes([request.secret]),
            request.public_key,
            request.device,
            request.agent_version,
            request.device_class,
        )
        try:
            device = self._enrol(attempt)
            self._admit(device, request.public_key)
        except EnrolRefused as refused:
            return _refusal(request.correlation, refused.code, str(refused))
        except Exception as error:
            self._complaints.about("enrolment failed", error)
            reason = "the planner's store failed; try again"
            return _refusal(request.correlation, RefusalCode.INTERNAL, reason)
        return enrol.TO_DEVICE.encode(enrol.EnrolReply(correlation=request.correlation, device=device))


def _refusal(correlation: int, code: RefusalCode, reason: str) -> bytes:
    return enrol.TO_DEVICE.encode(Refused(correlation=correlation, code=code, reason=reason[:512]))
