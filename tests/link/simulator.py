"""One planner and one device over a network that loses, delays, repeats, reorders and splits, with crashes of
either side between any two actions. Everything random comes from one seed; time is simulated."""

import heapq
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_agent.link import events as dev
from edge_agent.link import fetch as fetching
from edge_agent.link.core import LinkConfig, LinkCore
from edge_agent.link.spool import Spool
from edge_agent.link.statefile import decode_state, encode_state
from edge_agent.link.states import VERDICTS
from planner.dispatch import events as pev
from planner.dispatch.core import DispatchConfig, DispatchCore
from planner.dispatch.ports import FleetMember
from planner.dispatch.rows import telemetry_write
from shared.digest import digest_bytes
from shared.ids import DeviceId, Digest
from shared.messages import bulk, control, telemetry
from shared.messages.control import ArtifactNeed, Desired, DeviceState
from tests.link.memory_store import MemoryStore

DEVICE = DeviceId("sim")
KEY = "k" * 40
CHUNK_BYTES = 64
FAULTS_END_S = 30.0
END_S = 80.0
BEHAVIOURS = ("good", "good", "illegal", "unstageable", "bad")


class Crash(Exception):
    """The device stops here."""


@dataclass(frozen=True)
class Faults:
    """How bad the world is until `FAULTS_END_S`."""

    loss: float
    repeat: float
    delay_s: float
    partition: float  # chance per second that the network splits
    device_crash: float  # chance per action that the device stops before it
    planner_crash: float  # chance per second
    restore: float  # chance that a planner crash also restores a backup
    disk: float  # chance that a write fails

    @classmethod
    def draw(cls, rng: random.Random) -> "Faults":
        def some(most: float) -> float:
            return rng.choice((0.0, rng.random() * most))

        return cls(
            some(0.4),
            some(0.3),
            rng.choice((0.01, 0.2, 1.5)),
            some(0.1),
            some(0.05),
            some(0.1),
            some(0.5),
            some(0.3),
        )


