"""Alarms and local plans as dispatch sees them: have the store commit, then answer. Pure.

An alarm is acknowledged after its commit and repeated by the device until then, so it may come twice; the
store keeps each (device, boot, number) once. A local plan has no acknowledgement: the desired value that
adopts it is the answer, or a refusal.
"""

from collections import Counter
from typing import Final

from planner.dispatch import events as ev
from shared.ids import DeviceId
from shared.messages.base import RefusalCode, Refused
from shared.messages.control import Alarm, AlarmAck, LocalPlan

_LINE: Final = 512  # characters of a reason

Key = tuple[DeviceId, int, int]  # device, boot, number (of an alarm) or local counter (of a plan)


class AlarmDesk:
    """What was handed to the store and is not answered yet."""

    def __init__(self, counts: "Counter[str]") -> None:
        self._counts = counts
        self._alarms: dict[Key, bytes] = {}  # the route that waits for the acknowledgement
        self._plans: dict[Key, tuple[bytes, int]] = {}  # route and correlation, for a refusal

    def received(self, device: DeviceId, route: bytes, message: Alarm | LocalPlan) -> list[ev.Action]:
        """An authorised message of a device with a session."""
        if isinstance(message, Alarm):
            key = (device, message.boot, message.number)
            waiting = key in self._alarms
            self._alarms[key] = route
            return [] if waiting else [ev.StoreAlarm(device, message)]
        key = (device, message.boot, message.local_counter)
        if key in self._plans:
            return []
        self._plans[key] = (route, message.correlation)
        return [ev.AdoptLocal(device, message)]

    def stored(self, event: ev.AlarmStored) -> list[ev.Action]:
        """Acknowledge, and have it acted on where it began a re-plan; nothing where the store failed."""
        alarm = event.alarm
        route = self._alarms.pop((event.device, alarm.boot, alarm.number), None)
        if not event.ok:
            self._counts["alarm_not_stored"] += 1
            return []
        actions: list[ev.Action] = []
        if event.replan is not None:
            actions.append(ev.ReplanDue(event.device, event.replan))
        if route is not None:
            ack = AlarmAck(boot=alarm.boot, number=alarm.number)
            actions.append(ev.Send(ev.Lane.CONTROL, route, ack))
        return actions

    def settled(self, event: ev.LocalSettled) -> list[ev.Action]:
        """The store has adopted the plan, or has not: a repeat may ask again. A refusal is answered."""
        asked = self._plans.pop((event.device, event.plan.boot, event.plan.local_counter), None)
        if not event.refused or asked is None:
            return []
        self._counts["local_plan_refused"] += 1
        route, correlation = asked
        refusal = Refused(
            correlation=correlation, code=RefusalCode.NOT_PERMITTED, reason=event.refused[:_LINE]
        )
        return [ev.Send(ev.Lane.CONTROL, route, refusal)]
