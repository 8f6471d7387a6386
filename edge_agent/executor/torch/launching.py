"""Issues a program's launches on streams, with an event for every wait: eagerly, or inside a capture."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from stageloom.edge_agent.executor.torch.device import Device, Event, Stream
from stageloom.edge_agent.executor.torch.program import Program

Marks: TypeAlias = dict[int, tuple[Event, Event]]
"""Per item the events at its begin and its end."""


def issue_program(
    program: Program,
    device: Device,
    streams: Sequence[Stream],
    *,
    before_group: Callable[[Stream], None] | None = None,
    marks: Marks | None = None,
    captured: bool = False,
) -> None:
    """Issue everything in the recipe's order: it begins on the first stream and has joined there in the end.

    With `marks` every group's begin and end are recorded there; `captured` keeps them events of the graph.
    `before_group` may put something on a group's stream first.
    """
    recipe = program.recipe
    awaited = {wait for item in recipe.items for wait in item.waits}
    ended: dict[int, Event] = {}
    began: dict[int, Event] = {}
    seen: set[int] = set()
    for index, call in recipe.script:
        item = recipe.items[index]
        stream = streams[item.stream]
        ours = index not in program.groups
        if index not in seen:
            seen.add(index)
            for wait in item.waits:
                device.wait(stream, ended[wait])
            if before_group is not None and not ours:
                before_group(stream)
            if marks is not None and not ours:
                began[index] = device.record(stream, timed=True, external=captured)
        if call is not None:
            for launch in program.launches[call]:
                device.launch(stream, launch)
            continue
        if marks is not None and not ours:
            marks[index] = (began[index], device.record(stream, timed=True, external=captured))
        if index in awaited:
            ended[index] = device.record(stream)
