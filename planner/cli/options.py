"""Options that several commands share."""

import os
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer

from planner.config import default_data_dir
from shared.errors import InputError

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", metavar="DIR", help="The planner's data. Default: $STAGELOOM_HOME, else var/planner."
    ),
]
DatabaseUrl = Annotated[
    str,
    typer.Option(
        "--database-url",
        metavar="URL",
        envvar="STAGELOOM_PLANNER_DATABASE_URL",
        help="Default: SQLite in the data directory.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, one value per line.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", metavar="NAME=DIMS", help="Pin an input, such as images=1x3x640x640. Repeatable."
    ),
]

R = TypeVar("R")


def data_dir_of(given: Path | None) -> Path:
    """The directory that was named, or the default one."""
    return given if given is not None else default_data_dir(os.environ)


def checked(made: R) -> R:
    """A message made from what a person typed, checked against its own bounds.

    Raises:
        InputError: a value is outside its bounds; the message names it.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(made), type(made))
    except msgspec.ValidationError as error:
        raise InputError(
            str(error).replace("`", "'"),
            remedy="names have 1 to 64 letters, digits, dots, dashes or underscores; see --help",
        ) from error


def parse_shapes(texts: list[str] | None) -> dict[str, tuple[int, ...]]:
    """`NAME=AxBxC` to a shape per input.

    Raises:
        InputError: not of that form, or a name given twice.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts or []:
        name, separator, dims = text.rpartition("=")
        parts = dims.lower().split("x") if dims else []
        if not separator or not name or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise InputError(f"--shape {text!r} is not NAME=DIMS", remedy="write it like images=1x3x224x224")
        if name in shapes:
            raise InputError(f"--shape names {name!r} twice", remedy="give each input once")
        shapes[name] = tuple(int(part) for part in parts)
    return shapes
