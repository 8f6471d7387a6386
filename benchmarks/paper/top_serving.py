"""TOP's figures of serving: 2 and 3 (what rivals lack), 14 to 17 (throughput, utilisation, backlog), 23."""

from collections.abc import Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Final

from benchmarks.paper.backlog_series import backlog_series
from benchmarks.paper.contestants import (
    COURSE,
    DEEP,
    FASTER,
    MEMBERS_MAX,
    MIX,
    SERVER,
    SMALL,
    Contestant,
    choices,
    combinations,
    everyone,
    in_one_step,
    overload,
    problem_of,
    rival_plans,
)
from benchmarks.paper.finding import (
    Finding,
    Inputs,
    Line,
    Panel,
    PaperClaim,
    Row,
    lines_of,
    near_gain,
    not_run,
)
from benchmarks.paper.graphs import zoo_graph
from benchmarks.paper.pays_series import agent_series
from stageloom.planner.learning.maddpg.problem import Problem
from stageloom.planner.tournament.evaluator import EvaluationSettings
from stageloom.planner.twin.arrivals import Periodic
from stageloom.planner.twin.device_file import DeviceFile, load_device
from stageloom.planner.twin.reference import Twin
from stageloom.planner.twin.times import StepTimes
from stageloom.planner.twin.window import TargetDevice, Window
from stageloom.shared.bound import bind
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest
from stageloom.shared.plan import Plan
from stageloom.shared.policy.queues import QueueMeasure
from stageloom.shared.search.compose import ModelChoice
from stageloom.shared.search.job import SearchJob, run_search

DEVICES: Final = Path(__file__).parent / "devices"
GEFORCE: Final = str(DEVICES / "rtx_3080.toml")
ALONE: Final = ("sequential", "ios", "opara", "nimble", "instances")
TOGETHER: Final = (*ALONE, "synchronised", "round_robin", "batching")
NAMES: Final = tuple(name for name, _ in MIX)
SINGLE_PER_S: Final = 240.0
TOO_UNEVEN: Final = 2e5
"""TOP's T, in tasks squared."""

IOS_MS: Final = 6.0
"""What a ResNet-50 takes in TOP's figure 2, at 1 task a second."""


def _course(inputs: Inputs) -> EvaluationSettings:
    return SMALL if inputs.small else COURSE


def ios_plan(models: Sequence[ModelChoice], device: DeviceFile, *, lanes: int) -> Plan:
    """Every model by IOS, each instance on a lane of its own: tasks overlap, unplanned."""
    problem = problem_of(device, models, overload(device, models), members_max=1)
    job = SearchJob(models=tuple(models), scheduler="ios", costs=problem.costs, lanes=lanes)
    return in_one_step(run_search(job, lambda: 0.0), problem.graphs)


# Figures 2 and 3


def figure_2(inputs: Inputs) -> Finding:
    """One model under IOS at growing rates: where does latency rise, and how busy is the device then?"""
    device = load_device(GEFORCE)
    models = choices({"resnet50": zoo_graph(inputs, "resnet50")}, DEEP, replicas=4)
    plan = ios_plan(models, device, lanes=4)
    rows: list[Row] = []
    alone_s = 0.0
    for share in (0.006, 0.25, 0.5, 0.75, 0.95, 1.25, 1.5, 2.0, 3.0)[:: 3 if inputs.small else 1]:
        rate = share / alone_s if alone_s else 1.0
        problem = problem_of(device, models, {"resnet50": rate}, members_max=1, compiled=not inputs.small)
        window = windows_of(problem.make_device(1), plan, problem.graphs, 2, 5.0 if share < 0.1 else 1.0)[-1]
        alone_s = alone_s or window.mean_latency_s
        rows.append(
            {
                "rate over 1 / latency alone": share,
                "tasks/s": round(rate, 1),
                "mean latency, ms": round(1e3 * window.mean_latency_s, 4),
                "over alone": round(window.mean_latency_s / alone_s, 3),
                "utilisation": float(f"{window.utilisation:.4g}"),
            }
        )
    below = [row for row in rows if row["rate over 1 / latency alone"] < 1.0]
    first = next((row for row in rows if row["over alone"] > 1.05), None)
    claims = (
        PaperClaim(
            "below 1 / (latency alone) tasks/s latency is the lowest there is",
            f"at most {max(row['over alone'] for row in below):.2f} times that of a task alone",
            max(row["over alone"] for row in below) <= 1.05,
        ),
        PaperClaim(
            "above it latency rises although less than half of the device is used",
            "it does not rise up to 3 / latency"
            if first is None
            else f"it rises from {first['tasks/s']:.0f} tasks/s on, at a utilisation of "
            f"{first['utilisation']:.2f}",
            first is not None and first["rate over 1 / latency alone"] > 1.0 and first["utilisation"] < 0.5,
        ),
    )
    return Finding(claims, tuple(rows), _over_rate(rows), _NOTE_2)


