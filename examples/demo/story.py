"""The demo in three acts, with the commands that a user would type."""

import json
import math
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from shutil import rmtree
from typing import Any, Final

import tomli_w
from rich.console import Console

from benchmarks import zoo
from benchmarks.pays.device import COMMITTED, PENDING, PaysDevice
from benchmarks.pays.intervals import Tasks
from benchmarks.pays.load import Application
from benchmarks.processes import AGENT, DemoFailed
from examples.demo.load import WINDOW_S as STAYED_S
from examples.demo.load import StayingLoad, compare
from examples.demo.page import render
from examples.demo.report import AFTER, BEFORE, BUSILY, FITTING, NAIVELY, STAYING, Run, Served, assemble
from stageloom import Client
from stageloom.edge_agent.bench.contest import Contest, ContestLoad
from stageloom.edge_agent.bench.load import deadlines_s
from stageloom.edge_agent.bench.model_files import ModelUnderTest, prepare
from stageloom.edge_agent.bench.rival_settings import NAIVE
from stageloom.edge_agent.bench.stageloom_contestant import AgentSetting
from stageloom.edge_agent.bench.termination import ended_politely
from stageloom.planner.schema.replan import ReplanInfo, TrialInfo

MODELS: Final = ("inception_v3", "resnet50", "squeezenet")
WEIGHTS: Final = (1, 2, 4)  # of their arrivals
PARTITION: Final = "whole"
"""How models are cut. On a CPU every cut costs more than it brings."""

NIGHT, FITTING_PLAN, PAPER = "night", "fitting", "paper"
QUIET: Final = 0.3  # of what the night's plan carries at most
BUSY: Final = 0.9  # of what a plan for all cores carries at most: the load that comes and stays
WINDOW_S: Final = 2.5
LEAD_S: Final = 6.0  # of the quiet load, before the other one comes
PROFILE_S: Final = 30.0
SATURATED_S: Final = 3.0
SETTLED_S: Final = 2.0  # of a load that are not counted: queues fill
TRACE_S: Final = 2.0
PAPER_EXECUTOR: Final = "onnx"  # of which every operator is known
PAGE_ADDRESS: Final = "127.0.0.1:7424"
_POLL_S: Final = 0.25


@dataclass(frozen=True, kw_only=True)
class Options:
    """What can be chosen on the command line; seconds."""

    out: Path
    width: float
    seed: int
    windows: int = 5  # of each in act one
    replan_s: float = 100.0  # until a re-plan has gained something
    afterwards_s: float = 14.0  # that the load goes on then


def tell(options: Options) -> dict[str, Any]:
    """Run everything, write report.json and report.html, return the report.

    Raises:
        DemoFailed: a step did not work, or the report does not hold what it promises.
    """
    console = Console(stderr=True)
    out = options.out.resolve()
    for part in ("planner", "agent", "logs", "models"):
        rmtree(out / part, ignore_errors=True)
    console.print(f"[bold]·[/bold] writing {', '.join(MODELS)} (seeded weights, width {options.width:g})")
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        models = list(processes.map(_model, MODELS, repeat(out / "models"), repeat(options.width)))
    with ended_politely(), PaysDevice(out, models, PROFILE_S) as device:
        report = assemble(_Story(options, device, console).run())
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "report.html").write_text(render(report))
    console.print(f"\n{report['verdict']}\n", highlight=False)
    console.print(f"report: {out / 'report.html'}")
    console.print(_how_to_browse(out / "planner"), highlight=False, soft_wrap=True)
    return report


def _how_to_browse(data_dir: Path) -> str:
    """How the planner's page shows what was stored; the demo's own planner has ended."""
    program = Path(sys.executable).with_name("stageloom")
    return (
        f"page:   https://{PAGE_ADDRESS}/ui while this runs, on what the demo stored:\n"
        f"        {program} up --data-dir {data_dir} --api {PAGE_ADDRESS}\n"
        f"        and a token to sign in with: {program} access create me --data-dir {data_dir}"
    )


