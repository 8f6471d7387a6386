"""A strict reader of the Chrome trace event format, written from the format's description.

The description is "Trace Event Format" (the JSON object form). Checked for the phases that we write: complete
events (X), metadata (M), counters (C), instants (i), asynchronous begin and end (b, e).
"""

import json
from collections import defaultdict
from math import isfinite
from typing import Any

_METADATA = {
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
_OPTIONAL = {"args", "cname", "tts", "bp"}
_FIELDS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid"},
    "M": {"name", "ph", "ts", "pid", "tid", "args"},
    "C": {"name", "cat", "ph", "ts", "pid", "tid", "args"},
    "i": {"name", "cat", "ph", "ts", "pid", "tid", "s"},
    "b": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "e": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
}
_ROUNDING_US = 0.0015


def problems(trace: Any) -> list[str]:
    """What is wrong with a trace; empty if a viewer can rely on it."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no JSON object with a list of traceEvents"]
    found = []
    try:
        json.dumps(trace, allow_nan=False)
    except ValueError as error:
        found.append(f"not JSON: {error}")
    if trace.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        found.append(f"displayTimeUnit is {trace['displayTimeUnit']!r}")
    events = trace["traceEvents"]
    for number, event in enumerate(events):
        found += [f"event {number}: {problem}" for problem in _event(event)]
    return found or [*_tracks(events), *_pairs(events)]


def _event(event: Any) -> list[str]:
    if not isinstance(event, dict):
        return ["not an object"]
    phase = event.get("ph")
    if phase not in _FIELDS:
        return [f"unknown phase {phase!r}"]
    found = []
    if missing := _FIELDS[phase] - event.keys():
        found.append(f"{phase} lacks {sorted(missing)}")
    if extra := event.keys() - _FIELDS[phase] - _OPTIONAL:
        found.append(f"{phase} has {sorted(extra)}")
    if found:
        return found
    if not isinstance(event["name"], str) or not event["name"]:
        found.append("an event without a name")
    found += [f"{field} is no integer" for field in ("pid", "tid") if type(event[field]) is not int]
    found += [
        f"{field} is {event[field]!r}"
        for field in ("ts", "dur")
        if field in event and not _is_time(event[field])
    ]
    if not isinstance(event.get("args", {}), dict):
        found.append("args are no object")
    elif phase == "M":
        key = _METADATA.get(event["name"])
        if key is None or key not in event["args"]:
            found.append(f"metadata {event['name']} with {sorted(event['args'])}")
        elif isinstance(event["args"][key], int) is not (key == "sort_index"):
            found.append(f"metadata {event['name']} is {event['args'][key]!r}")
    elif phase == "C" and not (event["args"] and all(_is_number(v) for v in event["args"].values())):
        found.append("a counter without numbers")
    elif phase == "i" and event["s"] not in ("g", "p", "t"):
        found.append(f"the scope of an instant is {event['s']!r}")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _is_time(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _tracks(events: list[dict[str, Any]]) -> list[str]:
    """Complete events of one thread nest or lie apart; every thread and process that has some is named."""
    found = []
    named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for (pid, tid), spans in tracks.items():
        if ("thread_name", pid, tid) not in named:
            found.append(f"thread {tid} of process {pid} has no name")
        if ("process_name", pid, 0) not in named:
            found.append(f"process {pid} has no name")
        open_until: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin + _ROUNDING_US:
                open_until.pop()
            if open_until and end > open_until[-1] + _ROUNDING_US:
                found.append(f"at {begin} us of thread {tid} a span overlaps another without lying in it")
            open_until.append(end)
    return found


def _pairs(events: list[dict[str, Any]]) -> list[str]:
    """Every asynchronous begin has one end, not before it."""
    found = []
    begun: dict[tuple[str, str], float] = {}
    for event in sorted(events, key=lambda e: (e["ts"], e["ph"] != "b")):
        if event["ph"] not in ("b", "e"):
            continue
        key = event["cat"], str(event["id"])
        if event["ph"] == "b":
            if key in begun:
                found.append(f"{key} begins twice")
            begun[key] = event["ts"]
        elif begun.pop(key, None) is None:
            found.append(f"{key} ends without a begin")
    return found + [f"{key} never ends" for key in begun]