_NOTE_2: Final = (
    "ResNet-50, four instances, each on a lane of its own, blocks scheduled by IOS; an RTX 3080 by its data "
    f"sheet. The twin's task alone takes less than the paper's {IOS_MS:.0f} ms, so rates are given over its "
    "inverse."
)


def _over_rate(rows: Sequence[Row]) -> tuple[Panel, ...]:
    across = "rate over 1 / latency alone"
    return tuple(
        Panel(title, across, up, (Line("", tuple((row[across], row[column]) for row in rows)),))
        for title, column, up in (
            ("latency", "mean latency, ms", "ms"),
            ("utilisation", "utilisation", "share of the device"),
        )
    )


def figure_3(inputs: Inputs) -> Finding:
    """Two models in a joint graph that waits for both: what does a difference of their rates do?"""
    device = load_device(GEFORCE)
    both = choices({name: zoo_graph(inputs, name) for name in ("resnet50", "inception_v3")}, DEEP)
    rows: list[Row] = []
    for left, right in ((60.0, 60.0), (60.0, 120.0), (120.0, 60.0), (120.0, 120.0)):
        rates = {"resnet50": left, "inception_v3": right}
        problem = problem_of(device, both, rates, members_max=2, compiled=not inputs.small)
        contestants = {
            one.name: one for one in everyone(problem, both, ("synchronised", "ios"), _course(inputs))
        }
        for name, one in contestants.items():
            window = windows_of(problem.make_device(1), one.plan, problem.graphs, 4, 1.0)[-1]
            rows.append(
                {
                    "plan": {"synchronised": "POS", "ios": "IOS", "top": "TOP"}[name],
                    "rates": f"{left:.0f} + {right:.0f}",
                    "mean latency, ms": round(1e3 * window.mean_latency_s, 3),
                    "utilisation": float(f"{window.utilisation:.4g}"),
                }
            )
    of_pos = {row["rates"]: row for row in rows if row["plan"] == "POS"}
    even = of_pos["120 + 120"]["mean latency, ms"]
    uneven = [of_pos[key]["mean latency, ms"] for key in ("60 + 120", "120 + 60")]
    of_top = {row["rates"]: row["mean latency, ms"] for row in rows if row["plan"] == "TOP"}
    own, own_even = [of_top["60 + 120"], of_top["120 + 60"]], of_top["120 + 120"]
    claims = (
        PaperClaim(
            "under POS latency is higher at 60 + 120 and 120 + 60 tasks/s than at 120 + 120",
            f"{uneven[0]:.3g} and {uneven[1]:.3g} ms, against {even:.3g} ms",
            min(uneven) > even,
        ),
        PaperClaim(
            "the wait for the other model's task is why: a plan that does not wait has no such rise",
            f"combined without a wait {own[0]:.3g} and {own[1]:.3g} ms, against {own_even:.3g} ms",
            max(own) <= own_even,
        ),
    )
    panels = (
        Panel(
            "latency in the fourth second",
            "tasks/s, ResNet-50 + Inception V3",
            "ms",
            lines_of(rows, "rates", "mean latency, ms", "plan"),
            logarithmic=True,
        ),
        Panel("utilisation", "tasks/s", "share", lines_of(rows, "rates", "utilisation", "plan")),
    )
    note = (
        "An RTX 3080 by its data sheet, the paper's rates. POS is a joint graph per pair of blocks that "
        "waits until each model has a task; its queues grow for as long as rates differ, so latency is that "
        "of the fourth second."
    )
    return Finding(claims, tuple(rows), panels, note)


