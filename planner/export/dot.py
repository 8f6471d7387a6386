"""A plan as a Graphviz graph: boxes of combined blocks, in them stages and groups, in these operators.

Source of the syntax: "The DOT Language", graphviz.org/doc/info/lang.html.
"""

from collections.abc import Iterator

from stageloom.shared.bound import BoundPlan
from stageloom.shared.plan import Member
from stageloom.shared.schedule import StageSchedule

_INDENT = "  "


def dot_text(bound: BoundPlan, name: str) -> str:
    """The text of a directed graph; an edge is a tensor that one operator makes and another reads."""
    return "\n".join(
        (
            f"digraph {_quoted(name)} {{",
            '  rankdir=TB; compound=true; node [shape=box, fontname="sans-serif"];',
            *(f"{_INDENT}{line}" for index in range(len(bound.combined)) for line in _combined(bound, index)),
            *(f"{_INDENT}{line}" for line in _edges(bound)),
            "}\n",
        )
    )


def _combined(bound: BoundPlan, index: int) -> Iterator[str]:
    """One combined block: its stages with a box per group, or its streams."""
    combined = bound.combined[index]
    members = " + ".join(_member(bound, member) for member in combined.members)
    executor = bound.executor_of(index).name
    yield f"subgraph cluster_{index} {{"
    yield f"  label={_quoted(f'block {index}: {members} on {executor}')};"
    schedule = combined.plan.schedule
    if isinstance(schedule, StageSchedule):
        for number, stage in enumerate(schedule.stages):
            yield f"  subgraph cluster_{index}_{number} {{"
            title = f"stage {number}, merged" if stage.merge else f"stage {number}"
            yield f"    label={_quoted(title)}; style=dashed;"
            for at, group in enumerate(stage.groups):
                yield f"    subgraph cluster_{index}_{number}_{at} {{"
                yield f"      label={_quoted(f'group {at}')}; style=dotted;"
                yield from (f"      {_node(bound, index, op)}" for op in group)
                yield "    }"
            yield "  }"
    else:
        for stream in sorted({launch.stream for launch in schedule.launches}):
            yield f"  subgraph cluster_{index}_{stream} {{"
            yield f"    label={_quoted(f'stream {stream}')}; style=dashed;"
            yield from (
                f"    {_node(bound, index, launch.op)}"
                for launch in schedule.launches
                if launch.stream == stream
            )
            yield "  }"
    yield "}"


def _member(bound: BoundPlan, member: Member) -> str:
    return f"{bound.models[member.model].plan.name}#{member.replica}.{member.block}"


def _node(bound: BoundPlan, index: int, op: int) -> str:
    combined = bound.combined[index]
    at = combined.graph.member_of[op]
    member = combined.members[at]
    own = combined.graph.starts[at] + op - combined.graph.offsets[at]
    operator = bound.models[member.model].graph.operators[own]
    label = _quoted(f"{operator.kind}\n{operator.name}")
    return f"{_id(member.model, member.replica, own)} [label={label}];"


def _edges(bound: BoundPlan) -> Iterator[str]:
    for number, model in enumerate(bound.models):
        maker = {tensor: op for op, one in enumerate(model.graph.operators) for tensor in one.outputs}
        for replica in range(model.plan.replicas):
            for op, operator in enumerate(model.graph.operators):
                for before in dict.fromkeys(maker[tensor] for tensor in operator.inputs if tensor in maker):
                    yield f"{_id(number, replica, before)} -> {_id(number, replica, op)};"


def _id(model: int, replica: int, op: int) -> str:
    return f"m{model}_r{replica}_o{op}"


def _quoted(text: str) -> str:
    """A double-quoted identifier: backslashes, quotes and line ends are escaped, as the language asks."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", " ")
    return f'"{escaped}"'
