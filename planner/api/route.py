"""One verb of the API: its method, path, request, reply and role; and requests to and from their HTTP form.

A field of the request that the path names travels in the path. Of a GET or DELETE the others are query
parameters (a list is repeated), of an upload likewise, since its body is the file; else they are a JSON
object.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from stageloom.planner.schema.access import Role
from stageloom.planner.schema.base import Request
from stageloom.shared.errors import InputError

Q = TypeVar("Q", bound=Request)
R = TypeVar("R")

_PLACE: Final = re.compile(r"\{(\w+)\}")


class AnswerForm(str, Enum):
    """How a verb is answered."""

    PLAIN = "plain"  # with its reply
    JOB = "job"  # with a job, whose result is the reply
    UPLOAD = "upload"  # with its reply; the request's body is a file
    DOWNLOAD = "download"  # with a file
    EVENTS = "events"  # with server-sent events, each a reply


@dataclass(frozen=True, eq=False)
class Route(Generic[Q, R]):
    """One verb. `name` is its operation id, and what the audit log calls it.

    `creates`: a repeat would make a second one, so a client may send an idempotency key. `secret`: the reply
    is kept nowhere, and the audit log has who got it. `offline`: the store alone can answer, without a
    running planner.
    """

    name: str
    method: str
    path: str
    request: type[Q]
    reply: type[R]
    role: Role
    summary: str
    form: AnswerForm = AnswerForm.PLAIN
    creates: bool = False
    secret: bool = False
    offline: bool = False

    @property
    def path_fields(self) -> tuple[str, ...]:
        """Fields of the request that the path names."""
        return tuple(_PLACE.findall(self.path))

    @property
    def has_body(self) -> bool:
        """Whether fields travel as JSON."""
        return self.method not in ("GET", "DELETE") and self.form is not AnswerForm.UPLOAD

    @property
    def other_fields(self) -> tuple[str, ...]:
        """Fields that the path does not name."""
        return tuple(name for name in self.request.__struct_fields__ if name not in self.path_fields)

    @property
    def changes(self) -> bool:
        """Whether it may change anything."""
        return self.method != "GET"


@cache
def _listed(request: type[Request]) -> frozenset[str]:
    """Fields that hold several values."""
    return frozenset(
        field.encode_name
        for field in msgspec.inspect.type_info(request).fields  # type: ignore[attr-defined]
        if isinstance(field.type, msgspec.inspect.VarTupleType)
    )


def bind(route: Route[Q, Any], path: Mapping[str, str], query: Iterable[tuple[str, str]], body: bytes) -> Q:
    """The request in an HTTP request's parts.

    Raises:
        InputError: a field is missing, unknown, given twice, or out of bounds.
    """
    values: dict[str, Any] = {}
    listed = _listed(route.request)
    pairs = list(query)
    if route.has_body:
        if pairs:
            raise InputError(f"{route.name} takes no query parameters", remedy="send the fields as JSON")
        values = _object(body)
        named = set(route.path_fields) & set(values)
        if named:
            raise InputError(f"{sorted(named)[0]} is named by the path", remedy="leave it out of the body")
    for name, text in pairs:
        if name in route.path_fields or (name in values and name not in listed):
            raise InputError(f"the query gives {name[:64]!r} twice", remedy="give it once")
        if name in listed:
            values.setdefault(name, []).append(text)
        else:
            values[name] = text
    values |= path
    try:
        return msgspec.convert(values, route.request, strict=route.has_body)
    except msgspec.ValidationError as error:
        raise InputError(plainly(str(error)), remedy="see /schema") from error


def _object(body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the body is no JSON: {error}", remedy="send a JSON object") from error
    if not isinstance(parsed, dict):
        raise InputError("the body is no JSON object", remedy="send one")
    return parsed


def plainly(reason: str) -> str:
    """What msgspec says of a value, with the field first: `budget_s: expected a number <= 3600`."""
    text, _, path = reason.replace("`", "").partition(" - at $.")
    if "regex" in text:
        text = "not of the form that the schema asks for"
    return f"{path}: {text[:1].lower()}{text[1:]}" if path else text


def unbind(route: Route[Q, Any], request: Q) -> tuple[str, bytes]:
    """(path with query, JSON body) of a request; fields with their default values are left out."""
    plain: dict[str, Any] = msgspec.to_builtins(request)
    path = _PLACE.sub(lambda match: quote(str(plain[match[1]]), safe=""), route.path)
    rest = {
        name: plain[name] for name in route.other_fields if getattr(request, name) != _default(route, name)
    }
    if route.has_body:
        return path, msgspec.json.encode(rest)
    query = urlencode([(name, text) for name, value in rest.items() for text in _texts(value)])
    return f"{path}?{query}" if query else path, b""


def _texts(value: Any) -> Sequence[str]:
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    if isinstance(value, bool):
        return ["true" if value else "false"]
    return [] if value is None else [str(value)]


@cache
def _defaults(request: type[Request]) -> dict[str, Any]:
    return {field.name: field.default for field in msgspec.structs.fields(request)}


def _default(route: Route[Any, Any], name: str) -> Any:
    request: type[Request] = route.request
    return _defaults(request)[name]