def windows_of(
    device: TargetDevice, plan: Plan, graphs: Mapping[Digest, Graph], count: int, seconds: float
) -> list[Window]:
    """Consecutive windows from empty queues on."""
    device.deploy(bind(plan, graphs))
    return [device.run(seconds) for _ in range(count)]


# Figures 14 to 16


def figure_14(inputs: Inputs) -> Finding:
    """One model on the server, at the paper's rate and with full queues."""
    rows: list[Row] = []
    for name in NAMES:
        rows += _served(inputs, [name], {name: FASTER * SINGLE_PER_S}, ALONE)
    return _compared(rows, "14 to 180 %", (1.14, 2.8))


def figure_15(inputs: Inputs) -> Finding:
    """Three models on the server, at the paper's rates and with full queues."""
    rates = {name: FASTER * rate for name, rate in MIX}
    rows = _served(inputs, NAMES, rates, TOGETHER)
    saturated = {row["plan"]: row for row in rows if row["load"] == "full queues"}
    gain = saturated["top"]["tasks/s"] / saturated["synchronised"]["tasks/s"]
    at_rates = {row["plan"]: row for row in rows if row["load"] != "full queues"}
    paced = at_rates["top"]["tasks/s"] / at_rates["synchronised"]["tasks/s"]
    best = max((row for name, row in saturated.items() if name != "top"), key=lambda row: row["tasks/s"])
    claims = (
        PaperClaim(
            "TOP serves 63 % more than POS",
            f"{100 * (gain - 1):.0f} % more with full queues",
            near_gain(gain, 1.63),
        ),
        PaperClaim(
            "the same at the rates of table II, doubled: the joint graph waits for the slowest model",
            f"{100 * (paced - 1):.0f} % more",
            paced > 1.14,
        ),
        PaperClaim(
            "TOP serves more than everyone else",
            f"{saturated['top']['tasks/s'] / best['tasks/s']:.2f} times the best rival, {best['plan']}, full "
            f"queues; it uses {saturated['top']['utilisation']:.2f} of the device, the rival "
            f"{best['utilisation']:.2f}",
            saturated["top"]["tasks/s"] > 1.005 * best["tasks/s"],
        ),
    )
    return Finding(claims, tuple(rows), _throughputs(rows), f"{_NOTE_14} {_NOTE_15}")


_NOTE_15: Final = (
    "Instances and batches fill the device, which no plan with one combined block at a time does: its stages "
    "have few small kernels and wait for their longest group. A GPU shows the same: [many CUDA graphs at "
    "once](#top-figure-24-gpu) serve as much as the best plan. The paper has neither rival."
)
_NOTE_14: Final = (
    "An A100 by its data sheet. *sequential* stands for frameworks that run operators in turn (TensorFlow, "
    "PyTorch), *synchronised* for POS. *top* is the best combination of blocks that needs no training, one "
    "combined block at a time as in TOP's engine; *instances* has two of each model, each on a lane of its "
    "own, which TOP does not compare with. At the paper's rates an A100 at its roofline is far from busy, so "
    "the load that tells plans apart is the second one: every model at eight times what operators in turn "
    "can serve."
)


def _served(
    inputs: Inputs, names: Sequence[str], rates_per_s: Mapping[str, float], policies: Sequence[str]
) -> list[Row]:
    """Throughput and utilisation of all contestants at these rates, where there are any, and overloaded."""
    device = load_device(SERVER)
    rows: list[Row] = []
    models = choices({name: zoo_graph(inputs, name) for name in names})
    loads = {"table II, doubled": dict(rates_per_s)} if rates_per_s else {}
    loads["full queues"] = overload(device, models)
    for load, rates in loads.items():
        problem = problem_of(
            device, models, rates, members_max=MEMBERS_MAX[SERVER], compiled=not inputs.small
        )
        for one in everyone(problem, models, policies, _course(inputs)):
            subject = names[0] if len(names) == 1 else "mix"
            rows.append({"models": subject, "load": load, "plan": one.name, **_figures(one)})
    return rows


def _figures(one: Contestant) -> Row:
    return {
        "tasks/s": round(one.score.throughput_per_s, 1),
        "utilisation": float(f"{one.score.utilisation:.4g}"),
        "p99, ms": round(1e3 * one.score.p99_s, 3),
    }


