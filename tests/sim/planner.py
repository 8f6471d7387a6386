"""A simulated planner: the real dispatch core over a store in memory whose commits take their time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stageloom.planner.dispatch import events as pev
from stageloom.planner.dispatch.core import DispatchConfig, DispatchCore
from stageloom.planner.dispatch.ports import telemetry_write
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Desired

if TYPE_CHECKING:
    from tests.sim.world import World

_RECEIVED: dict[pev.Lane, Callable[[bytes, str, Any], pev.Event]] = {
    pev.Lane.CONTROL: pev.ControlReceived,
    pev.Lane.TELEMETRY: pev.TelemetryReceived,
    pev.Lane.BULK: pev.BulkReceived,
}


class Stop(BaseException):
    """The planner's process stops here."""


class Planner:
    """One life of the planner's process; the store is the world's and outlives it."""

    def __init__(self, world: "World") -> None:
        self.world = world
        config = DispatchConfig(heartbeat_interval_s=world.pace.heartbeat_s, dead_after_s=world.pace.dead_s)
        self.core = DispatchCore(list(world.store.fleet()), epoch=world.store.epoch(), config=config)
        self.alive = True
        self._writes = world.pipe(0.0, world.faults.slow_store_s)
        self._answers = world.pipe(0.0, 0.1)
        world.later(world.pace.planner_tick_s, self._tick)

    def _tick(self) -> None:
        if self.alive:
            self.do(pev.Tick())
            self.world.later(self.world.pace.planner_tick_s, self._tick)

    def receive(self, lane: pev.Lane, route: bytes, key: str, message: Any) -> None:
        """A message that the network carried here."""
        self.do(_RECEIVED[lane](route, key, message))

    def do(self, event: pev.Event) -> None:
        """One event; the process may stop before any of the actions that follow."""
        if not self.alive:
            return
        world = self.world
        try:
            for action in self.core.handle(event, world.now_s):
                if world.chance(world.faults.planner_crash):
                    raise Stop
                self._act(action)
        except Stop:
            world.planner_stops()

    def _act(self, action: pev.Action) -> None:
        world, store = self.world, self.world.store
        match action:
            case pev.Send(lane, route, message):
                if not world.network.down(lane, route, message):
                    unreachable = pev.Unreachable(lane, route)
                    world.later(0.0, lambda: self.do(unreachable))
            case pev.StoreReport(record):
                self._store(
                    lambda: store.record_reports([record]),
                    lambda ok: pev.ReportStored(record.device, record.report.revision, ok),
                )
            case pev.AppendTelemetry(ticket, device, batch):
                write = telemetry_write(device, batch)
                self._store(
                    lambda: store.append_telemetry([write]), lambda ok: pev.TelemetryCommitted(ticket, ok)
                )
            case pev.ReadChunk(ticket, _, digest, offset, length):
                blob = store.artifacts[digest]
                chunk = pev.ChunkRead(ticket, len(blob), blob[offset : offset + length])
                world.later(world.rng.random() * 0.1, lambda: self.do(chunk))
            case pev.StoreAlarm(device, alarm):
                self._store(
                    lambda: store.record_alarm(device, alarm),
                    lambda ok: pev.AlarmStored(device, alarm, ok=ok),
                )
            case pev.AdoptLocal():
                self._adopt(action)
            case pev.Reissue():
                self._reissue(action)
            case pev.ReadDesired(device):
                self._read_desired(device)
            case pev.NoteExcess(device, text):
                store.note_excess(device, text)
            case pev.PresenceChanged(device, online):
                world.note("planner", "%s %s", device, "came" if online else "went")
            case _:
                raise AssertionError(f"the simulated planner does not know {action}")

    def _reissue(self, action: pev.Reissue) -> None:
        store, made = self.world.store, list[Desired]()

        def commit() -> None:
            made.append(
                store.reissue(
                    action.device,
                    above_epoch=action.above_epoch,
                    above_generation=action.above_generation,
                )
            )

        def answer(ok: bool) -> pev.Event:
            return pev.DesiredChanged(action.device, made[0]) if ok else pev.ReissueFailed(action.device)

        self._store(commit, answer)

    def _adopt(self, action: pev.AdoptLocal) -> None:
        store, made = self.world.store, list[Desired | None]()
        self._store(
            lambda: made.append(store.adopt_local(action.device, action.plan)),
            lambda ok: pev.LocalSettled(action.device, action.plan, made[0] if ok else None, failed=not ok),
        )

    def _read_desired(self, device: DeviceId) -> None:
        store, found = self.world.store, list[Desired | None]()
        self._store(
            lambda: found.append(store.desired(device)),
            lambda ok: pev.DesiredRead(device, found[0] if ok else None, ok),
        )

    def push(self, device: DeviceId, wanted: Desired) -> None:
        """An operator's order: committed, then told to the core; the process may stop between the two."""
        desired = self.world.store.push(device, wanted)
        self.world.note("planner", "desires %s.%s", desired.epoch, desired.generation)
        if self.world.chance(self.world.faults.planner_crash * 5):
            self.world.planner_stops()
        elif self.world.chance(self.world.faults.store):
            self.world.happened["push"] += 1  # it is in the store, and the operator is told that it failed
            self.do(pev.DesiredInDoubt((device,)))
        else:
            self.do(pev.DesiredChanged(device, desired))

    def _store(self, commit: Callable[[], object], answer: Callable[[bool], pev.Event]) -> None:
        """Commit in turn, then answer; the process may stop before, between or after."""
        world = self.world

        def now() -> None:
            if not self.alive:
                return
            fails = world.chance(world.faults.store)
            if not fails or world.rng.random() < 0.3:
                commit()  # where it fails all the same, the answer to it was lost
            world.happened["store"] += fails
            event = answer(not fails)
            self._answers.put(lambda: self.do(event))

        self._writes.put(now)
