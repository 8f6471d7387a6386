"""The demo, step by step, with the commands that a user would type."""

import json
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree
from typing import Any, Final

from rich.console import Console

from benchmarks import zoo
from benchmarks.processes import AGENT, PLANNER, DemoFailed, System
from examples.demo.clients import DEADLINE_S, Clients
from examples.demo.compare import LEARNED, NAMES, PLAIN
from examples.demo.load import pattern
from examples.demo.page import render
from examples.demo.report import Run, assemble
from stageloom import Client
from stageloom.planner.replan.predict import serves
from stageloom.planner.schema.replan import ReplanInfo
from stageloom.planner.store.devices import device_info
from stageloom.planner.store.plans import plan_info
from stageloom.planner.store.predictions import LookedAt, considered_plans
from stageloom.planner.store.replans import replan_infos
from stageloom.shared.messages.control import DeviceState
from stageloom.shared.plan import decode_plan

MODELS: Final = ("inception_v3", "resnet50", "squeezenet")
WEIGHTS: Final = (1, 2, 4)  # rates of the three clients, before scaling
FIRST: Final = ("--scheduler", "sequential", "--partition", "whole")
"""The first plan: one model after another. On a CPU every cut costs more than it brings."""

ALIGNED: Final = ("--scheduler", "greedy", "--partition", "whole", "--combine", "aligned")
MEASURE_S: Final = 10.0  # for the stages of that plan
BURST_MODEL: Final = "squeezenet"
BURST_LOAD: Final = 2.0  # of the measured capacity during a burst: queues grow by a second of work a second
BURST_S: Final = 4.0
BURSTS_MOST: Final = 3
CALM_S: Final = 3.0  # before a burst: the trigger is armed, and has samples of the usual load
ALARM_WITHIN_S: Final = 20.0  # a burst's client takes a while to start, and alarms have a cool-down
MEMBERS_MAX: Final = 3  # H, of the plain replanner as of the policy
AFTERWARDS_S: Final = 3.0
INSTANCE_TIMES: Final = 8.0
"""A trial's window, in times of the slowest model: two trials of usual windows are more than one watches."""

DEVICE: Final = "demo"
CALIBRATE_S: Final = 2.0
TRACE_S: Final = 3.0
PATIENCE_S: Final = 90.0
POLICIES: Final = Path(__file__).parent / "policy"


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
    settings = {"trial": {"limit_s": options.trial_s, "instance_times": INSTANCE_TIMES}}
    started_at = datetime.now(UTC)
    with System(out, DEVICE, settings, patience_s=PATIENCE_S) as system:
        story = _Story(options, system, console)
        story.add_models()
        first = story.make_plan("first", *FIRST)
        story.run_plan(first)
        service_s = story.calibrate()
        story.profile()
        policy = story.import_policy()
        story.start_clients(service_s)
        story.trace()
        answers = story.replan(first["plan"], service_s, policy)
        run = story.finish(started_at, first["search_s"], policy, answers)
    report = assemble(run)
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "report.html").write_text(render(report))
    console.print(f"report: {out / 'report.html'}")
    return report


