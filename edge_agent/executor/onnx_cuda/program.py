"""A recipe with its sessions bound to memory, and how its launches reach a device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from stageloom.edge_agent.executor.onnx_cuda.device import Event, OrtDevice, Stream, streams_of
from stageloom.edge_agent.executor.onnx_cuda.recipe import NO_ITEM, Recipe, Value
from stageloom.edge_agent.executor.onnx_sessions import Session, SessionKey
from stageloom.shared.bound import BoundPlan
from stageloom.shared.graph import Graph
from stageloom.shared.ids import TensorId
from stageloom.shared.importer.values import ELEMENT_TYPES

Marks: TypeAlias = dict[int, tuple[Event, Event]]
"""Per item of the launch list the events at its begin and its end."""

Work: TypeAlias = Callable[[], object]


@dataclass(frozen=True)
class Program:
    """What runs a combined block under one mask on a plan's memory."""

    recipe: Recipe
    work: tuple[Work | None, ...]  # per launch its session's run [num_launches]
    copies: tuple[tuple[int, int, int], ...]  # (target, source, bytes) of what settles in its slot


def bind_recipe(
    recipe: Recipe,
    bound: BoundPlan,
    session_of: Callable[[SessionKey], Session],
    address: Callable[[Recipe, Value], int],
    device: OrtDevice,
    options: Any,
) -> Program:
    """Bind every session to the memory that `address` says; `options` are onnxruntime's RunOptions."""
    members = bound.combined[recipe.combined].members

    def graph_of(value: Value) -> Graph:
        return bound.models[members[value.position].model].graph

    work: list[Work | None] = []
    for launch in recipe.launches:
        if launch.key is None:
            work.append(None)
            continue
        graph = graph_of((*launch.reads, *launch.makes)[0])
        places = {value.tensor: address(recipe, value) for value in (*launch.reads, *launch.makes)}
        work.append(bound_run(session_of(launch.key), graph, launch.key.batch, places, device, options))
    copies = []
    for value in recipe.settles:
        nbytes = recipe.bucket_of[value.position] * graph_of(value).tensors[value.tensor].nbytes
        copies.append((address(recipe, value._replace(in_slot=True)), address(recipe, value), nbytes))
    return Program(recipe, tuple(work), tuple(copies))


def bound_run(
    session: Session,
    graph: Graph,
    batch: int,
    places: Mapping[TensorId, int],
    device: OrtDevice,
    options: Any,
) -> Work:
    """One run of a session that reads and writes the given addresses, as a function without arguments."""
    binding = session.session.io_binding()
    for tensor, name in session.inputs:
        binding.bind_input(
            name, device.kind, device.number, *_form(graph, tensor, batch), buffer_ptr=places[tensor]
        )
    for tensor, name in zip(session.outputs, session.names, strict=True):
        binding.bind_output(
            name, device.kind, device.number, *_form(graph, tensor, batch), buffer_ptr=places[tensor]
        )
    return partial(session.session.run_with_iobinding, binding, options)


def _form(graph: Graph, tensor: TensorId, batch: int) -> tuple[int, tuple[int, ...]]:
    found = graph.tensors[tensor]
    shape = found.shape if batch == 1 else (batch, *found.shape[1:])
    return ELEMENT_TYPES[found.dtype], shape


def issue_program(
    program: Program,
    device: OrtDevice,
    *,
    before_item: Callable[[Stream], None] | None = None,
    marks: Marks | None = None,
) -> None:
    """Issue everything in order: it begins on the recipe's stream and has joined there in the end.

    With `marks` every item's begin and end are recorded there; `before_item` may put something on an item's
    stream first. The host waits for nothing.
    """
    launches = program.recipe.launches
    streams = streams_of(device, program.recipe.streams)
    awaited = {wait for launch in launches for wait in launch.waits}
    ended: dict[int, Event] = {}
    began: dict[int, Event] = {}
    last = _last_launches([launch.item for launch in launches])
    for index, (launch, work) in enumerate(zip(launches, program.work, strict=True)):
        stream = streams[launch.stream]
        for wait in launch.waits:
            device.wait(stream, ended[wait])
        if launch.item != NO_ITEM and launch.item not in began:
            if before_item is not None:
                before_item(stream)
            if marks is not None:
                began[launch.item] = device.record(stream, timed=True)
        if work is not None:
            device.launch(stream, work)
        if marks is not None and last.get(launch.item) == index:
            marks[launch.item] = (began[launch.item], device.record(stream, timed=True))
        if index in awaited:
            ended[index] = device.record(stream)
    for target, source, nbytes in program.copies:
        device.copy(streams[program.recipe.stream], target, source, nbytes)


def _last_launches(items: Sequence[int]) -> dict[int, int]:
    return {item: index for index, item in enumerate(items) if item != NO_ITEM}
