"""Alarms and local plans as dispatch sees them: have the store commit, then answer. Pure.

An alarm is acknowledged after its commit and repeated by the device until then, so it may come twice; the
store keeps each (device, boot, number) once. A local plan has no acknowledgement: the desired value that
adopts it is the answer, or a refusal.
"""

from dataclasses import dataclass
from typing import Final

from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.core.fleet import Device, Fleet
from stageloom.planner.dispatch.quotas import Quota
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.messages.control import Alarm, AlarmAck, LocalPlan

_LINE: Final = 512  # characters of a reason

Key = tuple[DeviceId, int, int]  # device, boot, number (of an alarm) or local counter (of a plan)

# What a decoded message takes here, about.
_MESSAGE_BYTES: Final = 1024
_LOAD_BYTES: Final = 256
_NUMBER_BYTES: Final = 40


@dataclass(slots=True)
class _Open:
    """Handed to the store and not answered; `route` waits for the acknowledgement or the refusal."""

    who: Device
    size_bytes: int
    route: bytes
    correlation: int


class AlarmDesk:
    """What was handed to the store and is not answered yet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._alarms: dict[Key, _Open] = {}
        self._plans: dict[Key, _Open] = {}

    def received(
        self, who: Device, route: bytes, message: Alarm | LocalPlan, now_s: float
    ) -> list[ev.Action]:
        """An authorised message of a device with a session."""
        if isinstance(message, Alarm):
            return self._alarm(who, route, message, now_s)
        return self._local_plan(who, route, message, now_s)

    def _alarm(self, who: Device, route: bytes, alarm: Alarm, now_s: float) -> list[ev.Action]:
        device = who.member.device
        key = (device, alarm.boot, alarm.number)
        if (waiting := self._alarms.get(key)) is not None:
            waiting.route = route
            return []
        numbers = sum(len(one.progress) + len(one.deviations) for one in alarm.samples)
        size_bytes = _MESSAGE_BYTES + _LOAD_BYTES * len(alarm.loads) + _NUMBER_BYTES * numbers
        if not self._fleet.within(who, Quota.ALARMS, now_s) or not self._fleet.may_wait(who, size_bytes):
            return []
        self._alarms[key] = _opened(who, size_bytes, route, alarm.correlation)
        return [ev.StoreAlarm(device, alarm)]

    def _local_plan(self, who: Device, route: bytes, local: LocalPlan, now_s: float) -> list[ev.Action]:
        device = who.member.device
        key = (device, local.boot, local.local_counter)
        size_bytes = _MESSAGE_BYTES + len(local.plan) + _LOAD_BYTES * len(local.artifacts)
        if (
            key in self._plans
            or not self._fleet.within(who, Quota.LOCAL_PLANS, now_s)
            or not self._fleet.within(who, Quota.GENERATIONS, now_s)
            or not self._fleet.may_wait(who, size_bytes)
        ):
            return []
        self._plans[key] = _opened(who, size_bytes, route, local.correlation)
        return [ev.AdoptLocal(device, local)]

    def stored(self, event: ev.AlarmStored) -> list[ev.Action]:
        """Acknowledge, and have it acted on where it began a re-plan; nothing where the store failed."""
        alarm = event.alarm
        done = self._alarms.pop((event.device, alarm.boot, alarm.number), None)
        if done is not None:
            done.who.waiting_bytes -= done.size_bytes
        if not event.ok:
            self._fleet.counts["alarm_not_stored"] += 1
            return []
        actions: list[ev.Action] = []
        if event.replan is not None:
            actions.append(ev.ReplanDue(event.device, event.replan))
        if done is not None:
            ack = AlarmAck(boot=alarm.boot, number=alarm.number)
            actions.append(ev.Send(ev.Lane.CONTROL, done.route, ack))
        return actions

    def settled(self, event: ev.LocalSettled) -> list[ev.Action]:
        """The store has adopted the plan, or has not: a repeat may ask again. A refusal is answered."""
        done = self._plans.pop((event.device, event.plan.boot, event.plan.local_counter), None)
        if done is None:
            return []
        done.who.waiting_bytes -= done.size_bytes
        if not event.refused:
            return []
        self._fleet.counts["local_plan_refused"] += 1
        refusal = Refused(
            correlation=done.correlation, code=RefusalCode.NOT_PERMITTED, reason=event.refused[:_LINE]
        )
        return [ev.Send(ev.Lane.CONTROL, done.route, refusal)]


def _opened(who: Device, size_bytes: int, route: bytes, correlation: int) -> _Open:
    who.waiting_bytes += size_bytes
    return _Open(who, size_bytes, route, correlation)
