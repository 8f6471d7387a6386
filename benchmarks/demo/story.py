"""The demo, step by step, with the commands that a user would type."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree
from typing import Any

from rich.console import Console

from benchmarks import zoo
from benchmarks.demo.clients import Clients
from benchmarks.demo.comparison import LEARNED, PLAIN
from benchmarks.demo.load import pattern
from benchmarks.demo.processes import DemoFailed, Lines, Processes
from benchmarks.demo.replanning import Replanning
from benchmarks.demo.results import Run, assemble, write
from stageloom import Client
from stageloom.planner.replan.predict import serves
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.predictions import KeptConsidered, considered_plans
from stageloom.planner.store.store import ReadStore
from stageloom.shared.errors import UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.plan import decode_plan

MODELS = ("inception_v3", "resnet50", "squeezenet")
WEIGHTS = (1, 2, 4)  # rates of the three clients, before scaling
FIRST = ("--scheduler", "sequential", "--partition", "whole")
"""The first plan: one model after another. On a CPU every cut costs more than it brings."""

ALIGNED = ("--scheduler", "greedy", "--partition", "whole", "--combine", "aligned", "--members", "3")
MEASURE_S = 10.0  # for the stages of that plan
BURST_MODEL = "squeezenet"
BURST_LOAD = 2.0  # of the measured capacity, while a burst lasts: queues grow by a second of work a second
AFTERWARDS_S = 3.0
INSTANCE_TIMES = 8.0
"""A trial's window, in times of the slowest model: two trials of usual windows are more than one watches."""

