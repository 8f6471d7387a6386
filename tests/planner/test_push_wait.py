"""`stageloom plan push --wait`: what is told of a push, and when it ends."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from stageloom.planner.cli.push_wait import OFFLINE_S, all_kept, kept, outcomes
from stageloom.planner.schema.device import DeviceInfo, DeviceShowReply
from stageloom.planner.schema.plan import HistoryEntry, Pushed
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import DeviceState, Report

ANNOUNCED = "the trial takes up to 40 s"


def entry(device: str, state: str, reason: str = "", generation: int = 3) -> HistoryEntry:
    return HistoryEntry(
        device=DeviceId(device),
        epoch=1,
        generation=generation,
        plan="fast",
        digest=None,
        decided_by="operator",
        state=state,
        reason=reason,
        at_us=1,
    )


def reply(*history: HistoryEntry, online: bool = True) -> DeviceShowReply:
    info = DeviceInfo(
        device=history[0].device,
        online=online,
        revoked=False,
        device_class="cpu",
        agent_version="1",
        enrolled_at_us=1,
        last_seen_us=1,
        desired_epoch=1,
        desired_generation=3,
        desired_plan=None,
        report=Report(state=DeviceState.RECEIVED),
    )
    return DeviceShowReply(device=info, history=history)


@dataclass
class Played:
    """Devices whose answers are played back, the last one again and again; a clock that sleeping moves."""

    answers: dict[str, list[DeviceShowReply]]
    told: list[str] = field(default_factory=list)
    now_s: float = 0.0

    def look(self, device: str) -> DeviceShowReply:
        answers = self.answers[device]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def wait(self) -> list[HistoryEntry]:
        pushed = [Pushed(device=DeviceId(name), epoch=1, generation=3) for name in self.answers]
        return outcomes(pushed, self.look, self.told.append, lambda: self.now_s, self.sleep)


def steps(device: str, states: Iterable[tuple[str, str]]) -> list[DeviceShowReply]:
    return [reply(entry(device, state, reason)) for state, reason in states]


def test_each_step_is_told_once_with_the_time_that_the_trial_announced() -> None:
    states = [("", ""), ("received", ""), ("staged", ""), *[("trial", ANNOUNCED)] * 5]
    played = Played({"shop-7": steps("shop-7", [*states, ("committed", "1.3 times as fast")])})
    (found,) = played.wait()
    assert kept(found)
    assert played.told == [
        "shop-7: received",
        "shop-7: staged",
        f"shop-7: trial: {ANNOUNCED}",
        "shop-7: committed: 1.3 times as fast",
    ]


@pytest.mark.parametrize("state", ["rejected", "no_gain", "rolled_back", "superseded"])
def test_any_other_end_is_an_end_and_no_plan_that_is_kept(state: str) -> None:
    (found,) = Played({"a": steps("a", [("trial", ANNOUNCED), (state, "why")])}).wait()
    assert (found.state, found.reason) == (state, "why") and not kept(found)


def test_each_of_several_devices_is_waited_for_until_it_has_decided() -> None:
    slow = steps("a", [*[("trial", ANNOUNCED)] * 20, ("no_gain", "")])
    played = Played({"a": slow, "b": steps("b", [("committed", "")])})
    assert {one.device: one.state for one in played.wait()} == {"a": "no_gain", "b": "committed"}


def test_a_device_that_stays_away_is_not_waited_for_and_one_that_returns_is() -> None:
    away = [reply(entry("a", ""), online=False)]
    played = Played({"a": away})
    (found,) = played.wait()
    assert found.state == "" and not kept(found)
    assert OFFLINE_S <= played.now_s < OFFLINE_S + 1.0
    assert "it is offline" in played.told[-1]
    back = Played({"a": [*away * 15, *steps("a", [("trial", ""), ("committed", "")])]})
    assert kept(back.wait()[0])


def test_a_generation_that_is_too_old_to_be_shown_is_not_waited_for() -> None:
    played = Played({"a": [reply(replace(entry("a", "trial"), generation=4))]})
    assert played.wait() == []
    assert "no longer shown" in played.told[-1]
    asked = [Pushed(device=DeviceId("a"), epoch=1, generation=3)]
    assert not all_kept(asked, []), "nothing is known of it"
    assert all_kept(asked, [entry("a", "committed")])


def test_a_generation_that_the_device_was_never_told_of_is_superseded_once_it_speaks_of_a_newer_one() -> None:
    newer = [entry("shop-7", state, generation=4) for state in ("", "received")]
    played = Played({"shop-7": [reply(one, entry("shop-7", "")) for one in newer]})
    (found,) = played.wait()
    assert found.state == "superseded" and not kept(found)
    assert played.told == ["shop-7: superseded"]
