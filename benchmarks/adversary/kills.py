"""Processes are killed under load: nothing acknowledged is lost, no answer is wrong, and nothing hangs.

    python -m benchmarks.adversary.kills --json

On SQLite and on Postgres a planner, an agent with applications in a closed loop, and a second device that
remembers what was acknowledged to it run as real processes. Planner, agent, engine process, a backend of
Postgres and its postmaster get SIGKILL at seeded moments: while they serve, in the middle of a push, a
trial, an artifact's transfer and an enrolment, and at failpoints around commits, files and
acknowledgements. After each kill all must agree again, and the database is compared with what was
acknowledged.

`wrong`: answers that are not the whole model's, records that differ from what was sent, plans that are not
what is desired once all is quiet. `hung`: a task, request or process without an end or answer for ANSWER_S,
or a process that ended unasked. `acknowledged_lost`: rows, reports, generations and enrolments that were
acknowledged and are not there. `not_committed` counts deployments that a kill ended (a device may reject a
plan that was starting when it died), `at_failpoints` the kills that a failpoint did.
"""

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from benchmarks import zoo
from benchmarks.adversary.acknowledged import Acknowledged
from benchmarks.adversary.known_answers import Applications, Known, known_answers
from benchmarks.adversary.postgres import PostgresServer, binaries, postgres_server
from benchmarks.adversary.witness import Witness, witness
from benchmarks.adversary.world import ANSWER_S, DEVICE, Hung, World, until
from benchmarks.control_plane.planner import free_ports
from benchmarks.processes import Processes
from benchmarks.runner import Report, arguments, emit, progress
from stageloom.edge_agent.link.factory import KEY_NAME
from stageloom.planner.api import routes
from stageloom.planner.schema.device import DeviceInfo
from stageloom.planner.schema.plan import ModelOptions, PlanCreateRequest
from stageloom.planner.schema.service import WatchRequest
from stageloom.planner.store.database import Database, sqlite_url
from stageloom.planner.store.used_database import DATABASE_FILE
from stageloom.shared.errors import StageloomError
from stageloom.shared.ids import DeviceId
from stageloom.shared.keyfile import read_keys
from stageloom.shared.messages.control import DeviceState

_WITNESS: Final = "witness"
_SERVED: Final = ("alpha", "beta")
_CARRIED: Final = ("carry0", "carry1", "carry2")
"""Models with large weights and hardly any work: their artifacts take a while to travel."""

_FINAL: Final = (
    DeviceState.COMMITTED,
    DeviceState.REJECTED,
    DeviceState.NO_GAIN,
    DeviceState.ROLLED_BACK,
)
_REACHED_S: Final = 10.0
"""A failpoint that is not reached after so long is not waited for; the process is killed all the same."""

_PLANNER_POINTS: Final = (
    ("planner.commit.before", 40),
    ("planner.commit.after", 40),
    ("planner.desired.before", 1),
    ("planner.desired.after", 1),
    ("planner.report.ack", 2),
    ("planner.telemetry.ack", 40),
)
_AGENT_POINTS: Final = (
    ("agent.state.before", 3),
    ("agent.state.after", 3),
    ("agent.file.written", 4),
    ("agent.file.previous", 4),
    ("agent.commit.before", 1),
    ("agent.commit.after", 1),
    ("agent.staged", 1),
    ("agent.swap.before", 1),
    ("agent.swap.after", 1),
    ("agent.artifact.append", 30),
    ("agent.artifact.rename", 1),
    ("agent.artifact.renamed", 1),
    ("agent.spool.append", 20),
    ("agent.spool.marked", 5),
    ("agent.spool.ack", 5),
    ("agent.spool.ledger", 4),
    ("agent.spool.remove", 4),
    ("agent.trial.begin", 1),
)
"""Failpoints, and up to which time of reaching each the process dies."""


@dataclass(frozen=True)
class Kill:
    """One kill. `failpoint` empty: by a signal, `after_s` into `scene`."""

    victim: str  # planner, agent, engine, backend, postmaster
    scene: str  # serve, push, trial, transfer, enrol
    after_s: float
    away_s: float
    failpoint: str = ""


