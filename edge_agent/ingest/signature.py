"""Do the tasks of a layout fit the models it names? Pure checks that name what was expected."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Final

from stageloom.edge_agent.ingest.messages import (
    ALIGNMENT_BYTES,
    MAX_TENSORS,
    DeclareLayout,
    InputRef,
    Models,
    ModelSignature,
    OutputRef,
    TensorInfo,
    decode_to_application,
    encode,
)
from stageloom.shared.errors import DecodeError, TaskRefused
from stageloom.shared.graph import ITEM_BYTES, Graph
from stageloom.shared.ids import TensorId
from stageloom.shared.served_name import served_name
from stageloom.shared.shape_ranges import shape_text

LAYOUT_CODES: Final = frozenset(
    {"unknown_model", "wrong_input", "wrong_dtype", "wrong_shape", "signature_changed", "bad_reference"}
)
"""Codes of refusals that say something about the layout, so that every task in it would be refused."""


def model_info(name: str, graph: Graph, version: int = 1) -> ModelSignature:
    """What a model takes and gives, from its graph.

    Raises:
        TaskRefused: applications cannot be told it: it has more inputs or outputs than one packet names, or
            longer names or shapes.
    """
    if max(len(graph.inputs), len(graph.outputs)) > MAX_TENSORS:
        raise TaskRefused("too_many_tensors", f"model {name!r} has more than {MAX_TENSORS} inputs or outputs")

    def describe(ids: Sequence[TensorId]) -> tuple[TensorInfo, ...]:
        smallest = {t: graph.smallest(t) if graph.ranges is not None else None for t in ids}
        return tuple(
            TensorInfo(graph.tensors[t].name, graph.tensors[t].dtype, graph.tensors[t].shape, low)
            for t, low in smallest.items()
        )

    inputs, outputs = describe(graph.inputs), describe(graph.outputs)
    info = ModelSignature(name, inputs, outputs, graph.batchable, version)
    try:  # else every application would end its connection over what it cannot read
        decode_to_application(encode(Models(0, (info,))))
    except DecodeError as error:
        raise TaskRefused(
            "too_many_tensors",
            f"the signature of model {name!r} fits no packet: {error.cause}",
            remedy="export it with shorter names, or with fewer inputs and outputs",
        ) from error
    return info


def by_served_name(infos: Iterable[ModelSignature]) -> dict[str, tuple[ModelSignature, ...]]:
    """Models by what applications call them: several where each is pinned to other shapes.

    A model that differs in more than shapes from the first of the name only looks like one of them, and is
    left out.
    """
    found: dict[str, tuple[ModelSignature, ...]] = {}
    for info in infos:
        name = served_name(info.name)
        before = found.get(name, ())
        if not before or _form(before[0]) == _form(info):
            found[name] = (*before, info)
    return found


def by_any_name(infos: Iterable[ModelSignature]) -> dict[str, tuple[ModelSignature, ...]]:
    """Models by the plan's names, and by those that several of them share; a plan's name means its model."""
    known = tuple(infos)
    return by_served_name(known) | {info.name: (info,) for info in known}


def _form(info: ModelSignature) -> tuple[list[tuple[str, str, int]], ...]:
    """Names, types and ranks of inputs and outputs: what models pinned to several shapes have in common."""
    return tuple([(t.name, t.dtype, len(t.shape)) for t in side] for side in (info.inputs, info.outputs))


def choose_shapes(
    served: str, models: Sequence[ModelSignature], shapes: Mapping[str, tuple[int, ...]]
) -> ModelSignature:
    """The one of the models that takes these shapes; an only one whatever they are: it says what is wrong.

    Raises:
        TaskRefused: none of several does (code `wrong_shape`).
    """
    if len(models) == 1:
        return models[0]
    for info in models:
        if all(tensor.takes(shapes.get(tensor.name, ())) for tensor in info.inputs):
            return info
    given = ", ".join(f"{name[:64]} {shape_text(shape)}" for name, shape in list(shapes.items())[:8])
    raise TaskRefused(
        "wrong_shape",
        f"{served!r} does not take {given or 'nothing'}",
        remedy=" or ".join(map(_takes, models[:8])),
    )


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    return ITEM_BYTES[dtype] * prod(shape)


def check_layout(
    layout: DeclareLayout, models: Mapping[str, ModelSignature], arenas: Mapping[int, int]
) -> None:
    """Check models, inputs, outputs and their places; `arenas` maps an arena to its bytes.

    Raises:
        TaskRefused: with the code `unknown_model`, `wrong_input`, `wrong_dtype`, `wrong_shape`,
            `signature_changed` (the application's view of the outputs is out of date) or `bad_reference`.
    """
    wanted = [_known(name, models) for name in layout.models]
    if len(set(layout.models)) != len(layout.models):
        raise TaskRefused("wrong_input", "a shared task names one model twice", remedy="submit two tasks")
    for info in wanted:
        _check_inputs(info, layout.inputs)
    _check_outputs(wanted, layout.outputs)
    for ref in layout.inputs:
        _check_place(ref, tensor_bytes(ref.dtype, ref.shape), arenas)
    for out in layout.outputs:
        _check_place(out, out.nbytes, arenas)


def _known(name: str, models: Mapping[str, ModelSignature]) -> ModelSignature:
    info = models.get(name)
    if info is None:
        have = ", ".join(sorted(models)[:8]) or "none"
        raise TaskRefused(
            "unknown_model", f"no model {name[:64]!r} runs here", remedy=f"models of the active plan: {have}"
        )
    return info


def _check_inputs(info: ModelSignature, inputs: Sequence[InputRef]) -> None:
    given = {ref.tensor: ref for ref in inputs}
    if problem := _names_problem(info, inputs):
        raise TaskRefused("wrong_input", f"{info.name!r} {problem}", remedy=_takes(info))
    for tensor in info.inputs:
        ref = given[tensor.name]
        if ref.dtype != tensor.dtype:
            raise TaskRefused(
                "wrong_dtype",
                f"input {tensor.name!r} of {info.name!r} is {tensor.dtype}, not {ref.dtype}",
                remedy=_takes(info),
            )
        if not tensor.takes(ref.shape):
            raise TaskRefused(
                "wrong_shape",
                f"input {tensor.name!r} of {info.name!r} is {tensor.shapes_text}, "
                f"not {shape_text(ref.shape)}",
                remedy=_takes(info),
            )


def _names_problem(info: ModelSignature, inputs: Sequence[InputRef]) -> str:
    """What is wrong with the inputs' names, behind the model's; empty if nothing is."""
    given, wanted = {ref.tensor for ref in inputs}, {tensor.name for tensor in info.inputs}
    said = []
    if unknown := sorted(given - wanted):
        said.append(f"has no input {_names(unknown)}")
    if missing := sorted(wanted - given):
        said.append(f"was not given {_names(missing)}")
    if len(given) != len(inputs):
        said.append("was given one input twice")
    return " and ".join(said)


def _names(tensors: Sequence[str]) -> str:
    return ", ".join(repr(name[:64]) for name in tensors[:8])


def _takes(info: ModelSignature) -> str:
    return "it takes " + ", ".join(f"{t.name}: {t.dtype} {t.shapes_text}" for t in info.inputs[:8])


def _check_outputs(wanted: Sequence[ModelSignature], outputs: Sequence[OutputRef]) -> None:
    expected = {(index, tensor.name): tensor for index, info in enumerate(wanted) for tensor in info.outputs}
    named = {(ref.model, ref.tensor): ref for ref in outputs}
    if (
        named.keys() != expected.keys()
        or len(outputs) != len(expected)
        or not all(_is_named(tensor, named[key]) for key, tensor in expected.items())
    ):
        raise TaskRefused(
            "signature_changed",
            f"the outputs of {', '.join(info.name for info in wanted)} are not those named",
            remedy="ask for the models again and resubmit",
        )


def _is_named(tensor: TensorInfo, ref: OutputRef) -> bool:
    """Whether the application takes an output for what it is; the size alone does not tell 1x4 from 4x1."""
    if ref.nbytes != tensor_bytes(tensor.dtype, tensor.shape):
        return False
    return ref.shape is None or (ref.dtype, ref.shape) == (tensor.dtype, tensor.shape)


def _check_place(ref: InputRef | OutputRef, nbytes: int, arenas: Mapping[int, int]) -> None:
    size = arenas.get(ref.arena)
    if size is None or ref.offset_bytes + nbytes > size or ref.offset_bytes % ALIGNMENT_BYTES:
        raise TaskRefused(
            "bad_reference", f"tensor {ref.tensor[:64]!r} lies outside arena {ref.arena} or is not aligned"
        )
