"""Attacks that need few messages: what each does, and what shows that it worked.

Every function takes fresh ground and returns what broke, in a few words; empty text where nothing did. One
that cannot attack raises `RuntimeError`: it says nothing of what is held. What an attack must not do is reach
anybody else, so most of them ask a good device, or the operator's commands.
"""

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from benchmarks.adversary.beside import flooded
from benchmarks.adversary.ground import Ground
from benchmarks.adversary.peer import Beside, Credentials, Peer
from benchmarks.adversary.pinged import pinged
from benchmarks.adversary.plans import add_plan, write_model

TOP: Final = 2**53
"""The largest counter that the wire carries."""

_FLOOD_S: Final = 25.0
_PINGS_S: Final = 40.0
_TWO_YEARS_S: Final = 2 * 365 * 86_400


@dataclass(frozen=True)
class Attack:
    """One script. `row`: what it does, in the words of docs/protocol.md."""

    name: str
    row: str
    run: Callable[[Ground], str]
    databases: tuple[str, ...] = ("sqlite", "postgres")


def _pages(ground: Ground, good: str) -> str:
    """What of the operator's pages fails."""
    for page in (("status",), ("device", "list"), ("device", "show", good), ("watch", "--count", "1")):
        if not ground.answers(*page, "--json"):
            return f"`stageloom {' '.join(page)}` fails"
    return ""


def _served(who: Credentials, *, boot: int = 5) -> str:
    """What a good device does not get; it says hello on new connections."""
    with Peer(who, boot=boot) as good:
        welcome = good.hello(timeout_s=20.0)
        if welcome is None or welcome["type"] != "welcome":
            return f"a good device gets no welcome: {welcome}"
        if welcome["epoch"] > TOP:
            return f"a good device is told epoch {welcome['epoch']}, which no device can decode"
        if good.report(revision=1, timeout_s=20.0) is None:
            return "a good device's report is not stored"
        if good.rows(1, [[_now_us(), [8, "good", "row"]]], timeout_s=20.0) is None:
            return "a good device's rows are not stored"
    return ""


def _now_us() -> int:
    return round(time.time() * 1e6)


def epoch(ground: Ground) -> str:
    """A report with the highest epoch that there is."""
    bad, good = ground.enrol("bad"), ground.enrol("good")
    with Peer(bad) as peer:
        peer.hello(epoch=TOP, generation=1, revision=1)
        peer.heartbeat(timeout_s=2.0)
        peer.report(epoch=TOP, generation=1, revision=2, timeout_s=2.0)
    return _served(good) or _pages(ground, "good") or _after_restart(ground, good)


def generation(ground: Ground) -> str:
    """A report with the highest generation of the planner's own epoch, then a push to that device."""
    bad, good = ground.enrol("bad"), ground.enrol("good")
    add_plan(ground, "small")
    with Peer(bad) as peer:
        welcome = peer.hello()
        peer.report(epoch=welcome["epoch"], generation=TOP, revision=1, timeout_s=3.0)
        ground.ask("plan", "push", "bad", "small")
    return _served(good) or _pages(ground, "good") or _after_restart(ground, good)


def _after_restart(ground: Ground, good: Credentials) -> str:
    ground.stop()
    if not ground.start():
        return "the planner does not start any more"
    return _served(good, boot=6)


def ledgers(ground: Ground) -> str:
    """Books with the largest sums there are, in many boots."""
    bad, good = ground.enrol("bad"), ground.enrol("good")
    with Peer(bad) as peer:
        peer.hello()
        for part in range(4):
            boots = range(1 + 64 * part, 65 + 64 * part)
            peer.rows(1, [], ledgers=[[boot, TOP, TOP] for boot in boots], timeout_s=5.0)
    return _pages(ground, "good") or _served(good) or _pages(ground, "good")


def histogram(ground: Ground) -> str:
    """A latency histogram with a bucket that does not exist, and sums at the top."""
    bad, good = ground.enrol("bad"), ground.enrol("good")
    with Peer(bad) as peer:
        peer.hello()
        rows = [[_now_us(), [2, "m", TOP, TOP, TOP, [[bucket, TOP]]]] for bucket in (96, 97, 128, 1_000_000)]
        peer.rows(1, rows, timeout_s=5.0)
    broken = ""
    for _ in range(4):  # pages that look at the last seconds read what was stored as they come to it
        time.sleep(0.5)
        broken = broken or _pages(ground, "good")
    if not broken and not ground.answers("device", "telemetry", "bad", "--by", "minute", "--json"):
        broken = "`stageloom device telemetry --by minute` fails"
    return broken or _served(good)


