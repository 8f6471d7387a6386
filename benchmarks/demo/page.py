"""The report as one HTML page that needs nothing beside itself."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from benchmarks.demo.answers import answers
from benchmarks.demo.charts import COLORS, distribution_chart, line_chart, scatter_chart, timeline_chart
from benchmarks.demo.parts import figure, ratio_text, table

_STYLE = """
:root { --bg:#fbfaf7; --ink:#22262b; --soft:#6b7280; --rule:#e3e0d8; --card:#ffffff;
  --c0:#2563a8; --c1:#c2571a; --c2:#2f8f5b; --c3:#8a4fa3; --c4:#b3862b; --c5:#4b7f8c; }
@media (prefers-color-scheme: dark) { :root { --bg:#16181b; --ink:#e7e5df; --soft:#9aa0a8; --rule:#2c3036;
  --card:#1d2024; --c0:#6ba6e8; --c1:#ec8f56; --c2:#63c48f; --c3:#c08ad6; --c4:#dcb25c; --c5:#7fb8c6; } }
* { box-sizing:border-box; } body { margin:0; background:var(--bg); color:var(--ink);
  font:15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width:1000px; margin:0 auto; padding:32px 20px 60px; }
h1 { font-size:26px; margin:0 0 4px; } h2 { font-size:18px; margin:34px 0 8px; }
p { margin:6px 0; } .verdict { font-size:16px; margin:8px 0 12px; } .soft { color:var(--soft); }
.cards { display:grid; grid-template-columns:repeat(auto-fit,minmax(270px,1fr)); gap:12px; margin:20px 0; }
.card { background:var(--card); border:1px solid var(--rule); border-radius:8px; padding:12px 14px; }
.card b { display:block; font-size:21px; font-variant-numeric:tabular-nums; }
.figure { background:var(--card); border:1px solid var(--rule); border-radius:8px; padding:10px;
  overflow-x:auto; }
table { border-collapse:collapse; width:100%; background:var(--card); font-variant-numeric:tabular-nums; }
th,td { padding:6px 10px; border-bottom:1px solid var(--rule); text-align:right; white-space:nowrap; }
th:first-child,td:first-child,.text th,.text td { text-align:left; }
th { color:var(--soft); font-weight:600; }
code { font:13px ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap:anywhere; white-space:normal; }
.below { margin-top:10px; }
td code { display:block; max-width:640px; } summary { cursor:pointer; color:var(--soft); }
svg { width:100%; height:auto; display:block; } .grid { stroke:var(--rule); } .mark { stroke:var(--soft);
  stroke-dasharray:4 3; } .tick { fill:var(--soft); font-size:11px; }
.label { fill:var(--soft); font-size:12px; }

.line { fill:none; stroke-width:1.8; } .key { display:inline-block; width:11px; height:11px;
  border-radius:3px; margin:0 5px 0 14px; }
"""


def render(report: Mapping[str, Any]) -> str:
    """The page for a report that follows docs/report.schema.json."""
    names = [model["name"] for model in report["models"]]
    sections = [
        _head(report),
        _cards(report),
        "<h2>The learned policy and the plain replanner</h2>" + answers(report),
        "<h2>Models</h2>" + _models(report["models"]),
        "<h2>Queues over time</h2>" + _legend(names) + figure(_queues(report)),
        "<h2>Queue variance and re-plans</h2>" + figure(_variance(report)) + _replans(report["replans"]),
        "<h2>Latency, submit to result</h2>" + _legend(names) + figure(_latencies(report)),
        "<h2>Steps, predicted and measured</h2>" + _predicted(report),
        "<h2>The schedule as it ran</h2>" + _timeline(report, names),
        "<h2>Plans</h2>" + _generations(report["generations"]),
        "<h2>Stage strings of the last plan</h2>" + _schedules(report["schedules"]),
        _foot(report),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>Stageloom demo</title>'
        f"<style>{_STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _head(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    return (
        "<h1>Stageloom demo</h1>"
        f'<p class="soft">{escape(report["started_at"])} · {escape(machine["processor"])}, '
        f"{machine['cores']} cores · one planner, one agent, {len(report['models'])} client processes, "
        f"{report['duration_s']:.0f} s of load</p>"
    )


def _cards(report: Mapping[str, Any]) -> str:
    tasks, size, telemetry = report["tasks"], report["plan_bytes"], report["telemetry"]
    cards = [
        (f"{tasks['completed']} of {tasks['submitted']}", "tasks completed"),
        (f"{tasks['failed']}", "failed"),
        (f"{1000 * report['first_valid_plan_s']:.0f} ms", "first valid plan"),
        (f"{size['wire']} bytes", f"plan on the wire ({size['text']} as text)"),
        (f"{report['difference']:.1e}", "largest difference to onnxruntime"),
        (f"{telemetry['stored']} of {telemetry['produced']}", "telemetry rows stored"),
    ]
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card"><b>{escape(value)}</b><span class="soft">{escape(text)}</span></div>'
            for value, text in cards
        )
        + "</div>"
    )


def _models(models: Sequence[Mapping[str, Any]]) -> str:
    head = [
        "model",
        "blocks",
        "operators",
        "asked /s",
        "done /s",
        "p50 ms",
        "p99 ms",
        "completed",
        "refused",
        "expired",
    ]
    return table(
        head,
        [
            [
                escape(m["name"]),
                str(m["blocks"]),
                str(m["operators"]),
                f"{m['rate_per_s']:.1f}",
                f"{m['throughput_per_s']:.1f}",
                f"{m['latency_p50_ms']:.1f}",
                f"{m['latency_p99_ms']:.1f}",
                str(m["tasks"]["completed"]),
                str(m["tasks"]["refused"]),
                str(m["tasks"]["expired"]),
            ]
            for m in models
        ],
    )


def _legend(names: Sequence[str]) -> str:
    keys = "".join(
        f'<span class="key" style="background:{COLORS[index % len(COLORS)]}"></span>{escape(name)}'
        for index, name in enumerate(names)
    )
    return f'<p class="soft">{keys}</p>'


def _queues(report: Mapping[str, Any]) -> str:
    queues = report["queues"]
    series = {
        name: list(zip(queues["at_s"], lengths, strict=True)) for name, lengths in queues["tasks"].items()
    }
    marks = [(g["active_at_s"], f"plan {g['generation']}") for g in report["generations"] if g["active_at_s"]]
    return line_chart(
        series, title="Queue lengths", x_label="seconds of the run", y_label="queued tasks", marks=marks
    )


def _variance(report: Mapping[str, Any]) -> str:
    queues = report["queues"]
    marks = []
    for replan in report["replans"]:
        decided_s = replan["at_s"] + replan["trigger_to_decision_ms"] / 1000
        marks += [(replan["at_s"], "trigger"), (decided_s, replan["outcome"].replace("_", " "))]
    return line_chart(
        {"queue variance": list(zip(queues["at_s"], queues["variance_s2"], strict=True))},
        title="Variance of queued work over the queues",
        x_label="seconds of the run",
        y_label="s²",
        marks=marks,
        limit=(queues["threshold_s2"], "threshold"),
    )


def _replans(replans: Sequence[Mapping[str, Any]]) -> str:
    reasons = "".join(
        f'<p class="soft">{r["at_s"]:.1f} s: {escape(r["reason"])}</p>' for r in replans if r["reason"]
    )
    below = table(
        ["at", "asked", "trigger", "value", "threshold", "outcome", "ratio", "decided after", "active after"],
        [
            [
                f"{r['at_s']:.1f} s",
                escape(r["proposer"]),
                escape(r["trigger"].replace("_", " ")),
                f"{r['value']:.3g}",
                f"{r['threshold']:.3g}",
                escape(r["outcome"].replace("_", " ")),
                ratio_text(r),
                f"{r['trigger_to_decision_ms'] / 1000:.1f} s",
                "never" if r["trigger_to_active_ms"] is None else f"{r['trigger_to_active_ms'] / 1000:.1f} s",
            ]
            for r in replans
        ],
        "text",
    )
    return f'<div class="below">{below}</div>{reasons}'


def _predicted(report: Mapping[str, Any]) -> str:
    generation = {g["plan"]: g["generation"] for g in report["generations"]}
    series: dict[str, list[tuple[float, float, str]]] = {}
    for entry in report["predicted"]:
        name = f"plan {generation.get(entry['plan'], entry['plan'][:12])}"
        text = f"{name}, {entry['block']}: {entry['steps']} steps"
        series.setdefault(name, []).append((entry["predicted_ms"], entry["measured_ms"], text))
    chart = scatter_chart(
        series,
        title="Predicted and measured step times",
        x_label="predicted from operators timed alone, ms",
        y_label="measured under load, ms",
    )
    note = (
        '<p class="soft">Each point is one combined block; on the dashed line the prediction was exact. '
        "Above it: steps of other lanes and the clients took their share of the processor.</p>"
    )
    return note + _legend(list(series)) + figure(chart)


def _latencies(report: Mapping[str, Any]) -> str:
    return distribution_chart(
        {m["name"]: m["latencies_ms"] for m in report["models"]}, title="Latency distributions", x_label="ms"
    )


def _timeline(report: Mapping[str, Any], names: Sequence[str]) -> str:
    bars: dict[tuple[str, bool], list[tuple[float, float, int, str]]] = {}
    for item in report["timeline"]:
        text = f"{item['model']} block {item['block']}, operators {item['operators']}"
        bars.setdefault((item["track"], item["planned"]), []).append(
            (item["started_ms"], item["ended_ms"], names.index(item["model"]), text)
        )
    rows = [
        (f"{track}, planned" if planned else track, planned, found)
        for (track, planned), found in sorted(bars.items())
    ]
    note = (
        '<p class="soft">Each bar is one run of operators between two waits; hover for what ran. Pale bars '
        "below are the same steps as planned from operators timed alone. From <code>trace.json</code>, which "
        "opens in Perfetto with everything else that was recorded.</p>"
    )
    return note + _legend(names) + figure(timeline_chart(rows, title="Timeline of streams"))


def _generations(generations: Sequence[Mapping[str, Any]]) -> str:
    return table(
        ["generation", "plan", "scheduler", "decided by", "state", "active"],
        [
            [
                str(g["generation"]),
                f"<code>{escape(g['plan'][:12])}</code>",
                escape(g["scheduler"]),
                escape(g["decided_by"]),
                escape(g["state"]),
                _moment(g["active_at_s"]),
            ]
            for g in generations
        ],
        "text",
    )


def _moment(at_s: float | None) -> str:
    if at_s is None:
        return "never"
    return f"{at_s:.1f} s into the load" if at_s >= 0 else f"{-at_s:.1f} s before the load"


def _schedules(schedules: Sequence[Mapping[str, str]]) -> str:
    rows = [[escape(row["members"]), f"<code>{escape(row['stage_string'])}</code>"] for row in schedules]
    strings = table(["combined block", "stage string"], rows, "text")
    return f"<details><summary>combined blocks: {len(rows)}</summary>{strings}</details>"


def _foot(report: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return (
        f'<p class="soft">Compared {report["samples"]} sampled results with the original models in '
        f"onnxruntime: largest difference {report['difference']:.2e}, while different inputs change the "
        f"outputs by at least {report['sensitivity']:.2e}. Versions: {escape(versions)}.</p>"
    )