class World:
    """Runs one scenario; `run` checks the invariants all along and convergence at the end."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.faults = Faults.draw(self.rng)
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.split_until_s = 0.0
        self.store = MemoryStore()
        self.backup = self.store
        self.store.members[DEVICE] = FleetMember(DEVICE, KEY)
        self.restored = False
        self.behaviour: dict[Digest, str] = {}
        self.planner = Planner(self)
        self.device = Device(self, folder)

    @property
    def calm(self) -> bool:
        return self.now_s >= FAULTS_END_S

    def chance(self, probability: float) -> bool:
        return not self.calm and self.rng.random() < probability

    def later(self, delay_s: float, do: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._order, do))

    def deliver(self, do: Callable[[], None]) -> None:
        """Carry one message, or fail to."""
        if self.now_s < self.split_until_s or self.chance(self.faults.loss):
            return
        delay_s = 0.001 + (self.rng.random() * self.faults.delay_s if not self.calm else 0.0)
        self.later(delay_s, do)
        if self.chance(self.faults.repeat):
            self.later(delay_s + self.rng.random(), do)

    def run(self) -> None:
        self.later(0.0, self._second)
        for _ in range(self.rng.randint(1, 5)):
            self.later(self.rng.random() * (FAULTS_END_S - 5), self._operator)
        self.device.start()
        while self._queue and self.now_s < END_S:
            self.now_s, _, do = heapq.heappop(self._queue)
            do()
        self.check_converged()

    def _second(self) -> None:
        self.later(1.0, self._second)
        if self.chance(self.faults.partition):
            self.split_until_s = min(self.now_s + self.rng.random() * 10, FAULTS_END_S)
        if self.chance(self.faults.planner_crash):
            if self.chance(self.faults.restore):
                self.store = self.backup.snapshot()
                self.restored = True
            self.planner = Planner(self)
        if self.chance(0.05):
            self.backup = self.store.snapshot()

    def _operator(self) -> None:
        """An operator pushes a new plan, or the one from before again."""
        if self.rng.random() < 0.2 and self.store.members[DEVICE].desired is not None:
            wanted = self.store.members[DEVICE].desired
            assert wanted is not None
        else:
            plan = self.rng.randbytes(8)
            digest = digest_bytes([plan])
            self.behaviour[digest] = self.rng.choice(BEHAVIOURS)
            needs = tuple(self._artifact(index) for index in range(self.rng.randint(0, 2)))
            wanted = Desired(epoch=0, generation=0, plan_digest=digest, plan=plan, artifacts=needs)
        self.planner.do(pev.DesiredChanged(DEVICE, self.store.push(DEVICE, wanted)))

    def _artifact(self, index: int) -> ArtifactNeed:
        blob = self.rng.randbytes(self.rng.randint(1, 6 * CHUNK_BYTES))
        digest = digest_bytes([blob])
        self.store.artifacts[digest] = blob
        self.backup.artifacts[digest] = blob
        return ArtifactNeed(f"m{index}", digest, len(blob))

    def check_converged(self) -> None:
        member = self.store.members[DEVICE]
        desired, state = member.desired, self.device.core.state
        assert self.device.up and self.device.core.welcomed
        assert member.report == self.device.core.report()
        if desired is not None:
            assert state.desired == desired, "the desired value did not arrive"
            # A database restored from before the first plan desires nothing, and says so.
            good = desired.plan_digest is None or self.behaviour[desired.plan_digest] == "good"
            if good and state.state is not DeviceState.COMMITTED:
                # Only a device that stopped twice under probation may refuse a good plan.
                assert state.state is DeviceState.ROLLED_BACK and "twice" in state.reason, state.state
            elif not good:
                assert state.state in VERDICTS
        assert self.device.spool.counts().spooled == 0, "telemetry did not drain"
        if not self.restored:
            self.check_books(at_end=True)

    def check_books(self, *, at_end: bool = False) -> None:
        """produced = stored + dropped + spooled, as sets and as the planner's own figures."""
        stored: dict[int, set[int]] = {}
        for _, boot, sequence in self.store.rows:
            stored.setdefault(boot, set()).add(sequence)
        for (_, boot), ledger in self.store.ledgers.items():
            below = {at for at in stored.get(boot, ()) if at < ledger.produced}
            assert ledger.produced == len(below) + ledger.dropped
        for boot, (produced, dropped, spooled) in self.device.books().items():
            kept = stored.get(boot, set())
            assert produced == kept | dropped | spooled
            assert not kept & dropped
        if at_end:
            for (_, boot), ledger in self.store.ledgers.items():
                assert ledger.produced == len(stored.get(boot, ())) + ledger.dropped


