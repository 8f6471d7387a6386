"""What `stageloom watch` shows in a terminal."""

from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from stageloom.planner.cli.service import _live, _screen
from stageloom.planner.schema.device import DeviceInfo
from stageloom.planner.schema.service import TelemetryBooks, WatchReply
from stageloom.planner.store.rows import blank_of
from stageloom.shared.errors import UnavailableError
from stageloom.shared.messages.control import DeviceState, Report

BOOKS = TelemetryBooks(produced=1, stored=1, dropped=0, lost=0)
REPLY = WatchReply(at_us=0, devices=(), rates=(), telemetry=BOOKS)


def info(name: str, state: DeviceState = DeviceState.COMMITTED, **known: Any) -> DeviceInfo:
    return blank_of(DeviceInfo, device=name, report=Report(state=state), **{"online": True, **known})


def screen(devices: list[DeviceInfo], height: int) -> list[str]:
    reply = WatchReply(at_us=0, devices=tuple(devices), rates=(), telemetry=BOOKS)
    console = Console(file=StringIO(), width=160, height=height)
    console.print(_screen(reply, height))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().rstrip("\n").split("\n")


def test_a_planner_that_was_away_for_a_look_is_asked_again_and_one_that_never_answered_is_not() -> None:
    away = UnavailableError("no planner answers")
    looks: Iterator[WatchReply | UnavailableError] = iter([REPLY, away, REPLY, away])

    def look() -> WatchReply:
        answer = next(looks)
        if isinstance(answer, UnavailableError):
            raise answer
        return answer

    _live(look, 3, 0.0)
    with pytest.raises(UnavailableError):
        _live(look, 3, 0.0)
    assert next(looks, None) is None


def test_devices_that_somebody_should_look_at_come_first() -> None:
    shown = screen(
        [
            info("a"),
            info("b", revoked=True, online=False),
            info("c", DeviceState.ROLLED_BACK),
            info("d"),
            info("e", online=False),
            info("f", online=False, quarantine="it counts too far"),
        ],
        40,
    )
    assert [line.split()[0] for line in shown[-6:]] == ["c", "e", "f", "a", "b", "d"]


def test_a_fleet_takes_one_screen_and_says_how_much_of_it_is_missing() -> None:
    devices = [info(f"shop-{number:03}", online=number != 70) for number in range(100)]
    for height in (6, 10, 30):
        shown = screen(devices, height)
        assert len(shown) < height
        lines = [line for line in shown if line.lstrip().startswith("shop-")]
        assert lines[0].lstrip().startswith("shop-070")
        assert any(f"{100 - len(lines)} more lines do not fit" in line for line in shown)
    whole = screen(devices, 120)
    assert sum("shop-" in line for line in whole) == 100
    assert not any("do not fit" in line for line in whole)
