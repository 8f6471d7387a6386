"""A timeline in the Chrome trace event format, for chrome://tracing and Perfetto; see docs/tracing.md.

One process holds what was measured, one what was planned; in both every lane has a track for its steps, and
every stream of a lane one for its groups. Times are microseconds since the recording began.
"""

from collections.abc import Iterable
from typing import Any, Final

from stageloom.edge_agent.trace.timeline import Run, Timeline

MEASURED: Final = 1
PLANNED: Final = 2
QUEUES: Final = 3
"""Process numbers."""

_STREAMS_PER_LANE: Final = 1000
"""Thread numbers of a lane: its steps first, then its streams."""

Event = dict[str, Any]


def chrome_trace(found: Timeline, *, costs: str) -> dict[str, Any]:
    """The JSON object format. `costs` says where the planned times come from."""
    measured, planned = _Process(MEASURED, "measured", found), _Process(PLANNED, f"planned ({costs})", found)
    recorded = found.recorded
    for step in found.steps:
        entry = step.entry
        measured.span(
            *(entry.lane, None, " + ".join(step.members), entry.began_s, entry.ended_s),
            {
                "step": entry.step,
                "combined_block": entry.combined,
                "mask": entry.mask,
                "instances": list(entry.instances),
                "fallback": entry.fallback,
                "plan": step.plan[:12],
                "executor": step.executor,
                "lane": entry.lane,
                "resource": step.resource,
                "cores": list(step.cores),
            },
        )
    for process, runs in ((measured, found.runs), (planned, found.planned)):
        for run in runs:
            process.span(run.lane, run.stream, _name(run), run.began_s, run.ended_s, _arguments(run))
    events = [*measured.events(), *planned.events(), *_queues(found), *_tasks(found)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "seconds": round(recorded.ended_s - recorded.began_s, 6),
            "steps": len(found.steps),
            "unnamed": found.unnamed,
            "groups": len(found.runs),
            "tasks": len(found.tasks),
            "dropped": recorded.dropped,
            "recorder_ms": round(1e3 * recorded.own_s, 3),
            "costs": costs,
        },
    }


def _name(run: Run) -> str:
    return f"{run.model} block {run.block}: {run.text}"


def _arguments(run: Run) -> dict[str, Any]:
    return {
        "step": run.step,
        "model": run.model,
        "replica": run.replica,
        "block": run.block,
        "stage": run.stage,
        "operators": run.text,
    }


class _Process:
    """The tracks of one process. No spans of a track overlap: one that would goes to a track beside it."""

    def __init__(self, pid: int, name: str, found: Timeline) -> None:
        self._pid = pid
        self._zero_s = found.recorded.began_s
        self._spans: dict[tuple[int, int], list[Event]] = {}  # by lane, and stream from 1 on; 0: steps
        self._name = name
        self._places = _places(found)

    def span(
        self,
        lane: int,
        stream: int | None,
        name: str,
        began_s: float,
        ended_s: float,
        arguments: dict[str, Any],
    ) -> None:
        begin_us, end_us = _us(began_s - self._zero_s), _us(ended_s - self._zero_s)
        event = {
            "name": name,
            "cat": "step" if stream is None else "group",
            "ph": "X",
            "ts": begin_us,
            "dur": round(end_us - begin_us, 3),
            "pid": self._pid,
            "args": arguments,
        }
        self._spans.setdefault((lane, 0 if stream is None else stream + 1), []).append(event)

    def events(self) -> Iterable[Event]:
        """Metadata first, then each track in order of time."""
        yield _metadata("process_name", self._pid, 0, name=self._name)
        yield _metadata("process_sort_index", self._pid, 0, sort_index=self._pid)
        for (lane, track), spans in sorted(self._spans.items()):
            title = f"lane {lane} steps" if not track else f"lane {lane} stream {track - 1}"
            title += self._places.get(lane, "")
            tracks = _beside(sorted(spans, key=lambda event: (event["ts"], -event["dur"])))
            for number, one in enumerate(tracks):
                # Tracks beside come after all others; there are none unless steps of a lane overlap.
                tid = (lane + 1 + number * 64) * _STREAMS_PER_LANE + track
                suffix = f" ({number + 1})" if number else ""
                yield _metadata("thread_name", self._pid, tid, name=title + suffix)
                yield _metadata("thread_sort_index", self._pid, tid, sort_index=tid)
                for event in one:
                    event["tid"] = tid
                    yield event


def _places(found: Timeline) -> dict[int, str]:
    """Per lane its resource and cores, for the names of its tracks; of the plan that ran there first."""
    places: dict[int, str] = {}
    for step in found.steps:
        cores = ", ".join(map(str, step.cores)) or "any"
        place = "" if step.resource is None else f" (resource {step.resource}, cores {cores})"
        places.setdefault(step.entry.lane, place)
    return places


def _beside(spans: Iterable[Event]) -> list[list[Event]]:
    """Spans in order of begin, on as few tracks as keep them apart."""
    tracks: list[list[Event]] = []
    for span in spans:
        for track in tracks:
            if track[-1]["ts"] + track[-1]["dur"] <= span["ts"] + 1e-6:
                track.append(span)
                break
        else:
            tracks.append([span])
    return tracks


def _queues(found: Timeline) -> Iterable[Event]:
    """A counter per model, launches as instants beside it, and swaps across everything."""
    yield _metadata("process_name", QUEUES, 0, name="queues, launches and swaps")
    yield _metadata("process_sort_index", QUEUES, 0, sort_index=0)
    models = sorted({entry.model for entry in found.queues})
    for number, model in enumerate(models, 1):
        yield _metadata("thread_name", QUEUES, number, name=f"launches of {model}")
    for entry in found.queues:
        at = {"ts": _us(max(entry.at_s - found.recorded.began_s, 0.0)), "pid": QUEUES}
        counted = {"name": f"queue {entry.model}", "cat": "queue", "ph": "C", "tid": 0}
        yield {**counted, **at, "args": {"tasks": entry.queued}}
        if entry.launched:
            tid = models.index(entry.model) + 1
            launch = {"name": f"launch {entry.model}", "cat": "launch", "ph": "i", "s": "t", "tid": tid}
            yield {**launch, **at, "args": {"tasks": entry.launched}}
    for at_s, plan in found.swaps:
        at_us = _us(max(at_s - found.recorded.began_s, 0.0))
        swap = {"name": f"plan {plan[:12] or 'none'}", "cat": "swap", "ph": "i", "s": "g"}
        yield {**swap, "ts": at_us, "pid": QUEUES, "tid": 0, "args": {"plan": plan}}


def _tasks(found: Timeline) -> Iterable[Event]:
    """Each task from its queue to its end, as a pair of asynchronous events."""
    for task in found.tasks:
        if task.queued_s < found.recorded.began_s:
            continue  # it came before the recording: its begin is not part of it
        name = "+".join(task.models)
        common = {"name": name, "cat": "task", "id": str(task.task), "pid": QUEUES, "tid": 0}
        began_s = task.ended_s if task.began_s is None else task.began_s
        queued_ms = round(1e3 * (began_s - task.queued_s), 3)
        begin = {"ph": "b", "ts": _us(task.queued_s - found.recorded.began_s), "args": {"task": task.task}}
        end = {"outcome": task.outcome, "queued_ms": queued_ms}
        yield {**common, **begin}
        yield {**common, "ph": "e", "ts": _us(task.ended_s - found.recorded.began_s), "args": end}


def _metadata(event: str, pid: int, tid: int, **arguments: Any) -> Event:
    return {"name": event, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": arguments}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