class Planner:
    """The core, its store worker and its sockets; a new one after each crash."""

    def __init__(self, world: World) -> None:
        self.world = world
        config = DispatchConfig(heartbeat_interval_s=1.0)
        self.core = DispatchCore(list(world.store.fleet()), epoch=world.store.epoch(), config=config)
        self._routes: set[bytes] = set()
        world.later(0.5, self._tick)

    @property
    def alive(self) -> bool:
        return self.world.planner is self

    def _tick(self) -> None:
        if self.alive:
            self.do(pev.Tick())
            self.world.later(0.5, self._tick)

    def connect(self, route: bytes) -> None:
        self._routes.add(route)

    def receive(self, lane: pev.Lane, route: bytes, message: Any) -> None:
        if not self.alive or route not in self._routes:
            return
        kinds = {
            pev.Lane.CONTROL: pev.ControlReceived,
            pev.Lane.TELEMETRY: pev.TelemetryReceived,
            pev.Lane.BULK: pev.BulkReceived,
        }
        self.do(kinds[lane](route, KEY, message))

    def do(self, event: pev.Event) -> None:
        for action in self.core.handle(event, self.world.now_s):
            self._act(action)

    def _act(self, action: pev.Action) -> None:
        world, store = self.world, self.world.store
        if isinstance(action, pev.Send):
            world.device.expect(action.lane, action.route, action.message)
        elif isinstance(action, pev.StoreReport):
            record = action.record
            self._store(
                lambda: store.record_reports([record]),
                lambda ok: pev.ReportStored(DEVICE, record.report.revision, ok),
            )
        elif isinstance(action, pev.AppendTelemetry):
            write, ticket = telemetry_write(action.device, action.batch), action.ticket

            def append() -> None:
                store.append_telemetry([write])
                if not world.restored:
                    world.check_books()

            self._store(append, lambda ok: pev.TelemetryCommitted(ticket, ok))
        elif isinstance(action, pev.ReadChunk):
            blob, at = store.artifacts[action.digest], action.offset_bytes
            chunk = pev.ChunkRead(action.ticket, len(blob), blob[at : at + action.length_bytes])
            world.later(world.rng.random() * 0.1, lambda: self.do(chunk) if self.alive else None)
        elif isinstance(action, pev.Reissue):
            above = (action.above_epoch, action.above_generation)
            made: list[Desired] = []

            def reissue() -> None:
                made.append(store.reissue(DEVICE, above_epoch=above[0], above_generation=above[1]))

            self._store(
                reissue, lambda ok: pev.DesiredChanged(DEVICE, made[0]) if ok else pev.ReissueFailed(DEVICE)
            )

    def _store(self, commit: Callable[[], None], answer: Callable[[bool], pev.Event]) -> None:
        """Commit a little later, answer later still; a crash may come before, between or after."""
        world = self.world

        def now() -> None:
            if not self.alive:
                return
            ok = not world.chance(world.faults.disk)
            if ok:
                commit()
            event = answer(ok)
            world.later(world.rng.random() * 0.2, lambda: self.do(event) if self.alive else None)

        world.later(world.rng.random() * 0.2, now)


@dataclass
class Disk:
    """What survives a crash of the device."""

    state: bytes | None = None
    partial: dict[Digest, bytes] = field(default_factory=dict)
    present: set[Digest] = field(default_factory=set)


