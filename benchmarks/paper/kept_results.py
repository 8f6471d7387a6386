"""Figures that need a GPU or an hour: what results kept in docs/results say of the papers' claims."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.paper.finding import Finding, Inputs, Line, Panel, PaperClaim, Row, near_gain, not_run

GPU: Final = "2026-11-27-gpu.json"
GPG_TRAINING: Final = "2026-11-21-gpg.json"
STARONNX: Final = {
    "GoogLeNet": ("2026-11-30-staronnx.json", "googlenet"),
    "Inception V3": ("2026-11-30-staronnx.json", "inception_v3"),
    "MiniLM": ("2026-11-29-staronnx.json", "minilm"),
    "NudeNet 320n": ("2026-11-29-staronnx.json", "detector"),
}
"""Kept results by model, and what its rows call it."""

STARONNX_FILES: Final = sorted({file for file, _ in STARONNX.values()})
STARONNX_BATCHES: Final = "2026-11-23-staronnx-batches.json"

_SUBJECTS: Final = ("inception_v3", "resnet50", "squeezenet")
_GPU_NOTE: Final = (
    f"Read from docs/results/{GPU} (`python -m benchmarks.gpu`, an NVIDIA H200 at 16 bits): device "
    "microseconds of a task, medians over rounds in turns. *torch* is PyTorch's own CUDA graph, *in "
    "sequence* ours with fused kernels, one after another."
)

_IOS_NOTE: Final = (
    "*ios* is the fastest of IOS's schedules that were measured (with and without merging, for two constants "
    "of contention)."
)


def _figures(inputs: Inputs, file: str) -> Mapping[str, float]:
    figures: Mapping[str, float] = json.loads((inputs.results / file).read_text(encoding="utf-8"))["figures"]
    return figures


def _device_us(inputs: Inputs) -> dict[tuple[str, str], float]:
    """Microseconds by subject and way."""
    prefix = "device_us.fp16."
    found = {}
    for name, value in _figures(inputs, GPU).items():
        if name.startswith(prefix):
            subject, _, way = name.removeprefix(prefix).partition(".")
            found[subject, way] = value
    return found


def _ios(times: Mapping[tuple[str, str], float], subject: str) -> tuple[str, float]:
    """The fastest of IOS's schedules there, by name. The greedy one is what IOS is compared with."""
    own = {
        way: us
        for (of, way), us in times.items()
        if of == subject and way.startswith("ours_ios_") and way != "ours_ios_greedy"
    }
    return min(own.items(), key=lambda item: item[1])


def ios_figure_6_gpu(inputs: Inputs) -> Finding:
    """IOS's schedules beside the sequential and the greedy one on a GPU."""
    times = _device_us(inputs)
    rows: list[Row] = []
    claims = []
    for subject in _SUBJECTS:
        way, best_us = _ios(times, subject)
        in_turn, greedy = times[subject, "ours_sequential"], times[subject, "ours_ios_greedy"]
        rows += [
            {
                "network": subject,
                "schedule": name,
                "us": round(us, 1),
                "throughput over IOS": round(best_us / us, 3),
            }
            for name, us in (("sequential", in_turn), ("greedy", greedy), ("ios", best_us))
        ]
        asked = "2 to 5 %" if subject == "resnet50" else "1.1 to 1.5 times"
        low, high = (1.01, 1.1) if subject == "resnet50" else (1.05, 1.65)
        text = f"{in_turn / best_us:.3f} times ({way.removeprefix('ours_ios_').replace('_', ' ')})"
        claims.append(
            PaperClaim(
                f"{subject}: IOS over the sequential schedule: {asked}",
                text,
                low <= in_turn / best_us <= high,
            )
        )
    panel = _bars("throughput, one task at a time", rows, "network", "throughput over IOS", "schedule")
    return Finding(tuple(claims), tuple(rows), (panel,), f"{_GPU_NOTE} {_IOS_NOTE}")


def ios_figure_7(inputs: Inputs) -> Finding:
    """IOS beside PyTorch's ways."""
    times = _device_us(inputs)
    rows: list[Row] = []
    for subject in _SUBJECTS:
        best_us = _ios(times, subject)[1]
        rows += [
            {
                "network": subject,
                "framework": name,
                "us": round(us, 1),
                "IOS is times as fast": round(us / best_us, 3),
            }
            for name, us in (
                ("torch, eager", times[subject, "torch_eager"]),
                ("torch, CUDA graph", times[subject, "torch_graph"]),
            )
        ]
    least = min(row["IOS is times as fast"] for row in rows)
    claims = (
        PaperClaim(
            "IOS is faster than every framework that was run, on every network",
            f"at least {least:.2f} times",
            least > 1.0,
        ),
        not_run(
            "1.1 to 1.5 times TensorFlow, TASO, TVM-cuDNN and TensorRT",
            "none of them was on that GPU machine",
        ),
    )
    return Finding(claims, tuple(rows), (), f"{_GPU_NOTE} {_IOS_NOTE}")