DEVICE = "demo"
DEADLINE_S = 2.0
CALIBRATE_S = 2.0
TRACE_S = 3.0
PATIENCE_S = 90.0
PLANNER, AGENT = "stageloom.planner", "stageloom.edge_agent"
POLICIES = Path(__file__).parent / "policy"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What can be chosen on the command line."""

    out: Path
    seconds: float  # of load at most
    load: float  # share of the measured capacity that the clients ask for
    width: float
    seed: int
    search_s: float = 10.0  # for the plain replanner's searches
    trial_s: float = 60.0  # of a trial at most


def tell(options: Options) -> dict[str, Any]:
    """Run everything, write report.json and report.html, return the report.

    Raises:
        DemoFailed: a step did not work, or the report does not hold what it promises.
    """
    console = Console(stderr=True)
    out = options.out.resolve()
    for part in ("planner", "agent", "logs", "clients"):
        rmtree(out / part, ignore_errors=True)
    environment = {
        "STAGELOOM_HOME": str(out / "planner"),
        "STAGELOOM_AGENT_HOME": str(out / "agent"),
        "STAGELOOM_AGENT_SOCKET": str(out / "agent" / "run" / "agent.sock"),
        "PYTHONUNBUFFERED": "1",
    }
    started_at = datetime.now(UTC)
    with Processes(out / "logs", environment) as processes:
        story = _Story(options, out, processes, console)
        story.write_models()
        story.start()
        story.add_models()
        first = story.make_plan("first", *FIRST)
        story.run_plan(first)
        service_s = story.calibrate()
        story.profile()
        policy = story.import_policy()
        story.start_clients(service_s)
        story.trace()
        replans = story.replan(first["plan"], service_s, policy)
        run = story.finish(started_at, first["search_s"], policy, replans)
    report = assemble(run)
    write(report, out)
    console.print(f"report: {out / 'report.html'}")
    return report


class _Story:
    """The steps share these: folder, processes, and the moment at which the load began."""

    def __init__(self, options: Options, out: Path, processes: Processes, console: Console) -> None:
        self.options = options
        self.out = out
        self.processes = processes
        self.console = console
        self.socket = Path(processes.environment["STAGELOOM_AGENT_SOCKET"])
        self.clients = Clients(
            processes,
            console,
            out / "clients",
            self.socket,
            deadline_s=DEADLINE_S,
            seed=options.seed,
        )

    def say(self, text: str) -> None:
        self.console.print(f"[bold]·[/bold] {text}", highlight=False)

    def planner(self, *arguments: str) -> Any:
        """One `stageloom` command."""
        return self.processes.call("-".join(arguments[:2]), PLANNER, *arguments, "--json")

    def model_path(self, name: str) -> Path:
        return self.out / "models" / f"{name}.onnx"

    def write_models(self) -> None:
        """Seeded weights, so that every run serves the same networks."""
        self.say(f"writing {', '.join(MODELS)} (seeded weights, width {self.options.width:g})")
        (self.out / "models").mkdir(parents=True, exist_ok=True)
        for name in MODELS:
            zoo.write(name, self.model_path(name), width=self.options.width)

    def start(self) -> None:
        """Planner up, agent enrolled and running."""
        self.say("starting the planner")
        up = self.processes.start("planner", PLANNER, "up", "--listen", "127.0.0.1:0", "--json")
        assert up.stdout is not None
        ready = Lines(up.stdout)
        self.until("the planner to listen", lambda: ready.latest is not None, ["planner"])
        self.say("enrolling the agent with a one-time token")
        token = self.planner("device", "token", DEVICE)["token"]
        self.processes.call("agent-join", AGENT, "join", token)
        settings = {"trial": {"limit_s": self.options.trial_s, "instance_times": INSTANCE_TIMES}}
        (self.out / "agent" / "agent.json").write_text(json.dumps(settings))
        agent = self.processes.start("agent", AGENT, "run")
        assert agent.stdout is not None
        Lines(agent.stdout)
        self.until("the agent to connect", lambda: self.device()["online"], ["planner", "agent"])

    def device(self) -> Any:
        """The device as the planner sees it."""
        return self.planner("device", "show", DEVICE)

    def add_models(self) -> None:
        """Import each model; artifacts travel by digest when a plan names them."""
        for name in MODELS:
            self.say(f"importing {name}")
            self.planner("model", "add", f"{name}={self.model_path(name)}")

    def make_plan(self, name: str, *how: str) -> dict[str, Any]:
        """A plan of all three models."""
        chosen = [word for model in MODELS for word in ("--model", model)]
        plan: dict[str, Any] = self.planner(
            "plan", "create", "--name", name, "--device", DEVICE, *chosen, *how
        )
        self.say(
            f"plan {plan['digest'][:12]} ({plan['scheduler']}), composed in "
            f"{1000 * plan['search_s']:.0f} ms, {plan['wire_bytes']} bytes"
        )
        return plan

    def run_plan(self, plan: dict[str, Any]) -> None:
        """Push a plan and wait until the device runs it."""
        self.planner("plan", "push", DEVICE, plan["plan"], "--now")

        def active() -> bool:
            report = self.device()["report"]
            if report["state"] in ("rejected", "rolled_back"):
                raise DemoFailed(f"the device {report['state']} the plan: {report['reason']}")
            return bool(report["active"] == plan["digest"])

        self.until("the plan to become active", active, ["planner", "agent"])
        self.say(f"plan {plan['digest'][:12]} is active on the device")

    def calibrate(self) -> list[float]:
        """Seconds per task of each model on this machine, measured through the agent itself."""
        with Client(self.socket) as client:
            service_s = [_service_s(client, name) for name in MODELS]
        capacity = ", ".join(f"{name} {1 / s:.0f}/s" for name, s in zip(MODELS, service_s, strict=True))
        self.say(f"measured capacity, each alone: {capacity}")
        return service_s

    def profile(self) -> None:
        """Time every operator on the device while its queues are empty, then stages of several groups.

        Until its first burst the device is not re-planned, whatever alarms it raises.
        """
        self.planner("device", "replan", DEVICE, "--off")
        self.say("profiling operators on the device")
        self.planner("device", "profile", DEVICE, *(w for m in MODELS for w in ("--model", m)), "--wait")
        self.say("measuring stages that run operators of several models side by side")
        aligned = self.make_plan("aligned", *ALIGNED)["plan"]
        stages = ("--plan", aligned, "--budget", f"{MEASURE_S:g}", "--wait")
        self.processes.call("device-profile-stages", PLANNER, "device", "profile", DEVICE, *stages)

    def import_policy(self) -> dict[str, Any]:
        """Adopt the trained policy for this device; `policy` is None where none can be."""
        file = POLICIES / f"width-{self.options.width:g}.checkpoint"
        if not file.exists():
            reason = f"no policy was trained for networks of width {self.options.width:g}"
            return {"policy": None, "reason": reason}
        try:
            policy: dict[str, Any] = self.planner("policy", "import", str(file), "--device", DEVICE)
        except DemoFailed:
            return {"policy": None, "reason": self.processes.tail("policy-import")}
        self.say(f"adopted policy {policy['policy'][:12]}, trained for {policy['trained_for']}")
        return {**policy, "reason": ""}

    def start_clients(self, service_s: Sequence[float]) -> None:
        """Three processes, each with its own arrivals, in proportion 1:2:4."""
        options = self.options
        scale = options.load / sum(w * s for w, s in zip(WEIGHTS, service_s, strict=True))
        rates = dict(zip(MODELS, (weight * scale for weight in WEIGHTS), strict=True))
        self.say(f"asking for {', '.join(f'{rate:.1f}/s' for rate in rates.values())}")
        self.clients.start(rates, options.seconds)

    def trace(self) -> None:
        """A short recording of the engine under load, for the report and for Perfetto."""
        rows = self.out / "profile.json"
        rows.write_text(json.dumps(self.planner("telemetry", DEVICE)))
        how = ("--seconds", f"{TRACE_S:g}", "-o", str(self.trace_file), "--costs", str(rows), "--json")
        found = self.processes.call("agent-trace", AGENT, "trace", *how)
        each = f", {found['recorder_us_per_step']:.0f} us each" if found["steps"] else ""
        self.say(f"traced {found['steps']} steps in {TRACE_S:g} s{each}: {self.trace_file.name}")

    @property
    def trace_file(self) -> Path:
        return self.out / "trace.json"

    def replan(self, first: str, service_s: Sequence[float], policy: dict[str, Any]) -> dict[str, int]:
        """A burst for each proposer; the numbers of the re-plans that answered."""
        store = ReadStore.open(self.out / "planner", "")
        try:
            replanning = Replanning(
                DEVICE, self.planner, self.clients, store, self.say, patience_s=self.options.trial_s + 90.0
            )
            burst = BURST_MODEL, (BURST_LOAD - self.options.load) / service_s[MODELS.index(BURST_MODEL)]
            found = {PLAIN: replanning.answer(PLAIN, *burst, search_s=self.options.search_s)}
            if policy["policy"] is not None:
                replanning.run_again(first)
                found[LEARNED] = replanning.answer(LEARNED, *burst)
                replanning.run_best(found.values())
            self.clients.pause(AFTERWARDS_S)
            return found
        finally:
            store.close()

    def finish(
        self, started_at: datetime, first_plan_s: float, policy: dict[str, Any], answers: dict[str, int]
    ) -> Run:
        """End the load, wait until telemetry has come, then read what the planner stored."""
        self.clients.end(PATIENCE_S)
        self.say("draining telemetry")
        self.until("telemetry to drain", self.telemetry_balanced, ["planner", "agent"])
        history = self.planner("plan", "history", DEVICE)
        desired = {entry["plan"] for entry in history if entry["digest"]}
        replans = self.planner("replan", "list", DEVICE)
        run = Run(
            out=self.out,
            started_at=started_at,
            began_s=self.clients.began_s,
            wall_minus_monotonic_s=time.time() - time.monotonic(),
            plans=[self.planner("plan", "show", name) for name in sorted(desired)],
            first_plan_s=first_plan_s,
            models={model["model"]: model for model in self.planner("model", "list")},
            history=history,
            replans=replans,
            policy=policy,
            answers=answers,
            considered=self.considered([replan["replan"] for replan in replans]),
            telemetry=self.books(),
            rows=self.planner("telemetry", DEVICE),
            trace=self.trace_file,
            client_files=self.clients.files,
            model_files={name: self.model_path(name) for name in MODELS},
            deadline_s=DEADLINE_S,
        )
        self.processes.stop("agent")
        self.processes.stop("planner")
        return run

    def considered(self, replans: Sequence[int]) -> dict[int, list[KeptConsidered]]:
        """What each re-plan looked at."""
        store = ReadStore.open(self.out / "planner", "")
        try:
            serves_ = serves(decode_plan(store.read(plan_info, "first").wire))
            found = store.read(
                considered_plans, serves_, store.read(device_info, DeviceId(DEVICE)).device_class
            )
        finally:
            store.close()
        return {number: [one for one in found if one.replan == number] for number in replans}

    def books(self) -> dict[str, int]:
        """Telemetry rows produced by the device, stored and dropped."""
        books = self.planner("watch", DEVICE, "--count", "1")["telemetry"]
        return {word: int(books[word]) for word in ("produced", "stored", "dropped")}

    def telemetry_balanced(self) -> bool:
        books = self.books()
        return books["produced"] > 0 and books["produced"] == books["stored"] + books["dropped"]

    def until(self, what: str, condition: Callable[[], bool], alive: Sequence[str]) -> None:
        """Poll a condition while the named processes live."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            self.processes.require_alive(alive)
            if time.monotonic() > deadline:
                raise DemoFailed(f"waited {PATIENCE_S:.0f} s for {what}; see {self.processes.folder}")
            time.sleep(0.1)


def _service_s(client: Client, name: str) -> float:
    """Median seconds per task with two tasks in flight, from a closed loop after a short warm-up."""
    info = client.models()[name]
    inputs = {tensor.name: pattern(1, tensor.shape) for tensor in info.inputs}
    open_tasks: set[Future[Any]] = {client.submit(name, inputs) for _ in range(2)}
    ends: list[float] = []
    began = time.monotonic()
    while time.monotonic() - began < CALIBRATE_S or len(ends) < 8:
        done, open_tasks = wait(open_tasks, timeout=PATIENCE_S, return_when=FIRST_COMPLETED)
        if not done:
            raise UnavailableError(f"no result for {name} within {PATIENCE_S:.0f} s")
        for future in done:
            future.result()
            ends.append(time.monotonic())
            open_tasks.add(client.submit(name, inputs))
    for future in open_tasks:
        future.result(PATIENCE_S)
    gaps = [later - earlier for earlier, later in zip(ends[2:], ends[4:], strict=False)]
    return statistics.median(gaps) / 2