def _compared(rows: list[Row], says: str, span: tuple[float, float]) -> Finding:
    """How much more `top` serves than each rival, over all models, against a range that is claimed."""
    saturated = [row for row in rows if row["load"] == "full queues"]
    gains: dict[str, dict[str, float]] = {}
    for row in saturated:
        own = next(r["tasks/s"] for r in saturated if (r["models"], r["plan"]) == (row["models"], "top"))
        if row["plan"] != "top":
            gains.setdefault(row["plan"], {})[row["models"]] = own / row["tasks/s"]
    claims = [
        PaperClaim(
            f"TOP serves {says} more tasks than others, on each model: than {plan}",
            ", ".join(f"{model} {100 * (gain - 1):.0f} %" for model, gain in own.items()),
            span[0] <= min(own.values()) and max(own.values()) <= 1.25 * span[1],
        )
        for plan, own in gains.items()
    ]
    claims.append(not_run("than TVM and TensorRT", "they bring other kernels, and need a GPU"))
    return Finding(tuple(claims), tuple(rows), _throughputs(rows), _NOTE_14)


def _throughputs(rows: Sequence[Row]) -> tuple[Panel, ...]:
    return tuple(
        Panel(
            load,
            "",
            "tasks/s",
            lines_of([row for row in rows if row["load"] == load], "models", "tasks/s", "plan"),
        )
        for load in dict.fromkeys(row["load"] for row in rows)
    )


def figure_16(inputs: Inputs) -> Finding:
    """Utilisation in both settings, with full queues: the rows of figures 14 and 15, looked at once more."""
    rows: list[Row] = []
    for name in NAMES:
        rows += _served(inputs, [name], {}, ("sequential", "ios"))
    rows += _served(inputs, NAMES, {}, ("sequential", "synchronised"))
    used = {(row["models"], row["plan"]): row["utilisation"] for row in rows}
    single = [used[name, "top"] / used[name, "ios"] for name in NAMES]
    mean = fsum(single) / len(single)
    joint = used["mix", "top"] / used["mix", "synchronised"]
    claims = (
        PaperClaim(
            "with one model TOP uses 26 % more of the device than IOS",
            f"{min(single):.2f} to {max(single):.2f} times as much, {mean:.2f} on average",
            min(single) > 1.0 and near_gain(mean, 1.26),
        ),
        PaperClaim(
            "with three models TOP uses 14 % more of the device than POS",
            f"{joint:.2f} times as much",
            near_gain(joint, 1.14),
        ),
    )
    panels = (
        Panel("full queues", "", "share of the device", lines_of(rows, "models", "utilisation", "plan")),
    )
    note = (
        "The twin's utilisation is the share of the roofline that is used; the paper counts active warps, "
        "which is more than that. Ratios are compared."
    )
    return Finding(claims, tuple(rows), panels, note)


# Figure 17


def figure_17(inputs: Inputs) -> Finding:
    """Variance of the queues over time, of all contestants, and on the real agent where that was kept."""
    seconds = 4 if inputs.small else 30
    last = f"variance after {seconds} s, tasks^2"
    rows: list[Row] = []
    panels: list[Panel] = []
    for name, faster in ((SERVER, FASTER), ("xavier_nx", 1.0), ("nano", 1.0)):
        rates = {model: faster * rate for model, rate in MIX}
        lines = _variances(inputs, load_device(name), rates, seconds)
        title = f"{name}, {' + '.join(f'{rate:g}' for rate in rates.values())} tasks/s"
        panels.append(Panel(title, "s", "variance of the queues, tasks^2 + 1", lines, logarithmic=True))
        rows += [
            {
                "device": name,
                "plan": line.label,
                last: line.points[-1][1] - 1.0,
            }
            for line in lines
        ]
    found = agent_series(inputs.results)
    everybody, seen = backlog_series(inputs.results, last)
    panels += [*everybody.panels, *found.panels]
    ends = {(row["device"], row["plan"]): row[last] for row in rows}
    most, pos = ends[SERVER, "top"], ends[SERVER, "synchronised"]
    claims = (
        PaperClaim(
            f"TOP keeps the variance below T = {TOO_UNEVEN:.0e} tasks^2",
            f"at most {most:.3g} on {SERVER}",
            most < TOO_UNEVEN,
        ),
        PaperClaim(
            "POS lets it grow",
            f"{pos:.3g} after {seconds} s on {SERVER}",
            pos > max(10.0 * most, TOO_UNEVEN / 10),
        ),
        PaperClaim(
            "this is TOP's own: nothing else in the comparison keeps it low",
            ", ".join(f"{plan} {end:.3g}" for (device, plan), end in ends.items() if device == SERVER),
            all(
                end > TOO_UNEVEN for (device, plan), end in ends.items() if device == SERVER and plan != "top"
            ),
        ),
        PaperClaim(
            "it does so where tasks come faster than the device serves them, too",
            ", ".join(f"{name} {ends[name, 'top']:.3g}" for name in MEMBERS_MAX if (name, "top") in ends),
            all(ends[name, "top"] < TOO_UNEVEN for name in MEMBERS_MAX if (name, "top") in ends),
        ),
        everybody.claim,
        found.claim,
    )
    return Finding(claims, (*rows, *seen), tuple(panels), _NOTE_17)


