"""What a rollout does next: every order of verdicts, absences, pauses and aborts of a small fleet."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageloom.planner.rollout.machine import (
    LIVE,
    UNDECIDED,
    AbsenceClock,
    Rollout,
    RolloutDevice,
    next_step,
)
from stageloom.planner.rollout.waves import wave_ends
from stageloom.planner.schema.rollout import AskState, RolloutState
from stageloom.shared.ids import DeviceId

REACH_S = 60.0


def rollout(devices: int, waves: list[str], max_failed: int) -> Rollout:
    """One that has just begun."""
    ends = wave_ends(waves, devices)
    return Rollout(
        state=RolloutState.RUNNING,
        wave=0,
        waves=len(ends),
        confirmed=0,
        max_failed=max_failed,
        reach_s=REACH_S,
        devices=tuple(
            RolloutDevice(DeviceId(f"d{at}"), sum(end <= at for end in ends), AskState.WAITING)
            for at in range(devices)
        ),
    )


class World:
    """Carries a rollout out as the store does, and keeps what may never be broken."""

    def __init__(self, start: Rollout) -> None:
        self.rollout, self.away_s = start, dict[DeviceId, float]()
        self.ends: list[tuple[DeviceId, AskState]] = []

    def become(self, device: DeviceId, state: AskState) -> None:
        """A device's state; its end is said once."""
        (before,) = (one for one in self.rollout.devices if one.device == device)
        assert before.state in UNDECIDED
        if state not in UNDECIDED:
            self.ends.append((device, state))
        self.rollout = replace(
            self.rollout,
            devices=tuple(
                replace(one, state=state) if one.device == device else one for one in self.rollout.devices
            ),
        )

    def named(self, *states: AskState) -> list[DeviceId]:
        """Devices in these states."""
        return [one.device for one in self.rollout.devices if one.state in states]

    def turn(self) -> None:
        """Take steps until nothing happens any more."""
        while True:
            before, step = self.rollout, next_step(self.rollout, self.away_s)
            assert step.wave in (before.wave, before.wave + 1)
            if step.wave > before.wave or step.state is RolloutState.COMPLETED:
                decided = [one.state not in UNDECIDED for one in before.devices if one.wave <= before.wave]
                assert all(decided)
            waves = {one.device: one.wave for one in before.devices}
            assert all(waves[device] == before.wave for device in (*step.ask, *step.unreached))
            if step.ask:
                assert before.state is RolloutState.RUNNING
                assert len(self.named(AskState.FAILED)) <= before.max_failed
            for device in step.ask:
                assert device not in self.away_s
                self.become(device, AskState.ASKED)
            for device in step.unreached:
                assert self.away_s[device] > REACH_S
                self.become(device, AskState.UNREACHED)
            for device in step.withdrawn:
                self.become(device, AskState.WITHDRAWN)
            self.rollout = replace(self.rollout, state=step.state, wave=step.wave)
            if self.rollout == before:
                return

    def resume(self) -> None:
        """As `stageloom.planner.store.rollouts.resume_rollout`."""
        if self.rollout.state is RolloutState.PAUSED:
            undecided = [
                one
                for one in self.rollout.devices
                if one.wave == self.rollout.wave and one.state in UNDECIDED
            ]
            confirmed = self.rollout.confirmed if undecided else self.rollout.wave + 1
            self.rollout = replace(self.rollout, state=RolloutState.RUNNING, confirmed=confirmed)

    def check(self) -> None:
        """What holds at any time."""
        devices = [device for device, _ in self.ends]
        assert len(devices) == len(set(devices))
        asked = {one.wave for one in self.rollout.devices if one.state is AskState.ASKED}
        assert len(asked) <= 1  # never more than a wave at once
        touched = {one.wave for one in self.rollout.devices if one.state is not AskState.WAITING}
        assert max(touched, default=0) <= self.rollout.wave
        if len(self.named(AskState.FAILED)) > self.rollout.max_failed and self.rollout.state is not (
            RolloutState.ABORTED
        ):
            assert self.rollout.state is RolloutState.STOPPED and not asked
        if self.rollout.state is RolloutState.COMPLETED:
            assert not self.named(*UNDECIDED)


