"""What a rollout does next. Pure: no store, no clock; `AbsenceClock` takes the time as an argument.

A device is asked when its wave has come and it is online. Its own trial decides: it keeps the version or it
does not. A wave ends once each of its devices is decided; only then the next begins.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final

from stageloom.planner.schema.rollout import AskState, RolloutState
from stageloom.shared.ids import DeviceId
from stageloom.shared.text import counted

LIVE: Final = (RolloutState.RUNNING, RolloutState.PAUSED)


UNDECIDED: Final = (AskState.WAITING, AskState.ASKED)


@dataclass(frozen=True, slots=True)
class RolloutDevice:
    """A device of a rollout, in its wave, counted from 0."""

    device: DeviceId
    wave: int
    state: AskState


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """All that decides what a rollout does next.

    `confirmed`: waves, from the first, that may be left although some of their devices were not reached.
    """

    state: RolloutState
    wave: int
    waves: int
    confirmed: int
    max_failed: int
    reach_s: float
    devices: tuple[RolloutDevice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStep:
    """What happens now: the state and wave that follow, devices to ask, to give up and to withdraw from.

    `reason` is for people, where the state changes.
    """

    state: RolloutState
    wave: int
    ask: tuple[DeviceId, ...] = ()
    unreached: tuple[DeviceId, ...] = ()
    withdrawn: tuple[DeviceId, ...] = ()
    reason: str = ""


def next_step(rollout: Rollout, away_s: Mapping[DeviceId, float]) -> RolloutStep:
    """What a rollout does next. `away_s`: seconds that devices have been offline; none for those online."""
    state, wave = rollout.state, rollout.wave
    if state not in LIVE:
        return RolloutStep(state=state, wave=wave)
    failed = [one.device for one in rollout.devices if one.state is AskState.FAILED]
    if len(failed) > rollout.max_failed:
        return RolloutStep(
            state=RolloutState.STOPPED,
            wave=wave,
            withdrawn=tuple(one.device for one in rollout.devices if one.state is AskState.ASKED),
            reason=f"{counted(len(failed), 'device')} failed, {rollout.max_failed} may: {_names(failed)}",
        )
    if state is RolloutState.PAUSED:
        return RolloutStep(state=state, wave=wave)
    undecided = [one for one in rollout.devices if one.wave == wave and one.state in UNDECIDED]
    if undecided:
        gone = {one.device for one in undecided if away_s.get(one.device, 0.0) > rollout.reach_s}
        return RolloutStep(
            state=state,
            wave=wave,
            ask=tuple(
                one.device for one in undecided if one.state is AskState.WAITING and one.device not in away_s
            ),
            unreached=tuple(one.device for one in undecided if one.device in gone),
        )
    return _wave_ended(rollout)


def _wave_ended(rollout: Rollout) -> RolloutStep:
    missing = [
        one.device for one in rollout.devices if one.wave == rollout.wave and one.state is AskState.UNREACHED
    ]
    if missing and rollout.confirmed <= rollout.wave:
        return RolloutStep(
            state=RolloutState.PAUSED,
            wave=rollout.wave,
            reason=f"wave {rollout.wave + 1} did not reach {counted(len(missing), 'device')}: "
            f"{_names(missing)}; resume goes on without",
        )
    if rollout.wave + 1 >= rollout.waves:
        return RolloutStep(state=RolloutState.COMPLETED, wave=rollout.wave, reason=_summary(rollout))
    return RolloutStep(state=rollout.state, wave=rollout.wave + 1)


def _summary(rollout: Rollout) -> str:
    numbers = {state: sum(one.state is state for one in rollout.devices) for state in AskState}
    return ", ".join(f"{number} {state.value}" for state, number in numbers.items() if number)


_NAMED: Final = 8


def _names(devices: list[DeviceId]) -> str:
    more = [f"{len(devices) - _NAMED} more"] if len(devices) > _NAMED else []
    return ", ".join([*devices[:_NAMED], *more])


class AbsenceClock:
    """How long devices have been away, by a monotonic clock: a leap of the wall clock changes nothing."""

    def __init__(self) -> None:
        self._since_s: dict[DeviceId, float] = {}

    def away_s(self, wanted: Set[DeviceId], online: Set[DeviceId], now_s: float) -> dict[DeviceId, float]:
        """Seconds that each of the `wanted` that is not `online` has been away, since it was first asked for.

        Devices that are not wanted any more are forgotten. `now_s` is monotonic, in seconds.
        """
        self._since_s = {
            device: self._since_s.get(device, now_s) for device in wanted if device not in online
        }
        return {device: now_s - since_s for device, since_s in self._since_s.items()}