_NOTE_17: Final = (
    "Table II's rates, doubled on the A100 as in the paper, and as they are on two Jetsons, which they "
    "overload. Queues hold whatever comes. Every plan that does not wait for another model's task keeps up "
    "on the A100, so the low variance there is not the launcher's doing. The scale begins at 1 to show 0. "
    "On the agent: means of the last fifth of `benchmarks.backlog`, at shares of what `auto` carries."
)


def _variances(
    inputs: Inputs, device: DeviceFile, rates_per_s: Mapping[str, float], seconds: int
) -> tuple[Line, ...]:
    """A line per contestant, a point per second."""
    models = choices({name: zoo_graph(inputs, name) for name in NAMES}, DEEP)
    problem = problem_of(
        device, models, rates_per_s, members_max=MEMBERS_MAX[device.name], compiled=not inputs.small
    )
    lines = []
    for one in everyone(problem, models, TOGETHER, _course(inputs)):
        windows = windows_of(problem.make_device(1), one.plan, problem.graphs, seconds, 1.0)
        points = [
            (n + 1, 1.0 + window.queue_variance(QueueMeasure.TASKS)) for n, window in enumerate(windows)
        ]
        lines.append(Line(one.name, tuple(points)))
    return tuple(lines)


# Figure 23


def figure_23(inputs: Inputs) -> Finding:
    """One queue whose every task all three models take."""
    device = load_device(SERVER)
    models = choices({name: zoo_graph(inputs, name) for name in NAMES})
    rates = overload(device, models)
    problem = problem_of(device, models, rates, members_max=MEMBERS_MAX[SERVER], compiled=not inputs.small)
    plans = rival_plans(problem, models, ("sequential", "ios", "synchronised", "shared_input"))
    plans["top"] = list(combinations(problem).values())
    seconds = 0.1 if inputs.small else 0.25
    rows: list[Row] = []
    for name, own in plans.items():
        per_s = max(_shared_per_s(problem, device, plan, min(rates.values()), seconds) for plan in own)
        rows.append({"load": "full queues", "plan": name, "shared tasks/s": round(per_s, 1)})
    served = {row["plan"]: row["shared tasks/s"] for row in rows}
    gain = served["top"] / max(served["synchronised"], served["shared_input"])
    claims = (
        PaperClaim(
            "TOP outperforms POS where all models share their input",
            f"{gain:.2f} times as many shared tasks",
            gain > 1.005,
        ),
    )
    panels = (
        Panel(
            "all models take every task",
            "",
            "shared tasks/s",
            lines_of(rows, "plan", "shared tasks/s", "load"),
        ),
    )
    return Finding(claims, tuple(rows), panels, _NOTE_14)


def _shared_per_s(
    problem: Problem, device: DeviceFile, plan: Plan, rate_per_s: float, seconds: float
) -> float:
    """Tasks of all models at once, on the reference twin: the compiled one has no shared tasks."""
    names = tuple(model.name for model in problem.template.models)
    shared = {names: Periodic(rate_per_s=rate_per_s)}
    twin = Twin(StepTimes(device, problem.costs), {}, shared=shared, seed=1)
    window = windows_of(twin, plan, problem.graphs, 2, seconds)[-1]
    return min(model.ended.completed for model in window.models) / window.seconds