def nul(ground: Ground) -> str:
    """Texts with a NUL, all the time, beside good rows and reports that fall into the same commits."""
    bad, good = ground.enrol("bad"), ground.enrol("good")
    with Peer(bad) as peer, Peer(good) as other:
        peer.hello()
        other.hello()
        numbers = count(1)

        def poison() -> None:
            number = next(numbers)
            report = {"revision": number, "epoch": 0, "generation": 0, "reason": "a\0b"}
            peer.send("control", "reported", boot=peer.boot, report=report)
            change = [_now_us(), [7, 0, 0, "committed", None, "planner", "a\0b"]]
            peer.rows(number, [change], timeout_s=0.005)

        with Beside(poison) as attacker:
            for number in range(1, 101):
                answer = other.rows(number, [[_now_us(), [8, "good", "row"]]], timeout_s=5.0)
                if answer is None or answer["type"] != "telemetry_ack":
                    return "a good device's rows wait behind a text that the database refuses"
                answer = other.report(revision=number, timeout_s=5.0)
                if answer is None or answer["type"] != "reported_ack":
                    return "a good device's report waits behind a text that the database refuses"
        if attacker.error is not None:
            raise RuntimeError("the attacker died, so good records stood beside nothing") from attacker.error
    return ""


def clock_ahead(ground: Ground) -> str:
    """One start of the planner with its clock two years ahead, as after a flat battery."""
    good = ground.enrol("good")
    with Peer(good) as peer:
        peer.hello()
        peer.rows(1, [[_now_us() + n, [8, "code", "text"]] for n in range(100)])
    before = ground.query("select count(*) from telemetry")[0][0]
    ground.stop()
    settings = {"STAGELOOM_BENCH_AHEAD_S": str(_TWO_YEARS_S)}
    if not before or not ground.start(first=Path(__file__).parent / "ahead", settings=settings):
        log = (ground.folder / "planner.log").read_text()[-2000:]
        raise RuntimeError(f"no row was stored, or no planner starts with its clock ahead: {log}")
    time.sleep(8.0)  # it tidies up as soon as it has started
    ground.stop()
    ground.start()
    after = ground.query("select count(*) from telemetry")[0][0]
    return f"{before - after} of {before} telemetry rows are gone" if after < before else ""


def local_plan(ground: Ground) -> str:
    """A plan of the device's own although it may make none, of a model that it was never given."""
    bad = ground.enrol("bad")
    add_plan(ground, "open")
    secret = add_plan(ground, "secret")
    ground.ok("plan", "push", "bad", "open", "--autonomy", "off")
    digest, wire = ground.query("select digest, wire from plans where name = 'secret'")[0]
    (size,) = ground.query(f"select size_bytes from artifacts where digest = '{secret}'")[0]
    with Peer(bad) as peer:
        peer.hello()
        told = peer.expect("control", "desired")
        if told is None:
            raise RuntimeError("the planner does not tell the device its plan")
        peer.send(
            "control",
            "local_plan",
            boot=peer.boot,
            epoch=told["epoch"],
            generation=told["generation"],
            local_counter=1,
            plan_digest=digest,
            plan=bytes(wire),
            artifacts=[{"model": "secret", "digest": secret, "size_bytes": size}],
            cause="threshold",
        )
        time.sleep(2.0)
        peer.send("bulk", "chunk_request", digest=secret, offset_bytes=0, length_bytes=64)
        answer = peer.expect("bulk", "chunk", "refused", timeout_s=5.0)
    adopted = ground.query("select count(*) from generations where device = 'bad' and decided_by = 'local'")
    if answer is not None and answer["type"] == "chunk":
        return "an artifact is served to a device that it was never given to"
    return "the plan is adopted" if adopted[0][0] else ""