def ios_figure_8(inputs: Inputs) -> Finding:
    """How much of the device is at work at once."""
    figures = _figures(inputs, GPU)
    before, after = figures["concurrency.inception_v3.torch"], figures["concurrency.inception_v3.ours"]
    claims = (
        PaperClaim(
            "IOS has 58 % more active warps than the sequential schedule",
            f"{after:.2f} kernels at once instead of {before:.2f}, {100 * (after / before - 1):.0f} % more",
            near_gain(after / before, 1.58),
        ),
    )
    note = (
        f"{_GPU_NOTE} Kernels in flight while any is, by intervals of single kernels; active warps were not "
        "counted. The sequential schedule is PyTorch's CUDA graph, which has about twice as many kernels."
    )
    return Finding(claims, (), (), note)


def opara_figure_5(inputs: Inputs) -> Finding:
    """Opara over a sequential CUDA graph and over Nimble."""
    times = _device_us(inputs)
    rows: list[Row] = []
    for subject in _SUBJECTS:
        own = min(times[subject, "opara"], times[subject, "ours_opara"])
        rows.append(
            {
                "network": subject,
                "opara, us": round(own, 1),
                "over a sequential graph": round(times[subject, "ours_sequential"] / own, 3),
                "over torch's graph": round(times[subject, "torch_graph"] / own, 3),
                "over nimble": round(times[subject, "nimble"] / own, 3),
            }
        )
    over = [row["over a sequential graph"] for row in rows]
    nimble = [row["over nimble"] for row in rows]
    claims = (
        PaperClaim(
            "up to 1.68 times the default sequential CUDA graph",
            f"{min(over):.2f} to {max(over):.2f} times, the same kernels",
            min(over) > 1.0 and 1.34 <= max(over) <= 2.1,
        ),
        PaperClaim(
            "up to 1.29 times the state of the art (Nimble)",
            f"{min(nimble):.2f} to {max(nimble):.2f} times",
            min(nimble) >= 1.0 and 1.03 <= max(nimble) <= 1.61,
        ),
        not_run("GoogLeNet, DeepFM, BERT and T5; Rammer and ONNX Runtime", "not run on that machine"),
    )
    panel = _bars("Opara", rows, "network", "over nimble", "over a sequential graph")
    return Finding(claims, tuple(rows), (panel,), _GPU_NOTE)


def _bars(title: str, rows: list[Row], across: str, up: str, line: str) -> Panel:
    """Bars by the value of a column, or of two columns where `line` is one of numbers."""
    if isinstance(rows[0][line], str):
        names = dict.fromkeys(row[line] for row in rows)
        lines = tuple(Line(n, tuple((r[across], r[up]) for r in rows if r[line] == n)) for n in names)
    else:
        lines = tuple(
            Line(column, tuple((row[across], row[column]) for row in rows)) for column in (line, up)
        )
    return Panel(title, "", "times", lines)


def top_figure_24_gpu(inputs: Inputs) -> Finding:
    """More instances on streams of their own, and blocks scheduled together."""
    times = _device_us(inputs)
    rows: list[Row] = []
    for subject in _SUBJECTS:
        for streams in (1, 2, 4, 8, 16):
            way = "torch_graph" if streams == 1 else f"torch_graphs_on_{streams}_streams"
            rows.append({"model": subject, "streams": streams, "tasks/s": round(1e6 / times[subject, way])})
    gains = {
        subject: times[subject, "torch_graph"] / times[subject, "torch_graphs_on_16_streams"]
        for subject in _SUBJECTS
    }
    ours = min(us for (of, way), us in times.items() if of == "mix" and way.startswith("ours_"))
    graphs = min(
        us for (of, way), us in times.items() if of == "mix" and "streams" in way and way.startswith("torch")
    )
    claims = (
        PaperClaim(
            "more instances of one model serve more, without any schedule",
            ", ".join(f"{subject} {gain:.1f} times with 16" for subject, gain in gains.items()),
            min(gains.values()) > 1.05,
        ),
        PaperClaim(
            "scheduled together they serve more still",
            f"the mix: {graphs / ours:.3f} times the most that CUDA graphs on 3 to 12 streams serve",
            graphs / ours > 1.02,
        ),
    )
    lines = tuple(
        Line(subject, tuple((row["streams"], row["tasks/s"]) for row in rows if row["model"] == subject))
        for subject in _SUBJECTS
    )
    return Finding(claims, tuple(rows), (Panel("H200", "CUDA graphs at once", "tasks/s", lines),), _GPU_NOTE)


