"""Carries rollouts out: notes what devices decided, makes their plans, pushes them.

All that a rollout is lies in the store, so that a planner that was killed goes on where it was. One thread
turns to each rollout that has not ended, again and again; searches run elsewhere, and nothing waits for them.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from typing import Final, NamedTuple

from stageloom.planner.api.context import FleetLink, desiring
from stageloom.planner.cluster.interface import SearchPool, WorkersGone, search
from stageloom.planner.rollout.machine import AbsenceClock
from stageloom.planner.rollout.version import search_with_version, with_version
from stageloom.planner.store.desired import LOCAL
from stageloom.planner.store.plans import keep_plan, plan_info
from stageloom.planner.store.rollout_turns import (
    DECIDED_BY,
    DueDevice,
    RolloutTurn,
    advance_rollout,
    ask_devices,
    fail_devices,
    rollout_turn,
)
from stageloom.planner.store.rollouts import live_rollouts, rollout_info, undecided_devices
from stageloom.planner.store.store import Store
from stageloom.shared.clock import Clock
from stageloom.shared.errors import StageloomError, StorageError, UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Desired
from stageloom.shared.plan import Plan, decode_plan

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""Seconds between looks at rollouts that have not ended."""

IDLE_S: Final = 5.0
"""Seconds between looks where there is none; whoever makes one wakes the service."""

_MAKING_S: Final = 0.2
"""A turn of a rollout in which plans were made for so long makes no other: other rollouts wait."""

_CLOSE_S: Final = 5.0

_MOST_FAILURES: Final = 3
"""Of searches for one plan that end as no search should: for want of memory, or by a defect."""


class _Wanted(NamedTuple):
    """A plan that a rollout needs: that of this name, with the rollout's version."""

    rollout: str
    plan: str


class _SearchFailed(Exception):
    """No plan will be found: the search itself fails."""