def foreign_costs(ground: Ground) -> str:
    """Operator costs for another device class, negative and enormous, which nobody asked for."""
    bad, good = ground.enrol("bad"), ground.enrol("good")
    digest = add_plan(ground, "small")
    with Peer(good) as peer:
        peer.hello(device_class="good-class")
    with Peer(bad) as peer:
        peer.hello(device_class="bad-class")
        for number, cost in enumerate((-5.0, 1e15, 0.0, 1.0), 1):
            timing = [0, cost, 0.0, 10]
            row = [_now_us(), [6, number, digest, 1, "good-class", [timing], True, ""]]
            peer.rows(number, [row], timeout_s=5.0)
    stored = ground.query("select median_us from operator_costs where device_class = 'good-class'")
    return f"costs of {[cost for (cost,) in stored]} us are stored for another class" if stored else ""


def two_planners(ground: Ground) -> str:
    """A second planner, with a data folder of its own, on the database of the first."""
    url = ground.database_url or f"sqlite:///{ground.home / 'planner.sqlite'}"
    second = Ground(ground.tree, ground.folder, url)
    try:
        return "both run" if second.start(home=ground.folder / "second") else ""
    finally:
        second.stop()


def full_pipe(ground: Ground) -> str:
    """An application that asks for a trace into a full pipe, beside one that is served."""
    home = ground.folder / "alone"
    model = write_model(ground.folder / "small.onnx", 8)
    agent = subprocess.Popen(
        ground.tree.command("edge_agent", "run", "--model", str(model), "--home", str(home)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=ground.tree.environment(),
        cwd=ground.tree.root,
        start_new_session=True,
    )
    here = Path(__file__).parent
    served = subprocess.Popen(
        ground.tree.script(here / "served_application.py", str(home)),
        stdout=subprocess.PIPE,
        text=True,
        env=ground.tree.environment(),
    )
    assert served.stdout is not None
    tracing: subprocess.Popen[str] | None = None
    try:
        if not served.stdout.readline():
            raise RuntimeError("the agent does not serve")
        tracing = subprocess.Popen(
            ground.tree.script(here / "trace_into_pipe.py", str(home)),
            stdout=subprocess.PIPE,
            text=True,
            env=ground.tree.environment(),
        )
        assert tracing.stdout is not None
        if not tracing.stdout.readline():
            raise RuntimeError("no trace was asked for: see what trace_into_pipe.py wrote above")
        longest_s = float(served.communicate(timeout=60.0)[0].split()[-1])
    finally:
        for process in (tracing, served, agent):
            if process is not None:
                process.kill()
                process.wait()
    return f"a task of another application took {longest_s:.1f} s" if longest_s > 2.0 else ""


def alarms(ground: Ground) -> str:
    """Alarms as fast as they can be sent."""
    return flooded(ground, "alarms", _FLOOD_S).broken


def empty_batches(ground: Ground) -> str:
    """Telemetry batches without rows, with new books in each."""
    return flooded(ground, "ledgers", _FLOOD_S).broken


def stranger_pings(ground: Ground) -> str:
    """Connections of an unknown key that fill queues, send PINGs and end by a reset."""
    return pinged(ground, _PINGS_S, enrolled=False, devices=2).broken


def enrolled_pings(ground: Ground) -> str:
    """The same with the key of an enrolled device."""
    return pinged(ground, _PINGS_S, enrolled=True, devices=2).broken


# What ends libzmq, or an agent, has nothing to do with the database.
SCRIPTS: Final = (
    Attack("epoch", "an epoch at the end of the range", epoch),
    Attack("generation", "a generation at the end of the range", generation),
    Attack("ledgers", "books at the end of the range", ledgers),
    Attack("histogram", "a histogram bucket that does not exist", histogram),
    Attack("nul", "a text that the database cannot hold", nul, ("postgres",)),
    Attack("clock_ahead", "a start with the clock two years ahead", clock_ahead),
    Attack("local_plan", "a plan of its own without autonomy, of a model never given", local_plan),
    Attack("foreign_costs", "operator costs for another class", foreign_costs),
    Attack("two_planners", "a second planner on one database", two_planners, ("sqlite",)),
    Attack("alarms", "alarms without end", alarms),
    Attack("empty_batches", "telemetry batches without rows, without end", empty_batches),
    Attack("stranger_pings", "full queues, PINGs and resets of a stranger", stranger_pings, ("sqlite",)),
    Attack(
        "enrolled_pings",
        "full queues, PINGs and resets of an enrolled device",
        enrolled_pings,
        ("sqlite",),
    ),
    Attack("full_pipe", "a trace into a full pipe", full_pipe, ("sqlite",)),
)
