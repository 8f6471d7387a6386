"""What becomes of a pushed plan on its devices, told as it happens: `stageloom plan push --wait`."""

from collections.abc import Callable, Sequence
from typing import Final

from msgspec import structs

from stageloom.planner.schema.device import DeviceShowReply
from stageloom.planner.schema.plan import HistoryEntry, Pushed
from stageloom.shared.messages.control import DeviceState

OFFLINE_S: Final = 10.0
"""A device that is away for so long is no longer waited for: it gets the plan when it returns."""

_LOOK_S: Final = 0.5
_SUPERSEDED: Final = "superseded"
_ON_THEIR_WAY: Final = frozenset(
    {
        "",  # not told yet
        *(state.value for state in (DeviceState.RECEIVED, DeviceState.WAITING, DeviceState.VERIFIED)),
        *(state.value for state in (DeviceState.STAGED, DeviceState.TRIAL, DeviceState.PROBATION)),
    }
)


def ended(entry: HistoryEntry) -> bool:
    """Whether a device has decided, or something newer was pushed to it meanwhile."""
    return entry.state not in _ON_THEIR_WAY


def kept(entry: HistoryEntry) -> bool:
    """Whether the device runs the plan for good."""
    return entry.state == DeviceState.COMMITTED.value


def all_kept(pushed: Sequence[Pushed], found: Sequence[HistoryEntry]) -> bool:
    """Whether each device is known to run it for good; one without an outcome is not."""
    return {one.device for one in pushed} == {entry.device for entry in found if kept(entry)}


def outcomes(
    pushed: Sequence[Pushed],
    look: Callable[[str], DeviceShowReply],
    tell: Callable[[str], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> list[HistoryEntry]:
    """Wait until each device has decided on its generation, or is away; returns how far each one is.

    Every step is told once, with what the device says about it: of a trial how long that takes at the most.
    `clock` and `sleep` are in seconds.
    """
    found: dict[str, HistoryEntry] = {}
    open_ones = {one.device: one for one in pushed}
    online_s = dict.fromkeys(open_ones, clock())
    while open_ones:
        for device, one in list(open_ones.items()):
            reply = look(device)
            entry = _of(reply, one)
            if entry is None:
                tell(f"{device}: what became of it is no longer shown, since so much newer was pushed")
                found.pop(device, None)
                del open_ones[device]
                continue
            if _said(entry) != (_said(found[device]) if device in found else ""):
                tell(f"{device}: {_said(entry)}")
            found[device] = entry
            if reply.device.online:
                online_s[device] = clock()
            away = clock() - online_s[device] >= OFFLINE_S
            if away and not ended(entry):
                tell(f"{device}: it is offline, and goes on with the plan when it returns")
            if away or ended(entry):
                del open_ones[device]
        if open_ones:
            sleep(_LOOK_S)
    return list(found.values())


def _of(reply: DeviceShowReply, pushed: Pushed) -> HistoryEntry | None:
    """The entry of a generation; None where so many are newer that it is not shown.

    One that the device was never told of, since a newer one came first, is superseded: nothing will come of
    it.
    """
    wanted = (pushed.epoch, pushed.generation)
    found = next((one for one in reply.history if (one.epoch, one.generation) == wanted), None)
    if found is None or found.state:
        return found
    passed_by = any((one.epoch, one.generation) > wanted and one.state for one in reply.history)
    return structs.replace(found, state=_SUPERSEDED) if passed_by else found


def _said(entry: HistoryEntry) -> str:
    return entry.state + (f": {entry.reason}" if entry.reason else "")