def top_figure_26_gpu(inputs: Inputs) -> Finding:
    """Images per second over the batch, one CUDA graph after another."""
    times = _device_us(inputs)
    rows: list[Row] = []
    for subject in _SUBJECTS:
        for batch in (1, 8, 16, 64):
            us = times[subject, "torch_graph" if batch == 1 else f"torch_graph_batch_{batch}"]
            rows.append({"model": subject, "batch": batch, "images/s": round(1e6 / us)})
    served = {(row["model"], row["batch"]): row["images/s"] for row in rows}
    last = {subject: served[subject, 64] / served[subject, 16] for subject in _SUBJECTS}
    rises = all(served[s, a] < served[s, b] for s in _SUBJECTS for a, b in ((1, 8), (8, 16), (16, 64)))
    claims = (
        PaperClaim(
            "throughput rises with the batch up to 64",
            ", ".join(f"{s} {served[s, 64] / served[s, 1]:.1f} times" for s in _SUBJECTS),
            rises,
        ),
        PaperClaim(
            "at 64 it is no longer in proportion to the batch",
            ", ".join(f"{s} {one:.2f} times for four times 16" for s, one in last.items()),
            max(last.values()) < 2.0,
        ),
        not_run(
            "and saturates there, with operators in parallel",
            "batches of 1, 8, 16 and 64 were measured and none beyond, one graph at a time",
        ),
    )
    lines = tuple(
        Line(s, tuple((row["batch"], row["images/s"]) for row in rows if row["model"] == s))
        for s in _SUBJECTS
    )
    return Finding(claims, tuple(rows), (Panel("H200", "batch", "images/s", lines),), _GPU_NOTE)


def top_figure_21(inputs: Inputs) -> Finding:
    """How soon GPG's training is done."""
    figures = _figures(inputs, GPG_TRAINING)
    rows: list[Row] = [
        {
            "training": name,
            "steps": int(figures[f"{key}_steps"]),
            "s": round(figures[f"{key}_train_s"]),
            "cost over the reference, median": round(figures[ratio], 4),
        }
        for name, key, ratio in (
            ("imitation, then reinforcement", "gpg", "cost_ratio_median"),
            ("reinforcement alone", "gpg_without_imitation", "gpg_without_imitation_ratio_median"),
            ("the paper's reward", "gpg_paper_reward", "gpg_paper_reward_ratio_median"),
        )
    ]
    alone, untrained = figures["gpg_actor_ratio_median"], figures["uniform_refined_ratio_median"]
    claims = (
        PaperClaim(
            "GPG converges within 6000 steps, in 20 h",
            f"{rows[0]['steps']} steps and {rows[0]['s']} s to {rows[0]['cost over the reference, median']} "
            "of the reference's cost",
            rows[0]["steps"] <= 6000 and rows[0]["cost over the reference, median"] <= 1.05,
        ),
        PaperClaim(
            "with the reward as printed",
            f"{rows[2]['cost over the reference, median']} after {rows[2]['steps']} steps; more were not "
            "tried",
            rows[2]["cost over the reference, median"] <= 1.05,
        ),
        PaperClaim(
            "as printed, too, where the action alone decides",
            f"{alone:.4f} of the reference's cost",
            alone <= 1.05,
        ),
        PaperClaim(
            "it is the training that brings the cost down",
            f"endings drawn at random, local search included, come to {untrained:.4f}",
            untrained > 1.05,
        ),
    )
    note = (
        f"Read from docs/results/{GPG_TRAINING}, held-out networks; look-ahead and local search included but "
        "where the action alone decides. Steps are those of the training as it was set, not the first at "
        "which the cost was that low."
    )
    return Finding(claims, tuple(rows), (), note)


def top_figure_22(inputs: Inputs) -> Finding:
    """MADDPG's training."""
    why = (
        "a training a device takes minutes to hours; the kept ones are of an older engine. "
        "benchmarks.learning trains"
    )
    return Finding((not_run("MADDPG converges within 8000 steps, in a week, on four devices", why),))


# StarONNX


