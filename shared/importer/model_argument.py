"""Models as files on a command line: `[NAME[@VERSION]=]FILE[:INPUT=DIMS[,INPUT=DIMS]...]`.

    detector=yolo.onnx:images=1x3x640x640
    detector@2=yolo.onnx:images=1x3x640x640
    bert.onnx:input_ids=1x128,attention_mask=1x128
    'saved model.onnx:serving_default_args_0:0=1x16,temperature=scalar'
    rec=rec.onnx:x=1..6x3x48x16..2400
    'rec=rec.onnx:x=1x3x48x{160,320,640}'

DIMS are whole numbers joined by `x`; `scalar` is a tensor without dimensions. `LOW..HIGH` leaves a dimension
open: tasks may have any size from LOW to HIGH there. `{A,B}` stands for several models, one per size, which
applications know by one name; sets in several places are taken in step. 0 is read, since states may be
empty at first; whether the model takes it is the importer's to say. Empty DIMS are an error and no scalar: a
shell's unset variable leaves them. Without NAME the model is called like its file.

File and input names may hold `:`, `=`, `,` and spaces, so one text can have several readings: with or without
`NAME=` taken off its front, and with or without a list of `INPUT=DIMS` taken off its end at any `:`. The
reading with the longest FILE that exists wins, so a file that exists as written is always found. Where none
exists, `NAME=` and the longest list are taken off, because colons are common in the names of inputs and rare
in those of files. What has a `/` or `:` before its first `=` has no NAME. Within a list, an input's name ends
at the first `=DIMS` that a comma or the end follows; a name that itself holds `=DIMS,` cannot be written.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from stageloom.shared.errors import InputError, ModelError, UnpinnedShape
from stageloom.shared.model_version import ModelReference, model_reference
from stageloom.shared.served_name import shaped_name

Shape = tuple[int, ...]


class Span(NamedTuple):
    """The smallest and the largest size of an open dimension."""

    smallest: int
    largest: int


class Sizes(NamedTuple):
    """The sizes of a dimension in the models that an argument stands for."""

    sizes: tuple[int, ...]


Dims = tuple[int | Span | Sizes, ...]

MODEL_METAVAR: Final = "[NAME=]FILE[:INPUT=DIMS,...]"
_MAX_RANK: Final = 16
_SCALAR: Final = "scalar"
_SIZE: Final = r"(?:0|[1-9][0-9]{0,8})"
_DIM: Final = rf"(?:{_SIZE}(?:\.\.{_SIZE})?|\{{{_SIZE}(?:,{_SIZE})*\}})"
_DIMS: Final = rf"{_SCALAR}|{_DIM}(?:x{_DIM}){{0,{_MAX_RANK - 1}}}"
_PIN: Final = re.compile(rf"(.+?)=({_DIMS})(?:,|\Z)", re.DOTALL)
_INEXPRESSIBLE: Final = re.compile(rf"=(?:{_DIMS}),", re.DOTALL)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIMS_REMEDY: Final = f"write whole numbers like 1x3x640x640, LOW..HIGH, {{A,B}}, or {_SCALAR}"
_SHOWN: Final = 200  # characters of what was typed


@dataclass(frozen=True, slots=True)
class ModelArgument:
    """One ONNX file, what it is called, and the shapes that pin its inputs."""

    path: str
    name: str | None = None  # with its version where one is given; None: the file's
    shapes: tuple[tuple[str, Dims], ...] = ()  # input and dimensions, each input once

    @property
    def largest(self) -> dict[str, Shape]:
        """Per input its shape, open dimensions at their largest."""
        return {name: tuple(max(_sizes(dim)) for dim in dims) for name, dims in self.shapes}

    @property
    def smallest(self) -> dict[str, Shape]:
        """Per input with open dimensions its smallest shape."""
        return {
            name: tuple(min(_sizes(dim)) for dim in dims)
            for name, dims in self.shapes
            if any(isinstance(dim, Span) for dim in dims)
        }

    def pinned(self, purpose: str) -> dict[str, Shape]:
        """Per input its shape, for a purpose that takes one shape.

        Raises:
            InputError: a dimension has several sizes.
        """
        if any(not isinstance(dim, int) for _, dims in self.shapes for dim in dims):
            raise InputError(
                f"{purpose} takes one shape per input, and {format_model(self)!r} has several sizes",
                remedy="write one number for each dimension",
            )
        return self.largest

    def each(self) -> "tuple[ModelArgument, ...]":
        """The models that the argument stands for: itself, or one per size of its sets, in step.

        Raises:
            InputError: sets have different numbers of sizes, or a name becomes too long.
        """
        counts = {len(dim.sizes) for _, dims in self.shapes for dim in dims if isinstance(dim, Sizes)}
        if not counts:
            return (self,)
        if len(counts) > 1:
            raise InputError(
                f"{format_model(self)!r} has sets of {' and '.join(map(str, sorted(counts)))} sizes",
                remedy="sets are taken in step, so give each as many sizes as the others",
            )
        return tuple(self._at(number) for number in range(counts.pop()))

    def _at(self, number: int) -> "ModelArgument":
        shapes = [
            (name, tuple(dim.sizes[number] if isinstance(dim, Sizes) else dim for dim in dims))
            for name, dims in self.shapes
        ]
        pairs = zip(shapes, self.shapes, strict=True)
        own = [format_dims(dims) for (_, dims), (_, given) in pairs if dims != given]
        shaped = ModelReference(shaped_name(self.called, own), self.version)
        one = replace(self, name=str(shaped), shapes=tuple(shapes))
        _ = one.called
        return one

    @property
    def called(self) -> str:
        """The name that applications use.

        Raises:
            InputError: none was given, and the file's cannot be one; or what is behind its @ is no version.
        """
        name = Path(self.path).stem if self.name is None else model_reference(self.name).name
        if not _NAME.fullmatch(name):
            raise InputError(
                f"{name[:_SHOWN]!r} cannot be the name of a model",
                remedy="give one of up to 64 letters, digits, dots, dashes and underscores, as NAME=FILE",
            )
        return name

    @property
    def version(self) -> int | None:
        """The version that was given with the name.

        Raises:
            InputError: what is behind the @ is none.
        """
        return None if self.name is None else model_reference(self.name).version

    def with_shapes(self, shapes: Iterable[tuple[str, Dims]]) -> "ModelArgument":
        """The same with further inputs pinned.

        Raises:
            InputError: an input is pinned already, and the error lists the model's inputs; or a range holds
                no size.
            ModelError: as that, where the file cannot be read.
        """
        argument = replace(self, shapes=(*self.shapes, *shapes))
        seen: set[str] = set()
        for name, dims in argument.shapes:
            if name in seen:
                raise _repeated(self.path, name)
            seen.add(name)
            _require_sizes(name, dims)
        return argument


def _require_sizes(name: str, dims: Dims) -> None:
    for dim in dims:
        if isinstance(dim, Span) and not 1 <= dim.smallest <= dim.largest:
            raise InputError(
                f"{format_dims((dim,))} of input {name[:_SHOWN]!r} is no range of sizes",
                remedy="write the smallest size, at least 1, then the largest, like 16..2400",
            )
        if isinstance(dim, Sizes) and len(set(dim.sizes)) < len(dim.sizes):
            raise InputError(
                f"{format_dims((dim,))} of input {name[:_SHOWN]!r} has a size twice",
                remedy="give each size once",
            )


def parse_model(
    text: str, *, is_file: Callable[[str], bool] = lambda path: Path(path).is_file()
) -> ModelArgument:
    """Read `[NAME=]FILE[:INPUT=DIMS[,INPUT=DIMS]...]` by the rule above.

    Raises:
        InputError: dimensions are none, an input is given twice, or NAME cannot be a name.
        ModelError: an input is given twice, and the file whose inputs would be listed cannot be read.
    """
    readings = list(_readings(text))
    existing = [reading for reading in readings if reading[0].path and _exists(reading[0].path, is_file)]
    if existing:
        argument, pins = max(existing, key=lambda reading: len(reading[0].path))
    else:
        if (broken := _broken_pin(text, is_file)) is not None:
            raise broken
        named = [reading for reading in readings if reading[0].name is not None] or readings
        argument, pins = min(named, key=lambda reading: len(reading[0].path))
    if argument.name is not None:
        _ = argument.called
    return argument.with_shapes(pins)


def format_model(argument: ModelArgument) -> str:
    """The text that `parse_model` reads as this argument where its file exists.

    Raises:
        ValueError: an input's name cannot be written (it is empty or holds `=DIMS,`).
    """
    name = "" if argument.name is None else f"{argument.name}="
    pins = ",".join(f"{_expressible(pinned)}={format_dims(shape)}" for pinned, shape in argument.shapes)
    return f"{name}{argument.path}:{pins}" if pins else f"{name}{argument.path}"


def parse_models(
    texts: Sequence[str], shapes: Sequence[str] = (), option: str = "--model "
) -> tuple[ModelArgument, ...]:
    """Every `--model`, each with a name of its own, and `--shape` where there is one model that it can mean.

    `option`: what errors name models by; empty where they are positional.

    Raises:
        InputError: a text cannot be read, two models have one name, or `--shape` is given for several models.
        ModelError: as `parse_model`.
    """
    arguments = [parse_model(text) for text in texts]
    if shapes and len(arguments) > 1:
        name, shape = parse_shape(shapes[0])
        first = replace(arguments[0], name=arguments[0].called, shapes=((name, shape),))
        raise InputError(
            f"--shape does not say which of {len(arguments)} models it is for",
            remedy=f"write {option}NAME=FILE:INPUT=DIMS, for example {option}{format_model(first)!r}",
        )
    named = [
        replace(argument, name=argument.name or argument.called).with_shapes(map(parse_shape, shapes))
        for argument in arguments
    ]
    seen: set[str] = set()
    for argument in named:
        if argument.called in seen:
            raise InputError(
                f"two models are called {argument.called!r}",
                remedy=f"give each its own name with {option}NAME=FILE",
            )
        seen.add(argument.called)
    return tuple(named)


def named(argument: ModelArgument, name: str | None) -> ModelArgument:
    """The argument under the name of a `--name` beside it.

    Raises:
        InputError: `NAME=` says another one.
    """
    if name is None or name == argument.name:
        return argument
    if argument.name is not None:
        raise InputError(
            f"the model is called {argument.name!r} and, by --name, {name[:_SHOWN]!r}",
            remedy="give it one name",
        )
    return replace(argument, name=name)


def parse_shape(text: str) -> tuple[str, Dims]:
    """One `--shape INPUT=DIMS`; the input's name may hold any character.

    Raises:
        InputError: it is not of that form.
    """
    name, equals, dims = text.rpartition("=")
    if not equals or not name:
        raise InputError(
            f"--shape {text[:_SHOWN]!r} is not INPUT=DIMS", remedy="write it like --shape images=1x3x640x640"
        )
    if not re.fullmatch(_DIMS, dims):
        raise InputError(f"{dims[:_SHOWN]!r} in --shape {text[:_SHOWN]!r} is no shape", remedy=_DIMS_REMEDY)
    return name, _shape(dims)


def format_dims(dims: Dims) -> str:
    """`1x3x640x640`, `1..6x3x48x16..2400`, `1x3x48x{160,320}` or `scalar`."""
    return "x".join(map(_dim_text, dims)) or _SCALAR


def _dim_text(dim: int | Span | Sizes) -> str:
    if isinstance(dim, Sizes):
        return f"{{{','.join(map(str, dim.sizes))}}}"
    return f"{dim.smallest}..{dim.largest}" if isinstance(dim, Span) else str(dim)


def dims_between(smallest: Shape, largest: Shape) -> Dims:
    """The dimensions of shapes between these two, the ends included."""
    return tuple(
        high if low == high else Span(low, high) for low, high in zip(smallest, largest, strict=True)
    )


def unpinned_in_option(error: UnpinnedShape, argument: ModelArgument, option: str = "--model ") -> ModelError:
    """The error of an input left open, for a command that takes models by `option`, or by position."""
    pinned = {open_input.name for open_input in error.inputs}
    shapes = [(name, shape) for name, shape in argument.shapes if name not in pinned]
    try:
        kept = format_model(replace(argument, shapes=tuple(shapes)))
    except ValueError:
        return error  # names that only --shape can write
    example = ",".join(f"{open_input.name}={open_input.example}" for open_input in error.inputs)
    return ModelError(
        error.cause,
        remedy=f"pin them with {option}NAME=FILE:INPUT=DIMS, for example "
        f"{option}{kept + (',' if shapes else ':') + example!r}",
    )


def _readings(text: str) -> Iterator[tuple[ModelArgument, tuple[tuple[str, Dims], ...]]]:
    """Every way to read the text, as file and name and the list after them; the shortest FILE last."""
    for name, body in _bodies(text):
        yield ModelArgument(body, name), ()
        for at in _colons(body):
            if (pins := _pins(body[at + 1 :])) is not None:
                yield ModelArgument(body[:at], name), pins


def _bodies(text: str) -> Iterator[tuple[str | None, str]]:
    yield None, text
    name, equals, rest = text.partition("=")
    if equals and not {"/", ":"} & set(name):
        yield name, rest


def _colons(text: str) -> list[int]:
    """Places of the colons, the last one first."""
    return [at for at in range(len(text) - 1, 0, -1) if text[at] == ":"]


def _pins(text: str) -> tuple[tuple[str, Dims], ...] | None:
    """A list of `INPUT=DIMS`, or None where it is none."""
    pins: list[tuple[str, Dims]] = []
    at = 0
    while match := _PIN.match(text, at):
        pins.append((match[1], _shape(match[2])))
        at = match.end()
    return tuple(pins) if pins and at == len(text) and not text.endswith(",") else None


def _broken_pin(text: str, is_file: Callable[[str], bool]) -> InputError | None:
    """What is wrong with the list behind a FILE; None where no list was meant."""
    tails = [(body[:at], body[at + 1 :]) for _, body in _bodies(text) for at in _colons(body)]
    if not tails or any(_pins(tail) is not None for _, tail in tails):
        return None
    existing = [(file, tail) for file, tail in tails if _exists(file, is_file)]
    file, tail = (
        max(existing, key=lambda split: len(split[0]))
        if existing
        else min(tails, key=lambda split: len(split[0]))
    )
    if not existing and "=" not in tail:
        return None  # no list: a file that is not there, with a colon in its name
    at = 0
    while match := _PIN.match(tail, at):
        at = match.end()
    name, equals, dims = tail[at:].partition("=")
    where = f"in {text[:_SHOWN]!r}"
    if not equals or not name:
        return InputError(
            f"{tail[at:][:_SHOWN]!r} behind {file[:_SHOWN]} {where} is not INPUT=DIMS",
            remedy="write it like FILE:images=1x3x640x640,sizes=1x2",
        )
    return InputError(
        f"{dims.partition(',')[0][:_SHOWN]!r} is no shape of input {name[:_SHOWN]!r} {where}",
        remedy=_DIMS_REMEDY,
    )


def _exists(path: str, is_file: Callable[[str], bool]) -> bool:
    try:
        return is_file(path)
    except (OSError, ValueError):  # a name that is too long, or holds a zero byte
        return False


def _shape(dims: str) -> Dims:
    return () if dims == _SCALAR else tuple(map(_dim, dims.split("x")))


def _dim(text: str) -> int | Span | Sizes:
    if text.startswith("{"):
        return Sizes(tuple(map(int, text[1:-1].split(","))))
    low, spanned, high = text.partition("..")
    return Span(int(low), int(high)) if spanned and low != high else int(low)


def _sizes(dim: int | Span | Sizes) -> tuple[int, ...]:
    if isinstance(dim, Sizes):
        return dim.sizes
    return dim if isinstance(dim, Span) else (dim,)


def _expressible(name: str) -> str:
    if not name or _INEXPRESSIBLE.search(name):
        raise ValueError(f"the input {name!r} cannot be written as INPUT=DIMS")
    return name


def _repeated(path: str, name: str) -> InputError:
    from stageloom.shared.importer.api import list_inputs

    return InputError(
        f"input {name[:_SHOWN]!r} of {path} is given twice",
        remedy=f"give each input once; the model's are {list_inputs(Path(path))}",
    )