def drawn(rng: Random, victims: Sequence[str]) -> list[Kill]:
    """A kill per victim, in random order."""
    kills = []
    for victim in rng.sample(list(victims), len(victims)):
        scene = rng.choice(("serve", "push", "push", "trial", "transfer", "transfer", "enrol"))
        failpoint = ""
        points = {"planner": _PLANNER_POINTS, "agent": _AGENT_POINTS}.get(victim, ())
        if points and rng.random() < 0.5:
            name, most = rng.choice(points)
            failpoint = f"{name}=kill@{rng.randint(1, most)}"
            scene = "trial" if "trial" in name else "transfer"
        span_s = 3.0 if scene == "trial" else 0.6
        kills.append(Kill(victim, scene, rng.uniform(0.0, span_s), rng.choice((0.0, 0.3, 1.5)), failpoint))
    return kills


class KillRounds:
    """The kills of one world, one after another."""

    def __init__(
        self, world: World, database: Database, seen: Witness, applications: Applications, rng: Random
    ) -> None:
        self.acknowledged = Acknowledged()
        self.counts: Counter[str] = Counter()
        self.hung: list[str] = []
        self.wrong: list[str] = []
        self._world, self._database, self._witness = world, database, seen
        self._applications, self._rng = applications, rng
        self._folder = world.agent_home.parent
        self._plans = ["whole", "cut"]
        self._carried = 0
        self._joined = 0

    # -- one kill -------------------------------------------------------------------------------------------

    def round(self, kill: Kill) -> None:
        """Kill, start again, wait until all agree, and compare."""
        try:
            if kill.failpoint:
                self._restart_with(kill)
            with self._playing(kill.scene):
                if kill.failpoint:
                    self._wait_for_failpoint(kill)
                else:
                    time.sleep(kill.after_s)
                self._strike(kill.victim)
                self.counts[f"kills_{kill.victim}"] += 1
                time.sleep(kill.away_s)
                self._revive(kill.victim)
            self._agree()
        except Hung as error:
            self.hung.append(f"{kill}: {error}")
            self._start_over()
        self.acknowledged.check(self._database, self._witness)

    def problems(self) -> int:
        """How much was found so far."""
        found = (self.hung, self.wrong, self._applications.wrong, self._applications.hung)
        return sum(map(len, (*found, self.acknowledged.lost, self.acknowledged.wrong)))

    def finish(self) -> None:
        """Once all is quiet: the desired plan runs, the books balance, and every record is there."""
        try:
            self._quiet()
        except Hung as error:
            self.hung.append(f"at the end: {error}")
        self.acknowledged.check(self._database, self._witness, everything=True)

    def _restart_with(self, kill: Kill) -> None:
        if kill.victim == "planner":
            self._world.end_planner(kill=False)
            self._world.start_planner(kill.failpoint)
        else:
            self._world.end_agent(kill=False)
            self._world.start_agent(kill.failpoint)

    def _wait_for_failpoint(self, kill: Kill) -> None:
        deadline_s = time.monotonic() + _REACHED_S
        while not (died := self._world.died(kill.victim)) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        self.counts["at_failpoints"] += died

    def _strike(self, victim: str) -> None:
        world, server = self._world, self._world.server
        if victim in ("planner", "agent"):
            world.died(victim)  # raises where it crashed before: the kill would hide that
        if victim == "planner":
            world.end_planner(kill=True)
        elif victim == "agent":
            world.end_agent(kill=True)
        elif victim == "engine":
            _kill(until(self._engine, "the engine process runs"))
        elif victim == "postmaster":
            assert server is not None
            server.kill()
        else:
            assert server is not None
            _kill(self._rng.choice(server.backends()))

    def _engine(self) -> int | None:
        status = self._world.status()
        return status.engine.pid if status else None

    def _revive(self, victim: str) -> None:
        if victim == "planner":
            self._world.start_planner()
        elif victim == "agent":
            self._world.start_agent()
        elif victim == "postmaster":
            assert self._world.server is not None
            self._world.server.start()

    def _start_over(self) -> None:
        """After something hung: everything anew, so that the rest can go on."""
        self._world.end_agent(kill=True)
        self._world.end_planner(kill=True)
        self._world.start_planner()
        self._world.start_agent()

    # -- scenes ---------------------------------------------------------------------------------------------

    @contextmanager
    def _playing(self, scene: str) -> Iterator[None]:
        """A scene beside the block, on a thread of its own.

        Raises:
            Hung: it does not end.
        """
        play: Callable[[], None] = getattr(self, f"_play_{scene}")
        failed: list[Exception] = []

        def run() -> None:
            try:
                play()
            except StageloomError:
                pass  # not acknowledged
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=run, name=scene, daemon=True)
        thread.start()
        yield
        thread.join(2 * ANSWER_S)
        if thread.is_alive():
            raise Hung(f"{scene} does not end")
        if failed:
            raise failed[0]

    def _play_serve(self) -> None:
        """The applications do it all."""

    def _play_push(self) -> None:
        for plan in self._rng.choices(self._plans, k=6):
            self._push(plan, DEVICE)
            self._push(plan, _WITNESS)

    def _play_trial(self) -> None:
        self._push("cut", DEVICE, trial=True)
        self._push("whole", _WITNESS)

    def _play_transfer(self) -> None:
        self._carried += 1
        plan = _CARRIED[self._carried % len(_CARRIED)]
        self._push(plan, DEVICE)
        self._push(plan, _WITNESS)

    def _play_enrol(self) -> None:
        """A join that got no answer is repeated as a person would, with the same token."""
        self._joined += 1
        name = f"joined-{self._joined}"
        home = self._folder / name
        token = self._world.token(name)
        until(lambda: self._joins(token, name, home), f"{name} is enrolled")
        self.acknowledged.keys[name] = read_keys(home / KEY_NAME).public

    def _joins(self, token: str, name: str, home: Path) -> bool:
        try:
            self._world.join(token, name, home)
        except StageloomError:
            return False
        return True

    def _push(self, plan: str, device: str, *, trial: bool = False) -> None:
        epoch, generation = self._world.push(plan, device, trial=trial)
        self.acknowledged.pushes[device, epoch, generation] = plan

    # -- agreement ------------------------------------------------------------------------------------------

    def _agree(self) -> DeviceInfo:
        """Both sides name the same plan and the same verdict on the newest generation, and it is served."""
        before = {model: self._applications.completed[model] for model in _SERVED}
        info: DeviceInfo = until(
            self._settled, "a verdict on the newest generation, and the plan that the agent reports runs"
        )
        committed = info.report.state is DeviceState.COMMITTED
        self.counts["not_committed"] += not committed
        if committed and info.report.active != info.desired_plan:
            self.wrong.append(f"{info.report.active} runs, {info.desired_plan} is desired")
        for model in _SERVED:
            until(lambda model=model: self._applications.completed[model] > before[model], f"{model} served")  # type: ignore[misc]
        return info

    def _settled(self) -> DeviceInfo | None:
        """Looked at together: a verdict may still change, as where a plan's third crash condemns it."""
        info = self._decided()
        return info if info is not None and self._runs(info.report.active) else None

    def _decided(self) -> DeviceInfo | None:
        if not self._world.agent_runs() or not self._world.planner_runs():
            raise Hung("a process ended unasked")
        try:
            info = self._world.device()
        except StageloomError:
            return None  # the database is coming back
        newest = (info.report.epoch, info.report.generation) == (info.desired_epoch, info.desired_generation)
        return info if info.online and newest and info.report.state in _FINAL else None

    def _runs(self, digest: str | None) -> bool:
        status = self._world.status()
        return status is not None and status.plan is not None and status.plan.digest == digest

    def _quiet(self) -> None:
        for plan in ("whole", "cut"):
            self._push(plan, DEVICE)
            info = self._agree()
            if info.report.state is not DeviceState.COMMITTED:
                self.wrong.append(f"{plan} is {info.report.state} with nobody killed: {info.report.reason}")
        until(self._balanced, "produced = stored + dropped")

    def _balanced(self) -> bool:
        books = self._world.call(routes.WATCH, WatchRequest(device=DeviceId(DEVICE))).telemetry
        return books.produced - books.stored - books.dropped == 0


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended between the look and the signal
        os.kill(pid, signal.SIGKILL)