class Device:
    """The agent: core, fetcher, spool, a plan manager that answers after a while, and the disk below."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.disk = Disk()
        self.folder = folder
        self.up = False
        self.life = 0
        self.route = b""
        self.best = (0, 0)
        self.verdicts: dict[tuple[int, int], DeviceState] = {}
        self.visited: set[DeviceState] = set()

    # -- life and death -------------------------------------------------------------------------------------

    def start(self) -> None:
        self.life += 1
        self.up = True
        rng = self.world.rng
        state = decode_state(self.disk.state) if self.disk.state else dev.LinkState()
        boot = rng.getrandbits(61) | 1
        self.core = LinkCore(state, config=LinkConfig(boot=boot))
        self.fetcher = fetching.FetchCore(chunk_bytes=CHUNK_BYTES, again_after_s=2.0)
        self.spool = Spool(self.folder, boot=boot, limit_bytes=20 << 10, write=self._write)
        self.batch_sent_s = -10.0
        self.answers: dict[tuple[dev.Attempt, str], dev.Event] = {}
        present = frozenset(self.disk.present)
        self._guard(lambda: self._carry(self.core.boot("env", present, self.world.now_s)))
        self._again(self.life, 0.25, self._tick)
        self._again(self.life, 0.7, self._measure)
        self.reconnect(0.1)

    def crash(self) -> None:
        self.up = False
        self.route = b""
        self.spool.close()
        self.world.later(self.world.rng.random() * 3, self.start)

    def _guard(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Crash:
            self.crash()

    def _again(self, life: int, every_s: float, do: Callable[[], None]) -> None:
        def go() -> None:
            if self.up and self.life == life:
                self._guard(do)
                self.world.later(every_s, go)

        self.world.later(every_s, go)

    def _write(self, file: int, data: bytes) -> int:
        if self.world.chance(self.world.faults.disk):
            os.write(file, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return os.write(file, data)

    # -- the core and its shell -----------------------------------------------------------------------------

    def do(self, event: dev.Event) -> None:
        if self.up:
            self._guard(lambda: self._carry(self.core.handle(event, self.world.now_s)))

    def _carry(self, actions: list[dev.Action]) -> None:
        for action in actions:
            if self.world.chance(self.world.faults.device_crash):
                raise Crash
            if isinstance(action, dev.Persist):
                if self.world.chance(self.world.faults.disk):
                    self._carry(self.core.handle(dev.PersistFailed("disk full"), self.world.now_s))
                    return
                self.disk.state = encode_state(action.state)
                self.core.persisted(action.state)
                self.check_state(action.state)
            else:
                self._act(action)

    def _act(self, action: dev.Action) -> None:
        world = self.world
        match action:
            case dev.Send(message):
                self.send(pev.Lane.CONTROL, message)
            case dev.FetchArtifact(need):
                self.fetcher.credits = self.core.bulk_credits
                have = len(self.disk.partial.get(need.digest, b""))
                self._fetch(self.fetcher.want(need, have, world.now_s))
            case dev.VerifyPlan(attempt, plan):
                bad = world.behaviour[plan.ref.digest] == "illegal"
                self._answer(
                    attempt,
                    "verify",
                    dev.PlanRefused(attempt, "illegal") if bad else dev.PlanVerified(attempt),
                )
            case dev.StagePlan(attempt, plan):
                bad = world.behaviour[plan.ref.digest] == "unstageable"
                self._answer(
                    attempt, "stage", dev.PlanRefused(attempt, "memory") if bad else dev.PlanStaged(attempt)
                )
            case dev.ActivatePlan(attempt, plan):
                written = decode_state(self.disk.state or b"")
                assert written.state is DeviceState.PROBATION, "it runs before the record is on disk"
                bad = world.behaviour[plan.ref.digest] == "bad"
                failed, passed = dev.ProbationFailed(attempt, "slower"), dev.ProbationPassed(attempt)
                self._answer(attempt, "probation", failed if bad else passed)
            case dev.RestorePlan(plan):
                assert world.behaviour[plan.ref.digest] == "good", "a plan that never passed is restored"
            case dev.Reconnect(_, delay_s):
                self.reconnect(delay_s or world.rng.random())

    def _answer(self, attempt: dev.Attempt, what: str, event: dev.Event) -> None:
        life = self.life
        again = self.world.chance(0.1)
        for _ in range(2 if again else 1):
            self.world.later(
                self.world.rng.random() * 3, lambda: self.do(event) if self.life == life else None
            )

    def _tick(self) -> None:
        world = self.world
        if world.chance(0.01):
            self.do(dev.ManagerRestarted())
        self._carry(self.core.handle(dev.Tick(), world.now_s))
        self._fetch(self.fetcher.tick(world.now_s))
        if self.core.welcomed and world.now_s - self.batch_sent_s > 2.0:
            batch = self.spool.next_batch(int(world.now_s * 1000))
            if batch is not None:
                self.batch_sent_s = world.now_s
                self.send(pev.Lane.TELEMETRY, batch)

    def _measure(self) -> None:
        if self.world.now_s < FAULTS_END_S + 5:
            body = telemetry.encode_row(
                telemetry.Row(
                    1,
                    telemetry.Event(
                        "x" * self.world.rng.randint(1, 128), "y" * self.world.rng.randint(0, 400)
                    ),
                )
            )
            self.spool.append([body] * self.world.rng.randint(1, 12))

    def _fetch(self, actions: list[fetching.FetchAction]) -> None:
        for action in actions:
            match action:
                case fetching.Ask(request):
                    self.send(pev.Lane.BULK, request)
                case fetching.Write(digest, offset, data):
                    have = self.disk.partial.get(digest, b"")
                    assert len(have) == offset, "the partial file has a hole"
                    self.disk.partial[digest] = have + data
                case fetching.Finish(digest):
                    assert digest_bytes([self.disk.partial.pop(digest)]) == digest
                    self.disk.present.add(digest)
                    self.do(dev.ArtifactPresent(digest))
                case fetching.GiveUp(digest, reason):
                    self.do(dev.FetchFailed(digest, reason))

    # -- the network ----------------------------------------------------------------------------------------

    def reconnect(self, delay_s: float) -> None:
        self.route, life = b"", self.life
        self.fetcher.lost()

        def connect() -> None:
            if not self.up or self.life != life:
                return
            if self.world.now_s < self.world.split_until_s:
                self.world.later(1.0, connect)
                return
            self.route = self.world.rng.randbytes(5)
            self.do(dev.Connected())

        self.world.later(delay_s, connect)

    def send(self, lane: pev.Lane, message: Any) -> None:
        route = self.route
        if route:
            world = self.world
            if world.now_s >= world.split_until_s:
                world.planner.connect(route)
            codec: Any = {
                pev.Lane.CONTROL: control.TO_PLANNER,
                pev.Lane.TELEMETRY: telemetry.TO_PLANNER,
                pev.Lane.BULK: bulk.TO_PLANNER,
            }[lane]
            frame = codec.encode(message)
            world.deliver(lambda: world.planner.receive(lane, route, codec.decode(frame)))

    def expect(self, lane: pev.Lane, route: bytes, message: Any) -> None:
        codec: Any = {
            pev.Lane.CONTROL: control.TO_DEVICE,
            pev.Lane.TELEMETRY: telemetry.TO_DEVICE,
            pev.Lane.BULK: bulk.TO_DEVICE,
        }[lane]
        frame = codec.encode(message)
        self.world.deliver(lambda: self._receive(lane, route, codec.decode(frame)))

    def _receive(self, lane: pev.Lane, route: bytes, message: Any) -> None:
        if not self.up or route != self.route:
            return
        if lane is pev.Lane.CONTROL:
            self.do(dev.Received(message))
        elif lane is pev.Lane.BULK:
            self._guard(lambda: self._fetch(self.fetcher.received(message, self.world.now_s)))
        elif isinstance(message, telemetry.TelemetryAck):
            self.spool.acknowledge(message)
            self.batch_sent_s = -10.0

    # -- invariants -----------------------------------------------------------------------------------------

    def check_state(self, state: dev.LinkState) -> None:
        """What must hold of every state that reaches the disk."""
        desired = state.desired
        if desired is None:
            return
        attempt = (desired.epoch, desired.generation)
        assert attempt >= self.best, "a generation fell"
        self.best = attempt
        assert state.state is not None
        self.visited.add(state.state)
        final = self.verdicts.get(attempt)
        if final is not None:
            assert state.state is final, "a verdict changed"
        if state.state in VERDICTS:
            self.verdicts[attempt] = state.state
        good, active = state.last_good, state.active
        if good is not None:
            assert self.world.behaviour[good.ref.digest] == "good", "a plan was committed that did not pass"
        if state.state is DeviceState.COMMITTED and desired.plan_digest is not None:
            assert active is not None and good is not None and active.digest == good.ref.digest
            assert active.digest == desired.plan_digest
        if state.state is DeviceState.ROLLED_BACK and active is not None:
            assert good is not None and active.digest == good.ref.digest, "it runs what was rolled back"

    def books(self) -> dict[int, tuple[set[int], set[int], set[int]]]:
        """Per boot that the spool still knows: sequences produced, dropped, spooled."""
        found: dict[int, tuple[set[int], set[int], set[int]]] = {}
        for boot, account in self.spool._accounts.items():
            dropped = {at for low, high in account.dropped_ranges for at in range(low, high)}
            spooled = {
                at
                for one in self.spool._segments
                if one.boot == boot
                for at in range(one.first + one.acked, one.end)
            }
            found[boot] = (set(range(account.produced)), dropped, spooled)
        return found


def scratch() -> "tempfile.TemporaryDirectory[str]":
    """A folder in memory where there is one: syncing to a disk says nothing here."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)


def run(seed: int) -> World:
    """One scenario."""
    with scratch() as folder:
        world = World(seed, Path(folder))
        try:
            world.run()
        finally:
            world.device.spool.close()
        return world