class _Story:
    """The steps, from a system that is started with it."""

    def __init__(self, options: Options, system: System, console: Console) -> None:
        self.options, self.system, self.console = options, system, console
        self.out = system.folder
        self.clients = Clients(system, console, options.seed)
        self.model_files = {name: self.out / "models" / f"{name}.onnx" for name in MODELS}
        self.trace_file = self.out / "trace.json"
        self.patience_s = options.trial_s + PATIENCE_S
        self.say("starting planner and agent, enrolled with a one-time token")
        system.start()

    def say(self, text: str) -> None:
        self.console.print(f"[bold]·[/bold] {text}", highlight=False)

    def planner(self, *words: str) -> Any:
        return self.system.planner(*words)

    def add_models(self) -> None:
        """Import each model, with seeded weights, so that every run serves the same networks."""
        width = self.options.width
        self.say(f"writing and importing {', '.join(MODELS)} (seeded weights, width {width:g})")
        for name, file in self.model_files.items():
            zoo.write(name, file, width=width)
            self.planner("model", "add", f"{name}={file}")

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
            report = self.planner("device", "show", DEVICE)["report"]
            if report["state"] in ("rejected", "rolled_back"):
                raise DemoFailed(f"the device {report['state']} the plan: {report['reason']}")
            return bool(report["active"] == plan["digest"])

        self.system.until("the plan to become active", active)
        self.say(f"plan {plan['digest'][:12]} is active on the device")

    def calibrate(self) -> list[float]:
        """Seconds per task of each model on this machine, measured through the agent itself."""
        with Client(self.system.socket) as client:
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
        file = self.out / "aligned.toml"
        file.write_text(f"members_max = {len(MODELS)}\n")
        aligned = self.make_plan("aligned", *ALIGNED, "--from", str(file))["plan"]
        stages = ("--plan", aligned, "--budget", f"{MEASURE_S:g}", "--wait")
        self.system.processes.call("device-profile-stages", PLANNER, "device", "profile", DEVICE, *stages)

    def import_policy(self) -> dict[str, Any]:
        """Adopt the trained policy for this device; `policy` is None where none can be."""
        file = POLICIES / f"width-{self.options.width:g}.checkpoint"
        if not file.exists():
            reason = f"no policy was trained for networks of width {self.options.width:g}"
            return {"policy": None, "reason": reason}
        try:
            policy: dict[str, Any] = self.planner("policy", "import", str(file), "--device", DEVICE)
        except DemoFailed:
            return {"policy": None, "reason": self.system.processes.tail("policy-import")}
        self.say(f"adopted policy {policy['policy'][:12]}, trained for {policy['trained_for']}")
        return {**policy, "reason": ""}

    def start_clients(self, service_s: Sequence[float]) -> None:
        """Three processes, each with its own arrivals, in proportion 1:2:4."""
        scale = self.options.load / sum(w * s for w, s in zip(WEIGHTS, service_s, strict=True))
        rates = dict(zip(MODELS, (weight * scale for weight in WEIGHTS), strict=True))
        self.say(f"asking for {', '.join(f'{rate:.1f}/s' for rate in rates.values())}")
        self.clients.start(rates, self.options.seconds)

    def trace(self) -> None:
        """A short recording of the engine under load, for the report and for Perfetto."""
        rows = self.out / "profile.json"
        rows.write_text(json.dumps(self.planner("device", "telemetry", DEVICE)))
        how = ("--seconds", f"{TRACE_S:g}", "-o", str(self.trace_file), "--costs", str(rows), "--json")
        found = self.system.processes.call("agent-trace", AGENT, "trace", *how)
        each = f", {found['recorder_us_per_step']:.0f} us each" if found["steps"] else ""
        self.say(f"traced {found['steps']} steps in {TRACE_S:g} s{each}: {self.trace_file.name}")

    # One burst after another, each answered by another proposer from the same first plan

    def replan(self, first: str, service_s: Sequence[float], policy: dict[str, Any]) -> dict[str, int]:
        """A burst for each proposer; the numbers of the re-plans that answered."""
        rate_per_s = (BURST_LOAD - self.options.load) / service_s[MODELS.index(BURST_MODEL)]
        answers = {PLAIN: self.answer(PLAIN, rate_per_s, self.options.search_s)}
        if policy["policy"] is not None:
            self.run_again(first)
            answers[LEARNED] = self.answer(LEARNED, rate_per_s, 10.0)
            self.run_best(answers.values())
        self.clients.pause(AFTERWARDS_S)
        return answers

    def answer(self, proposer: str, rate_per_s: float, search_s: float) -> int:
        """Cause a burst, and wait for what one proposer's re-plan comes to; its number.

        Raises:
            DemoFailed: no queue diverged, or the device never decided.
        """
        self.clients.pause(CALM_S)
        how = ("--on", "--proposer", proposer, "--budget", f"{search_s:g}", "--members-max", str(MEMBERS_MAX))
        self.planner("device", "replan", DEVICE, *how)
        before = max((replan.replan for replan in self._replans()), default=0)
        self.say(f"{NAMES[proposer]} is asked")

        def begun() -> ReplanInfo | None:
            newer = [replan for replan in self._replans() if replan.replan > before]
            return min(newer, key=lambda replan: replan.replan, default=None)

        self._burst_until(begun, rate_per_s)
        self.clients.watch("the re-plan to be decided", lambda: _decided(begun()), self.patience_s)
        self.planner("device", "replan", DEVICE, "--off")
        found = begun()
        assert found is not None
        ratio = "" if found.ratio is None else f", ratio {found.ratio:.3f}"
        self.say(f"{NAMES[proposer]}: {found.outcome.replace('_', ' ')}{ratio} {found.reason}".strip())
        return found.replan

    def _burst_until(self, begun: Callable[[], ReplanInfo | None], rate_per_s: float) -> None:
        """Bursts, each twice the one before: the machine may have become faster since it was calibrated.

        Raises:
            DemoFailed: none of them led to a re-plan.
        """
        for number in range(BURSTS_MOST):
            rate = rate_per_s * 2.0**number
            self.say(f"a burst of {BURST_MODEL}, {rate:.0f}/s for {BURST_S:g} s")
            self.clients.burst(BURST_MODEL, rate, BURST_S)
            until_s = time.monotonic() + ALARM_WITHIN_S

            def begun_or_late(until_s: float = until_s) -> bool:
                return begun() is not None or time.monotonic() > until_s

            self.clients.watch("a queue to diverge", begun_or_late, 2 * ALARM_WITHIN_S)
            if begun():
                return
        raise DemoFailed("no burst made a queue diverge enough for a re-plan")

    def run_again(self, plan: str) -> None:
        """Have the device run this plan, if it does not: the next answer begins where the last did."""
        if not self._runs(plan):
            self.say(f"the device runs {plan} again")
            self.planner("plan", "push", DEVICE, plan, "--now")
            self.clients.watch(f"{plan} to run again", lambda: self._runs(plan), self.patience_s)

    def run_best(self, answers: Collection[int]) -> None:
        """Have the device run on with the best of the plans that won their trials there; it is proven."""
        won = [
            replan
            for replan in self._replans()
            if replan.replan in answers and replan.outcome == "committed" and replan.ratio is not None
        ]
        best = max(won, key=lambda replan: replan.ratio or 0.0, default=None)
        if best is not None and not self._runs(best.plan):
            self.say(f"the device runs on with {best.plan}, the best of those that won")
            self.planner("plan", "push", DEVICE, best.plan)
            self.clients.watch(f"{best.plan} to run again", lambda: self._runs(best.plan), self.patience_s)

    def _runs(self, plan: str) -> bool:
        report = self.system.store.read(device_info, self.system.device).report
        digest = self.system.store.read(plan_info, plan).digest
        return report.active == digest and report.state is DeviceState.COMMITTED

    def _replans(self) -> list[ReplanInfo]:
        return list(self.system.store.read(replan_infos, self.system.device, limit=20))

    # The end

    def finish(
        self, started_at: datetime, first_plan_s: float, policy: dict[str, Any], answers: dict[str, int]
    ) -> Run:
        """End the load, wait until telemetry has come, then read what the planner stored."""
        self.clients.end(PATIENCE_S)
        self.say("draining telemetry")
        self.system.until("telemetry to drain", self._telemetry_balanced)
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
            considered=self._considered([replan["replan"] for replan in replans]),
            telemetry=self._books(),
            rows=[{**row, **row["values"]} for row in self.planner("device", "telemetry", DEVICE)],
            trace=self.trace_file,
            client_files=self.clients.files,
            model_files=self.model_files,
            deadline_s=DEADLINE_S,
        )
        self.system.processes.stop("agent")
        self.system.processes.stop("planner")
        return run

    def _considered(self, replans: Sequence[int]) -> dict[int, list[LookedAt]]:
        """What each re-plan looked at."""
        store = self.system.store
        served = serves(decode_plan(store.read(plan_info, "first").wire))
        found = store.read(considered_plans, served, store.read(device_info, self.system.device).device_class)
        return {number: [entry for entry in found if entry[1].replan == number] for number in replans}

    def _books(self) -> dict[str, int]:
        """Telemetry rows produced by the device, stored and dropped."""
        books = self.planner("watch", DEVICE, "--count", "1")["telemetry"]
        return {word: int(books[word]) for word in ("produced", "stored", "dropped")}

    def _telemetry_balanced(self) -> bool:
        books = self._books()
        return books["produced"] > 0 and books["produced"] == books["stored"] + books["dropped"]


def _decided(replan: ReplanInfo | None) -> bool:
    """It has its outcome, and the row with the trial's figures has come, too."""
    return replan is not None and replan.outcome != "pending" and replan.trigger_to_decision_ms is not None


def _service_s(client: Client, name: str) -> float:
    """Median seconds per task with two tasks in flight, from a closed loop after a short warm-up."""
    inputs = {tensor.name: pattern(1, tensor.shape) for tensor in client.models()[name].inputs}
    ends: list[float] = []
    began = time.monotonic()

    def call() -> None:
        while time.monotonic() - began < CALIBRATE_S or len(ends) < 8:
            client.run(name, inputs, timeout_s=PATIENCE_S)
            ends.append(time.monotonic())

    with ThreadPoolExecutor(2) as pool:
        try:
            for future in [pool.submit(call) for _ in range(2)]:
                future.result()
        except TimeoutError as error:
            raise DemoFailed(f"no result for {name} within {PATIENCE_S:.0f} s") from error
    gaps = [later - earlier for earlier, later in zip(ends[2:], ends[4:], strict=False)]
    return statistics.median(gaps) / 2