def victims(kills: int, *, postgres: bool) -> list[str]:
    """Who is killed in a world, each about as often; planner and agent more often where they are alone."""
    kinds = (
        ("planner", "agent", "engine", "backend", "postmaster")
        if postgres
        else ("planner", "agent", "engine")
    )
    return [kinds[at % len(kinds)] for at in range(kills)]


def write_models(folder: Path) -> dict[str, Path]:
    """Two small networks that are served, and three of 20 MB that have hardly anything to compute."""
    files = {name: folder / f"{name}.onnx" for name in (*_SERVED, *_CARRIED)}
    for seed, (name, file) in enumerate(files.items()):
        if name in _SERVED:
            zoo.write("squeezenet_bypass", file, width=0.25, size=64, seed=seed)
        else:
            zoo.write("squeezenet", file, width=2.0, size=32, seed=seed)
    return files


def prepare(world: World, files: Mapping[str, Path]) -> None:
    """Models, plans and two devices. `cut`: other blocks than `whole`, two replicas and lanes."""
    for name, file in files.items():
        world.add_model(name, file)
    _create(world, "whole", _SERVED)
    _create(world, "cut", _SERVED, partition="base", replicas=2, lanes=2)
    for name in _CARRIED:
        _create(world, name, (*_SERVED, name))
    for name, home in ((DEVICE, world.agent_home), (_WITNESS, world.agent_home.with_name(_WITNESS))):
        world.join(world.token(name), name, home)
    world.start_agent()
    world.push("whole")
    until(lambda: world.device().report.state is DeviceState.COMMITTED, "the first plan to be committed")