EVENTS = ("good", "bad", "leave", "return", "pause", "resume", "restart")


def happen(world: World, event: str, which: int) -> None:
    """One event, of the device `which` of those that it may happen to."""
    asked = world.named(AskState.ASKED)
    everyone = [one.device for one in world.rollout.devices]
    if event in ("good", "bad") and asked and world.rollout.state in LIVE:
        world.become(asked[which % len(asked)], AskState.DONE if event == "good" else AskState.FAILED)
    elif event == "leave":
        device = everyone[which % len(everyone)]
        world.away_s[device] = world.away_s.get(device, 0.0) + REACH_S
    elif event == "return":
        world.away_s.pop(everyone[which % len(everyone)], None)
    elif event == "pause" and world.rollout.state is RolloutState.RUNNING:
        world.rollout = replace(world.rollout, state=RolloutState.PAUSED)
    elif event == "resume":
        world.resume()
    elif event == "restart":  # all is in the store but for how long devices have been away
        world.away_s = dict.fromkeys(world.away_s, 0.0)
    elif event == "abort" and world.rollout.state in LIVE:
        for device in asked:
            world.become(device, AskState.WITHDRAWN)
        world.rollout = replace(world.rollout, state=RolloutState.ABORTED)


@pytest.mark.promise("rollout-stops-by-itself")
@pytest.mark.parametrize("max_failed", [0, 1])
@pytest.mark.more
def test_every_order_of_five_events_on_three_devices_keeps_the_rules(max_failed: int) -> None:
    for events in product(EVENTS, repeat=5):
        world = World(rollout(3, ["1", "100%"], max_failed))
        world.turn()
        for at, event in enumerate(events):
            happen(world, event, at)
            world.turn()
            world.check()


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(st.sampled_from(["1", "2", "3", "10%", "50%"]), max_size=3),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from([*EVENTS, "abort"]), st.integers(0, 20)), max_size=60),
)
def test_any_fleet_keeps_the_rules_and_ends_once_devices_answer(
    devices: int, waves: list[str], max_failed: int, events: list[tuple[str, int]]
) -> None:
    world = World(rollout(devices, [*waves, "100%"], max_failed))
    world.turn()
    for event, which in events:
        happen(world, event, which)
        world.turn()
        world.check()
    world.away_s.clear()
    for _ in range(3 * devices + 3):
        world.resume()
        world.turn()
        happen(world, "good", 0)
        world.turn()
        world.check()
    assert world.rollout.state not in LIVE


def test_a_wave_that_missed_devices_pauses_until_somebody_confirms_it() -> None:
    world = World(rollout(3, ["2", "100%"], 0))
    world.away_s[DeviceId("d1")] = REACH_S + 1
    world.turn()
    happen(world, "good", 0)
    step = next_step(world.rollout, world.away_s)
    assert step.state is RolloutState.PAUSED
    assert step.reason == "wave 1 did not reach 1 device: d1; resume goes on without"
    world.turn()
    assert world.named(AskState.WAITING) == ["d2"]
    world.resume()
    world.turn()
    assert world.named(AskState.ASKED) == ["d2"]


def test_a_stopped_rollout_says_how_many_failed_and_withdraws_from_the_undecided() -> None:
    world = World(rollout(4, ["3", "100%"], 0))
    world.turn()
    happen(world, "bad", 1)
    step = next_step(world.rollout, world.away_s)
    assert (step.state, step.withdrawn) == (RolloutState.STOPPED, ("d0", "d2"))
    assert step.reason == "1 device failed, 0 may: d1"


def test_absence_is_counted_by_the_monotonic_clock_from_when_a_device_is_waited_for() -> None:
    absence = AbsenceClock()
    first, second = DeviceId("a"), DeviceId("b")
    assert absence.away_s({first, second}, {second}, 10.0) == {first: 0.0}
    assert absence.away_s({first, second}, set(), 15.0) == {first: 5.0, second: 0.0}
    assert absence.away_s({first, second}, {first}, 20.0) == {second: 5.0}
    assert absence.away_s({first}, set(), 30.0) == {first: 0.0}