class RolloutService:
    """Serves from `start` to `close`."""

    def __init__(
        self, store: Store, fleet: FleetLink, pool: SearchPool, clock: Clock, *, poll_s: float = POLL_S
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._pool = pool
        self._clock = clock
        self._poll_s = poll_s
        self._absence: dict[str, AbsenceClock] = {}
        self._made: dict[_Wanted, str] = {}  # names of plans
        self._searches: dict[_Wanted, Future[Plan]] = {}
        self._schedulers: dict[_Wanted, str] = {}  # of searches
        self._failures: dict[_Wanted, int] = {}  # of searches, in a row
        self._stopping = threading.Event()
        self._awake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def start(self) -> None:
        """Go on with the rollouts that have not ended."""
        self._thread.start()

    def wake(self) -> None:
        """Look now: a rollout was made or changed. From any thread."""
        self._awake.set()

    def close(self) -> None:
        """Stop. Searches under way are given up: the next planner begins them anew."""
        self._stopping.set()
        self._awake.set()
        for future in list(self._searches.values()):
            future.cancel()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            live = False
            try:
                live = self.turn()
            except Exception:
                log.exception("rollouts go on in %.0f s", IDLE_S)
            self._awake.wait(self._poll_s if live else IDLE_S)
            self._awake.clear()

    def turn(self) -> bool:
        """Turn once to each rollout that has not ended; False where there is none."""
        names = self._store.read(live_rollouts)
        self._forget(names)
        for name in names:
            if self._stopping.is_set():
                break
            try:
                self._turn(name)
            except StageloomError as error:
                log.warning("rollout %s goes on later: %s", name, error)
            except Exception:
                log.exception("rollout %s failed and goes on later", name)
        return bool(names)

    def _forget(self, live: Sequence[str]) -> None:
        """Drop what is known of rollouts that have ended, and end their searches."""
        for gone in self._absence.keys() - set(live):
            del self._absence[gone]
        for wanted in [one for one in self._made if one.rollout not in live]:
            del self._made[wanted]
        for wanted in [one for one in self._searches if one.rollout not in live]:
            self._searches.pop(wanted).cancel()
        for known in (self._schedulers, self._failures):
            for wanted in [one for one in known if one.rollout not in live]:
                del known[wanted]

    def _turn(self, name: str) -> None:
        wanted = self._store.read(undecided_devices, name)
        absence = self._absence.setdefault(name, AbsenceClock())
        away_s = absence.away_s(wanted, self._fleet.online(), self._clock.monotonic_s())
        found = self._store.read(rollout_turn, name, away_s)
        if found.due:
            with desiring(self._fleet):
                found = self._store.write(advance_rollout, name, away_s)
            self._tell(found.changed)
            self._log(name)
        if found.ask:
            self._ask(name, found)

    def _log(self, name: str) -> None:
        info = self._store.read(rollout_info, name)
        log.info(
            "rollout %s is %s in wave %d of %d: %d done, %d failed, %d asked; %s",
            *(name, info.state.value, info.wave, info.waves, info.done, info.failed, info.asked),
            info.reason,
        )

    def _ask(self, name: str, found: RolloutTurn) -> None:
        """Make plans that are missing, for `_MAKING_S` or so, and push to the devices whose plans are made.

        A device of a wave that has only begun may be offline: who is, the next turn knows.
        """
        until_s = self._clock.monotonic_s() + _MAKING_S
        by_plan: dict[str, list[DueDevice]] = {}
        online = self._fleet.online()
        for ask in found.ask:
            if ask.device in online:
                by_plan.setdefault(ask.plan, []).append(ask)
        for plan, asks in by_plan.items():
            wanted = _Wanted(name, plan)
            if wanted in self._made or not self._make(name, found, plan, asks):
                continue
            # One search a turn: re-plans search in the same pool.
            if wanted in self._searches or self._clock.monotonic_s() >= until_s or self._stopping.is_set():
                break
        ready = [
            (ask, made)
            for plan, asks in by_plan.items()
            if (made := self._made.get(_Wanted(name, plan))) is not None
            for ask in asks
        ]
        if ready:
            with desiring(self._fleet, *(ask.device for ask, _ in ready)):
                pushed = self._store.write(ask_devices, name, ready)
            self._tell(pushed)

    def _make(self, name: str, found: RolloutTurn, plan: str, asks: Sequence[DueDevice]) -> bool:
        """Make the plan that follows `plan`, or see how its search is; whether that took a while."""
        wanted = _Wanted(name, plan)
        assert found.artifact is not None
        try:
            future = self._searches.get(wanted)
            if future is not None:
                if not future.done():
                    return False
                del self._searches[wanted]
                self._keep(wanted, self._found(wanted, future), self._schedulers[wanted])
                return True
            info = self._store.read(plan_info, plan)
            made = with_version(decode_plan(info.wire), found.model, found.artifact, self._store.graph)
            if made is not None:
                self._keep(wanted, made, info.scheduler)
                return True
            version = self._store.read(rollout_info, name).version
            job = search_with_version(self._store, info, found.model, version, found.artifact)
            log.info("rollout %s: plan %s does not fit the version, so another is searched", name, plan)
            self._schedulers[wanted] = job.scheduler
            self._searches[wanted] = self._pool.submit(search, job)
        except CancelledError:
            return True  # the pool or the planner ends
        except (StorageError, UnavailableError):
            raise  # no fault of the version: the next turn tries again
        except (StageloomError, _SearchFailed) as error:
            reason = f"no plan with the version in place of {plan}: {error}"
            log.warning("rollout %s: %s", name, reason)
            self._store.write(fail_devices, name, [ask.device for ask in asks], reason)
        return True

    def _found(self, wanted: _Wanted, future: Future[Plan]) -> Plan:
        """What a search found.

        Raises:
            StageloomError: it found nothing. UnavailableError: it may be tried again. _SearchFailed: it ended
                otherwise than a search does, again and again.
        """
        try:
            return future.result()
        except (CancelledError, WorkersGone):
            raise
        except Exception as error:
            if isinstance(error, StageloomError) and not isinstance(error, UnavailableError):
                raise
            failures = self._failures[wanted] = self._failures.get(wanted, 0) + 1
            if failures >= _MOST_FAILURES:
                raise _SearchFailed(f"{failures} searches failed, the last: {error}") from error
            raise UnavailableError(f"the search for {wanted.plan} failed: {error}") from error

    def _keep(self, wanted: _Wanted, plan: Plan, scheduler: str) -> None:
        """Keep a plan, once whatever devices it is for."""
        kept = DECIDED_BY if scheduler == LOCAL else scheduler
        self._made[wanted] = self._store.write(keep_plan, plan, kept)

    def _tell(self, changed: Sequence[tuple[DeviceId, Desired]]) -> None:
        for device, desired in changed:
            self._fleet.desired_changed(device, desired)