def _model(name: str, folder: Path, width: float) -> ModelUnderTest:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.zoo"
    zoo.write(name, file, width=width)
    return prepare(name, file, {}, folder)


class _Story:
    """The acts, on a device that is not started yet. Instants are on the monotonic clock."""

    def __init__(self, options: Options, device: PaysDevice, console: Console) -> None:
        self.options, self.device, self.console = options, device, console
        self.started_at = datetime.now(UTC)
        self.served: list[Served] = []
        self.trace_file = device.folder / "trace.json"

    def say(self, text: str) -> None:
        self.console.print(f"[bold]·[/bold] {text}", highlight=False)

    def run(self) -> Run:
        """All of it."""
        device = self.device
        self.say("starting planner and agent, enrolled with a one-time token; importing and measuring models")
        device.measure()
        device.replanning(False)
        found = deadlines_s({name: device.alone_s(name) for name in MODELS})
        self.deadlines_s = [found[name] for name in MODELS]
        self.create_night()
        self.act_one()
        device.run_plan(NIGHT)
        self.say("the device runs the plan for few tasks")
        with Client(device.socket) as client:
            self.application = Application(client, device.models, self.deadlines_s)
            self.application.warm_up(WEIGHTS)
            self.night_per_s = self.application.saturated_per_s(WEIGHTS, SATURATED_S)
            load, answer = self.act_two()
            paper = self.act_three()
            self.ended_s = time.monotonic()
            load.end()
            self.serve_after(load, answer, paper)
            return self.end(load, answer, paper, client)

    def create_night(self) -> None:
        """The plan for few tasks: one lane on one core, each model where it is fastest so."""
        alone = {name: times for (name, threads), times in self.device.times_s.items() if threads == 1}
        executors = sorted(alone)
        fastest = {name: min(executors, key=lambda one: alone[one].get(name, math.inf)) for name in MODELS}
        plan = {
            "step_choice": "deadline",
            "run_ahead": 1,
            "further_executors": [{"name": one} for one in executors[1:]],
            "resources": [{"cores": sorted(os.sched_getaffinity(0))[:1]}],
            "lane_resources": [0],
            "models": [
                {"model": name, "queue": "deadline", "executors": [executors.index(fastest[name])]}
                for name in MODELS
            ],
        }
        self.create(NIGHT, plan, "--executor", executors[0])

    def create(self, name: str, plan: dict[str, Any], *how: str) -> None:
        """`plan create --from` a file."""
        file = self.device.folder / f"{name}.toml"
        file.write_text(tomli_w.dumps(plan))
        where = ("--device", self.device.device, "--name", name, "--from", str(file))
        self.device.planner("plan", "create", *where, *how)

    # Act one: default sessions beside two plans, the same arrivals, in turns

    def act_one(self) -> None:
        self.say("act one: a default onnxruntime session and a thread per model, beside two plans")
        device = self.device
        device.planner("plan", "create", device.device, "--name", FITTING_PLAN, *device.chosen)
        load = ContestLoad(
            weights=WEIGHTS, deadlines_s=self.deadlines_s, window_s=WINDOW_S, seed=100 * self.options.seed
        )
        plans = {BEFORE: NIGHT, FITTING: FITTING_PLAN}
        with Contest(device.models, load, self.say, needed=(NAIVE.name, *plans)) as contest:
            settings = [AgentSetting(who, device.plan(name).wire) for who, name in plans.items()]
            contest.enter([NAIVE, *settings])
            self.capacity_per_s = contest.saturated([FITTING], WEIGHTS, SATURATED_S, 1)[FITTING][0]
            if not self.capacity_per_s:
                problem = contest.problems.get(FITTING, "its tasks did not turn over in a minute")
                raise DemoFailed(f"the plan for all cores does not serve all models: {problem}")
            rate_per_s = BUSY * self.capacity_per_s
            self.say(f"  the plan carries {self.capacity_per_s:.0f} tasks a second, mixed 1:2:4")
            results = contest.windows_at(contest.names, rate_per_s, self.options.windows)
        for name, who in ((NAIVE.name, NAIVELY), (BEFORE, BEFORE), (FITTING, FITTING)):
            found = [Tasks.of(one, self.deadlines_s) for one in results[name]]
            self.serve(who, BUSILY, rate_per_s, WINDOW_S, found)

    def serve(self, who: str, load: str, rate_per_s: float, window_s: float, windows: list[Tasks]) -> None:
        """Keep how somebody served."""
        one = Served(who=who, load=load, rate_per_s=rate_per_s, window_s=window_s, windows=windows)
        self.served.append(one)
        self.say(f"  {who}, {load}: {one.sentence}")

    # Act two: the load rises and stays

    def act_two(self) -> tuple[StayingLoad, ReplanInfo | None]:
        """The load, which goes on, and the re-plan that was committed; None where none gained anything."""
        device = self.device
        quiet = StayingLoad(self.application, WEIGHTS, QUIET * self.night_per_s, 1000 + self.options.seed)
        time.sleep(LEAD_S)
        quiet.end()
        device.replanning(True)  # not before: even few tasks are served better by another plan
        rate_per_s = BUSY * self.capacity_per_s
        self.say(f"act two: {quiet.rate_per_s:.1f} tasks a second become {rate_per_s:.1f}, and stay")
        load = StayingLoad(self.application, WEIGHTS, rate_per_s, 2000 + self.options.seed)
        until_s = load.began_s + self.options.replan_s
        told: set[int] = set()
        while (answer := self.committed(load.began_s)) is None and time.monotonic() < until_s:
            self.tell_of_replans(load.began_s, told)
            self.pause()
        device.replanning(False)  # the plan that won is to be seen at work, and not on trial again
        self.tell_of_replans(load.began_s, told)
        self.say("the device was planned anew" if answer else "nothing was gained in that time")
        since_s = time.monotonic()
        while time.monotonic() < since_s + self.options.afterwards_s:
            self.pause()
        self.undisturbed_until_s = time.monotonic()  # commands that read a recording take cores themselves
        self.trace()
        device.until("the last re-plan to end", device.settled)
        return load, answer

    def replans(self, since_s: float) -> list[ReplanInfo]:
        return self.device.replans(self.wall_us(since_s))

    def committed(self, since_s: float) -> ReplanInfo | None:
        found = self.replans(since_s)
        won = [one for one in found if one.outcome == COMMITTED and one.trigger_to_active_ms is not None]
        return won[0] if won else None

    def tell_of_replans(self, since_s: float, told: set[int]) -> None:
        for one in self.replans(since_s):
            if one.outcome != PENDING and one.replan not in told:
                told.add(one.replan)
                ratio = "" if one.ratio is None else f", ratio {one.ratio:.3f}"
                self.say(
                    f"  {one.cause.replace('_', ' ')}: {one.outcome.replace('_', ' ')}{ratio} {one.reason}"
                )

    def trace(self) -> None:
        """A short recording of the engine under load, for the report and for Perfetto."""
        costs = self.device.folder / "profile.json"
        costs.write_text(json.dumps(self.profiles()))
        how = ("--seconds", f"{TRACE_S:g}", "-o", str(self.trace_file), "--costs", str(costs), "--json")
        self.device.processes.call("agent-trace", AGENT, "trace", *how)

    def profiles(self) -> list[Any]:
        """What the device measured of operators on one thread."""
        rows = self.device.planner("device", "telemetry", self.device.device, "--kind", "profile_result")
        wanted = self.device.profiles[PAPER_EXECUTOR, 1]
        return [row for row in rows if row["values"]["request"] in wanted]

    # Act three: better on paper

    def act_three(self) -> TrialInfo:
        """All models' operators side by side, in as few stages as they fit into, on trial."""
        device, how = self.device, ("--scheduler", "greedy", "--combine", "aligned", "--partition", PARTITION)
        models = [{"model": name, "replicas": 1, "queue": "deadline"} for name in MODELS]
        self.create(PAPER, {"members_max": len(MODELS), "models": models}, "--executor", PAPER_EXECUTOR, *how)
        self.say("act three: all operators that may run side by side do, which is best on paper")
        began_us = time.time_ns() // 1000
        generation = device.planner("plan", "push", device.device, PAPER)["generation"]

        def tried() -> list[TrialInfo]:
            return [one for one in device.trials(began_us) if one.generation == generation]

        trial: TrialInfo = device.until("the trial to end", tried)[0]
        seconds = (trial.decided_us - began_us) / 1e6
        self.say(f"  {trial.verdict.replace('_', ' ')} after {seconds:.0f} s: {trial.reason}")
        return trial

    # The end

    def serve_after(self, load: StayingLoad, answer: ReplanInfo | None, paper: TrialInfo) -> None:
        """How the load that stayed was served once a plan was committed."""
        if answer is None or answer.trigger_to_active_ms is None:
            return
        active_s = self.monotonic_s(answer.at_us) + answer.trigger_to_active_ms / 1e3
        until_s = min(self.monotonic_s(paper.began_us), self.undisturbed_until_s)
        if windows := load.windows(active_s + SETTLED_S, until_s):
            self.serve(AFTER, STAYING, load.rate_per_s, STAYED_S, windows)

    def wall_us(self, monotonic_s: float) -> int:
        return int((monotonic_s - time.monotonic() + time.time()) * 1e6)

    def monotonic_s(self, wall_us: int) -> float:
        return wall_us / 1e6 - time.time() + time.monotonic()

    def end(self, load: StayingLoad, answer: ReplanInfo | None, paper: TrialInfo, client: Client) -> Run:
        """Wait until telemetry has come, then read what the planner stored."""
        device, planner = self.device, self.device.planner
        self.say("comparing results with onnxruntime; draining telemetry")
        compared = [compare(client, model) for model in device.models]
        device.until("telemetry to drain", self.telemetry_balanced)
        since_us = self.wall_us(load.began_s)
        names = {NIGHT, FITTING_PLAN, PAPER, *(one.plan for one in device.replans(since_us) if one.digest)}
        return Run(
            out=device.folder,
            started_at=self.started_at,
            models=device.models,
            deadlines_s=self.deadlines_s,
            weights=WEIGHTS,
            capacity_per_s=self.capacity_per_s,
            served=self.served,
            began_us=since_us,
            offered_per_s=load.rate_per_s,
            series=load.windows(load.began_s, self.ended_s),
            series_s=STAYED_S,
            replans=device.replans(since_us),
            answer=answer,
            paper=paper,
            comparison=planner("plan", "compare", device.device, "--generation", str(paper.generation)),
            plans=[planner("plan", "show", name) for name in sorted(names)],
            submitted=self.application.submitted,
            outcomes=self.application.outcomes,
            telemetry=self.books(),
            queues=device.queues(since_us),
            trace=self.trace_file,
            profiles=self.profiles(),
            compared=compared,
        )

    def books(self) -> dict[str, int]:
        """Telemetry rows produced by the device, stored and dropped."""
        books = self.device.planner("watch", self.device.device, "--count", "1")["telemetry"]
        return {word: int(books[word]) for word in ("produced", "stored", "dropped")}

    def telemetry_balanced(self) -> bool:
        books = self.books()
        return books["produced"] > 0 and books["produced"] == books["stored"] + books["dropped"]

    def pause(self) -> None:
        """A moment, if planner and agent live.

        Raises:
            DemoFailed: one of them ended.
        """
        self.device.processes.require_alive(("planner", "agent"))
        time.sleep(_POLL_S)
