"""The planner's side of the link as a pure core: (event, now) -> actions.

A device is the key of its connection (`User-Id`), never a routing id. Every message is authorised anew, so a
revocation holds from the next message on. Each lane has a core of its own; they share the fleet.
"""

from collections import Counter
from collections.abc import Sequence

from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.core.control import AlarmDesk, ControlCore
from stageloom.planner.dispatch.core.fleet import DispatchConfig, EnrolledFleet, Presence
from stageloom.planner.dispatch.core.transfers import BulkCore, TelemetryCore
from stageloom.planner.dispatch.ports import FleetMember
from stageloom.shared.messages.base import RefusalCode, Refused

__all__ = ["DispatchConfig", "DispatchCore", "Presence"]


class DispatchCore:
    """All decisions of dispatch. Not thread-safe: the thread that owns the sockets owns this."""

    def __init__(self, members: Sequence[FleetMember], *, epoch: int, config: DispatchConfig) -> None:
        self.fleet = EnrolledFleet(members, config)
        self._alarms = AlarmDesk(self.fleet)
        self._control = ControlCore(self.fleet, self._alarms, epoch=epoch, config=config)
        self._telemetry = TelemetryCore(self.fleet, config)
        self._bulk = BulkCore(self.fleet, config)

    @property
    def counts(self) -> Counter[str]:
        """What happened how often, refusals by their code; for metrics and tests."""
        return self.fleet.counts

    @property
    def epoch(self) -> int:
        """The epoch in force."""
        return self._control.epoch

    @property
    def backlog_rows(self) -> int:
        """Telemetry rows taken in and not yet committed."""
        return self._telemetry.backlog_rows

    @property
    def telemetry_failures(self) -> tuple[int, int]:
        """Batches that the store did not take: in all, and since the last that it took."""
        return self._telemetry.not_stored, self._telemetry.not_stored_in_a_row

    def may_connect(self, key: str) -> bool:
        """Whether a connection with this key gets into the devices' domain at all."""
        return self.fleet.may_connect(key)

    def may_connect_now(self, key: str, now_s: float) -> bool:
        """Whether a key that may connect has not done so too often of late."""
        return self.fleet.connects(key, now_s)

    def may_read(self, lane: ev.Lane, key: str, now_s: float) -> bool:
        """Whether a message that came on a connection of this key is worth decoding."""
        return self.fleet.may_read(lane, key, now_s)

    def presence(self) -> list[Presence]:
        """Every device, in order of enrolment."""
        return [
            Presence(one.member, one.session is not None, one.agent_version, one.device_class)
            for one in self.fleet
        ]

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Action]:
        """Decide. `now_s` is monotonic."""
        match event:
            case ev.ControlReceived():
                return self._control.received(event, now_s)
            case ev.TelemetryReceived():
                return self._telemetry.received(event, now_s)
            case ev.BulkReceived():
                return self._bulk.received(event)
            case ev.Malformed(lane, route, reason):
                self.counts["malformed"] += 1
                return [ev.Send(lane, route, Refused(code=RefusalCode.MALFORMED, reason=reason))]
            case ev.TelemetryCommitted():
                return self._telemetry.committed(event)
            case ev.ChunkRead():
                return self._bulk.read(event)
            case ev.Joined(device, public_key):
                self.fleet.join(device, public_key)
                return []
            case ev.ReportStored(device, revision, ok):
                return self._control.report_stored(device, revision, ok)
            case ev.DesiredChanged(device, desired):
                return self._control.desired_changed(device, desired, now_s)
            case ev.ReissueFailed(device):
                return self._control.reissue_failed(device)
            case ev.DesiredInDoubt(devices):
                return self._control.desired_in_doubt(devices)
            case ev.DesiredRead():
                return self._control.desired_read(event, now_s)
            case ev.AlarmStored():
                return self._alarms.stored(event)
            case ev.LocalSettled(device, _, adopted):
                actions = self._alarms.settled(event)
                if event.failed:
                    actions += self._control.desired_in_doubt([device])
                if adopted is not None:
                    actions += self._control.desired_changed(device, adopted, now_s)
                return actions
            case ev.Revoked(device):
                return self._control.revoked(device)
            case ev.QuarantineStored(device, ok):
                self.fleet.quarantine_stored(device, ok)
                return []
            case ev.Released(device):
                self.fleet.released(device)
                return []
            case ev.Unreachable(lane, route):
                self.counts["unreachable"] += 1
                return self._control.unreachable(route) if lane is ev.Lane.CONTROL else []
            case ev.Tick():
                return self._control.tick(now_s) + self.fleet.excess(now_s)