def _create(
    world: World,
    name: str,
    models: Sequence[str],
    *,
    partition: str = "whole",
    replicas: int = 1,
    lanes: int = 1,
) -> None:
    choices = tuple(ModelOptions(model=model, partition=partition, replicas=replicas) for model in models)
    world.call(routes.PLAN_CREATE, PlanCreateRequest(plan=name, models=choices, lanes=lanes), timeout_s=60.0)


def killed(
    folder: Path,
    files: Mapping[str, Path],
    known: Sequence[Known],
    kills: int,
    rng: Random,
    server: PostgresServer | None,
) -> tuple[Counter[str], dict[str, list[str]]]:
    """One world on one database. Returns counts, and what was found by figure."""
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(folder / "logs", {}))
        world = World(processes, folder, free_ports(), server)
        world.start_planner()
        prepare(world, files)
        # A kill of the connection that waits here between two looks would reach no work of the planner.
        file = sqlite_url(world.planner_home / DATABASE_FILE)
        database = Database(server.onlooker_url if server else file)
        stack.callback(database.close)
        applications = Applications(world.socket, ANSWER_S)
        seen = stack.enter_context(witness(folder / _WITNESS, rng))
        rounds = KillRounds(world, database, seen, applications, rng)
        with applications.submitting(known):
            for number, kill in enumerate(drawn(rng, victims(kills, postgres=server is not None)), 1):
                began_s = time.monotonic()
                rounds.round(kill)
                where = "postgres" if server else "sqlite"
                took_s = time.monotonic() - began_s
                progress(f"{where} {number}/{kills}: {kill} ({took_s:.1f} s); {rounds.problems()} problems")
            rounds.finish()
        counts = rounds.counts + Counter(tasks_completed=applications.completed.total())
        counts += Counter({f"tasks_{name}": count for name, count in applications.endings.items()})
        counts += Counter(
            rows_acknowledged=seen.rows_acknowledged, pushes_acknowledged=len(rounds.acknowledged.pushes)
        )
        counts["enrolments_acknowledged"] = len(rounds.acknowledged.keys)
        return counts, {
            "wrong": [*applications.wrong, *rounds.wrong, *sorted(rounds.acknowledged.wrong)],
            "hung": [*applications.hung, *rounds.hung],
            "acknowledged_lost": sorted(rounds.acknowledged.lost),
        }


def run(kills: int, seed: int) -> Report:
    """Half of the kills on SQLite and half on Postgres; without a Postgres all on SQLite."""
    report = Report("adversary.kills")
    counts: Counter[str] = Counter()
    found: dict[str, list[str]] = {"wrong": [], "hung": [], "acknowledged_lost": []}
    rng = Random(seed)
    programs = binaries()
    with tempfile.TemporaryDirectory(prefix="stageloom-kills-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        (folder / "models").mkdir()
        files = write_models(folder / "models")
        known = [known_answers(model, files[model], seed) for model in _SERVED]
        servers: list[PostgresServer | None] = [None]
        if programs is not None:
            servers.append(stack.enter_context(postgres_server(programs)))
        for at, server in enumerate(servers):
            share = kills // len(servers)
            more, problems = killed(folder / f"world-{at}", files, known, share, rng, server)
            counts += more
            for name, texts in problems.items():
                found[name] += texts
    report.add({"kills": sum(count for name, count in counts.items() if name.startswith("kills_"))})
    report.add({name: len(texts) for name, texts in found.items()})
    report.add(dict(sorted(counts.items())))
    report.rows = [{"figure": name, "what": text} for name, texts in found.items() for text in texts[:50]]
    return report


def main() -> None:
    """The command."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="default: 100, with --quick 10")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="which kills, and when (default 1)")
    given = parser.parse_args()
    report = run(given.kills or (10 if given.quick else 100), given.seed)
    emit(report, as_json=given.json, packages=("pyzmq", "sqlalchemy", "psycopg", "onnxruntime"))


if __name__ == "__main__":
    main()
