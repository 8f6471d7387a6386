"""The fleet: how many devices there are, and those that fit a search, a page at a time."""

from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from stageloom.planner.api.handlers.devices import now
from stageloom.planner.api.page.visit import Rendered, Visit
from stageloom.planner.labels import parse_selection
from stageloom.planner.schema.device import DeviceInfo
from stageloom.planner.store.devices import device_infos
from stageloom.planner.store.fleet_view import FleetFilter, FleetState, fleet_devices, fleet_numbers
from stageloom.shared.ids import DeviceId

PAGE_SIZE: Final = 50
_SEARCH_MAX: Final = 128


class Badge(NamedTuple):
    """A word, and how it is coloured."""

    word: str
    tone: str


def presence(info: DeviceInfo) -> Badge:
    """Whether a device is there, or why it cannot be."""
    if info.revoked:
        return Badge("revoked", "off")
    if info.quarantine:
        return Badge("quarantined", "bad")
    return Badge("online", "good") if info.online else Badge("offline", "off")


_TONES: Final = {
    "committed": "good",
    "rejected": "bad",
    "rolled_back": "bad",
    "trial": "busy",
    "probation": "busy",
    "no_gain": "off",
}


def plan_state(state: str) -> Badge:
    """Where a plan stands on a device."""
    return Badge(state.replace("_", " "), _TONES.get(state, "plain"))


def fleet(visit: Visit) -> Rendered:
    """Devices by name."""
    wanted, after = _wanted(visit), visit.query.get("after", "")
    online = visit.api.live.fleet.online()
    names = visit.api.reader.read(fleet_devices, wanted, online, after=after, limit=PAGE_SIZE + 1)
    shown = names[:PAGE_SIZE]
    more = {"search": wanted.search, "state": wanted.state.value, "label": visit.query.get("label", "")}
    return Rendered(
        "fleet.html",
        {
            **_figures(visit, shown),
            "wanted": wanted,
            "label": visit.query.get("label", ""),
            "states": list(FleetState),
            "first": urlencode(more) if after else "",
            "next": urlencode({**more, "after": shown[-1]}) if len(names) > PAGE_SIZE else "",
        },
    )


def live(visit: Visit) -> Rendered:
    """The figures of the devices on a page; what may have the focus only where it changed."""
    names = [DeviceId(name) for name in visit.query.get("devices", "").split(",")[:PAGE_SIZE] if name]
    return Rendered("fleet_live.html", _figures(visit, names))


def _figures(visit: Visit, names: list[DeviceId]) -> dict[str, Any]:
    infos = now(visit.api, visit.api.reader.read(device_infos, devices=names, limit=len(names)))
    running = {info.device: (info.report.active or "")[:12] for info in infos}
    shown = dict(zip(names, visit.query.get("running", "").split(","), strict=False))
    return {
        "numbers": visit.api.reader.read(fleet_numbers),
        "online": len(visit.api.live.fleet.online()),
        "rows": [
            (
                info,
                presence(info),
                plan_state(info.report.state.value) if info.report.state else None,
                shown.get(info.device) != running[info.device],
            )
            for info in infos
        ],
        "names": ",".join(names),
        "running": ",".join(running.get(name, "") for name in names),
    }


def _wanted(visit: Visit) -> FleetFilter:
    state = visit.query.get("state", "")
    known = {one.value: one for one in FleetState}
    return FleetFilter(
        visit.query.get("search", "")[:_SEARCH_MAX].strip(),
        known.get(state, FleetState.ANY),
        parse_selection(visit.query.get("label", "").replace(",", " ").split()),
    )