def _lines(inputs: Inputs, file: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((inputs.results / file).read_text(encoding="utf-8"))["rows"]
    return rows


def _line(rows: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((row for row in rows if row["part"] == "lines" and row["line"] == name), None)


def staronnx_figure_2(inputs: Inputs) -> Finding:
    """A batch for each rate."""
    rows = _lines(inputs, STARONNX_BATCHES)
    sizes = (1, 2, 4, 8, 16, 32)
    table = [
        {"model": row["model"], **{f"batch {b}, ms": round(row[f"b{b}_us"] / 1e3, 3) for b in sizes}}
        for row in rows
        if row["part"] == "batches"
    ]
    claims = []
    for row in rows:
        if row["part"] == "lines":
            text = (
                f"within 5 % at {100 * row['measured']:.0f} % of the rates; larger than 1 at "
                f"{100 * row['larger_than_1']:.0f} %"
            )
            claims.append(
                PaperClaim(
                    f"{row['model']}: a batch b* for each rate has the least latency", text, row["met"]
                )
            )
    shrinks = [row[f"batch {sizes[-1]}, ms"] / sizes[-1] < row["batch 1, ms"] for row in table]
    claims.append(
        PaperClaim(
            "larger batches take less time per query",
            f"on {sum(shrinks)} of {len(shrinks)} models",
            all(shrinks),
        )
    )
    lines = tuple(
        Line(str(row["model"]), tuple((b, row[f"batch {b}, ms"] / b) for b in sizes)) for row in table
    )
    note = f"Read from docs/results/{STARONNX_BATCHES}; one core of a processor, not a P100."
    return Finding(tuple(claims), tuple(table), (Panel("time per query", "batch", "ms", lines),), note)


def _of_model(inputs: Inputs, model: str) -> list[dict[str, Any]]:
    """The rows of one model in its file, beside a resource three times slower."""
    file, called = STARONNX[model]
    return [row for row in _lines(inputs, file) if row.get("model") == called and row.get("slow", 3.0) == 3.0]


def staronnx_figure_3(inputs: Inputs) -> Finding:
    """What the integration costs over a loop by hand."""
    claims = []
    for model in STARONNX:
        line = _line(_of_model(inputs, model), "over a loop written by hand")
        if line is not None:
            text = f"{line['measured']:.3f} of the rate of a loop written by hand"
            claims.append(
                PaperClaim(
                    f"{model}: no significant overhead over native ONNX Runtime",
                    text,
                    line["measured"] >= 0.95,
                )
            )
    claims.append(
        not_run("Triton serves 1,550 queries/s where StarONNX serves 1,800", "no Triton and no P100 are here")
    )
    return Finding(tuple(claims), (), (), _STARONNX_NOTE)


_STARONNX_NOTE: Final = (
    f"Read from docs/results ({', '.join(STARONNX_FILES)}): two cores, onnxruntime on each, the second made "
    "three times slower; it stands for the processor beside a GPU."
)


def staronnx_figure_4(inputs: Inputs) -> Finding:
    """What a model in two parts over two resources gains."""
    claims: list[PaperClaim] = []
    table: list[Row] = []
    for model in STARONNX:
        rows = _of_model(inputs, model)
        plans = {row["plan"]: row for row in rows if row["part"] == "rates"}
        table += [
            {
                "model": model,
                "plan": name,
                "queries/s": round(row["per_s"], 1),
                "mean latency, ms": round(row["mean_ms"], 1),
                "p99, ms": round(row["p99_ms"], 1),
            }
            for name, row in plans.items()
            if "per_s" in row
        ]
        whole = plans["fast_only"]["per_s"]
        small = plans["staronnx"].get("per_s")
        said = f"{model}: offloading 5 to 15 % raises the highest rate"
        if small is None:
            claims.append(not_run(said, f"{plans['staronnx']['why_not']}"))
        else:
            claims.append(
                PaperClaim(said, f"{small / whole:.2f} times one resource alone", small > 1.02 * whole)
            )
        balanced = plans["staronnx_balanced"]["per_s"] / whole
        claims.append(
            PaperClaim(f"{model}: and so does a balanced cut", f"{balanced:.2f} times", balanced > 1.02)
        )
        line = _line(rows, "p99 at 0.95, over whole_both")
        if line is not None:
            text = f"p99 {line['measured']:.2f} times that of whole models on both"
            claims.append(
                PaperClaim(
                    f"{model}: latency rises less than with whole models on the slow one",
                    text,
                    line["measured"] < 1.0,
                )
            )
    claims.append(
        not_run(
            "NFNet, EfficientNetV2 and ViT on a P100 and 32 cores",
            f"{', '.join(STARONNX)} were run, on two cores",
        )
    )
    panel = _bars("highest rate", table, "model", "queries/s", "plan")
    return Finding(tuple(claims), tuple(table), (panel,), _STARONNX_NOTE)


def files(*names: str) -> tuple[str, ...]:
    """Paths of kept results from the repository's root."""
    return tuple(str(Path("docs/results") / name) for name in names)
