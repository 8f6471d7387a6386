"""Requests from a file: what `--from FILE` gives, and what the command line says beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from stageloom.planner.api.route import plainly
from stageloom.planner.cli.options import refused
from stageloom.planner.schema.base import Request
from stageloom.shared.errors import InputError

Q = TypeVar("Q", bound=Request)

TEXT_MAX = 1 << 20
"""Bytes of a file that travels inside a request."""

From = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="FILE", help="A TOML file with fields of the request, rare ones included."
    ),
]


def request_from(kind: type[Q], file: Path | None, given: Mapping[str, Any]) -> Q:
    """A request of the fields in `file` and those that are `given` (not None), which go before.

    Raises:
        InputError: the file cannot be read, or a field is unknown, missing, or out of bounds.
    """
    table = {} if file is None else _read(file, kind)
    said = {name: value for name, value in given.items() if value is not None}
    fields = {**table, **msgspec.to_builtins(said)}
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        told = plainly(str(error))
        at = told.partition(":")[0].partition("[")[0].partition(".")[0]
        if file is None or at in said:
            raise refused(error, fields) from error
        raise InputError(f"{file}: {told}", remedy="correct the file") from error


def _read(file: Path, kind: type[Request]) -> dict[str, Any]:
    """The fields of a request in a TOML file.

    Raises:
        InputError: the file cannot be read, or names a field that the request does not have.
    """
    import tomllib

    try:
        with file.open("rb") as opened:
            fields = tomllib.load(opened)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}", remedy="name a readable file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is no TOML: {error}", remedy="correct it") from error
    unknown = sorted(set(fields) - set(kind.__struct_fields__))
    if unknown:
        raise InputError(
            f"{file} has a field {unknown[0][:64]!r} that this command does not know",
            remedy=f"choose among {', '.join(kind.__struct_fields__)}",
        )
    return fields


def read_text(file: Path) -> str:
    """A small file's text.

    Raises:
        InputError: it cannot be read, is too long, or is no text.
    """
    try:
        with file.open("rb") as opened:
            body = opened.read(TEXT_MAX + 1)
        if len(body) > TEXT_MAX:
            raise InputError(f"{file} is longer than {TEXT_MAX} bytes", remedy="shorten it")
        return body.decode()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}", remedy="name a readable file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is no text: {error.reason}", remedy="save it as UTF-8") from error


def twin_text(name: str | None) -> str | None:
    """A device file as requests take it: its name, or its text where a path is given.

    Raises:
        InputError: the file cannot be read.
    """
    return read_text(Path(name)) if name is not None and name.endswith(".toml") else name
