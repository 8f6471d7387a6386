"""Values at the ends of what a message type allows, read from the type itself.

For each field of each struct: the least and the largest number, the shortest and the longest text of several
alphabets, no item and as many as there may be, each member of an enum and of a union. `extremes` varies one
field at a time, at any depth, and leaves the others as `plain` makes them.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import inspect as shapes

_ALPHABETS: Final = (
    "a",
    "0",
    "~",
    "\N{LATIN SMALL LETTER E WITH ACUTE}",
    "\N{RIGHT-TO-LEFT OVERRIDE}",
    "\n",
    "\x01",
    "\U0001f9f5",
)
"""What names, digests and keys take; then what terminals and databases may choke on."""


def plain(kind: shapes.Type) -> Any:
    """A value in the middle of nowhere in particular."""
    match kind:
        case shapes.IntType(ge=low, gt=above):
            return low if low is not None else (above or 0) + 1
        case shapes.FloatType(ge=low, le=high):
            return max(low, 0.0) if low is not None else high
        case shapes.BytesType(min_length=shortest):
            return bytes(shortest or 0)
        case shapes.VarTupleType():
            return ()
        case shapes.DictType():
            return {}
        case shapes.TupleType(item_types=items):
            return tuple(plain(item) for item in items)
        case shapes.BoolType():
            return False
        case shapes.NoneType():
            return None
        case shapes.EnumType(cls=enum):
            return next(iter(enum))
        case shapes.LiteralType(values=values):
            return values[0]
        case shapes.StrType():
            return next(_texts(kind))
        case shapes.UnionType(types=members):
            return None if any(isinstance(one, shapes.NoneType) for one in members) else plain(members[0])
        case shapes.StructType(cls=struct, fields=fields):
            return struct(**{field.name: plain(field.type) for field in fields})
    raise TypeError(kind)


def extremes(kind: shapes.Type) -> Iterator[Any]:
    """Every value of a type that lies at one of its ends."""
    match kind:
        case shapes.IntType(ge=low, gt=above, le=high):
            yield from (low if low is not None else (above or 0) + 1, high)
        case shapes.FloatType(ge=low, gt=above, le=high):
            yield from (low if low is not None else (above or 0.0) + 5e-324, high)
        case shapes.BytesType(min_length=shortest, max_length=longest):
            yield from (bytes(shortest or 0), b"\xff" * (longest or 0))
        case shapes.VarTupleType(item_type=item, max_length=longest):
            yield from ((), (plain(item),) * (longest or 0))
            yield from ((one,) for one in extremes(item))
        case shapes.DictType(key_type=key, value_type=item):
            yield {}
            yield from ({one: plain(item)} for one in extremes(key))
            yield from ({plain(key): one} for one in extremes(item))
        case shapes.TupleType(item_types=items):
            for at, item in enumerate(items):
                for one in extremes(item):
                    yield tuple(one if at == other else plain(kind) for other, kind in enumerate(items))
        case shapes.BoolType():
            yield from (False, True)
        case shapes.NoneType():
            yield None
        case shapes.EnumType(cls=enum):
            yield from enum
        case shapes.LiteralType(values=values):
            yield from values
        case shapes.StrType():
            yield from _texts(kind)
        case shapes.UnionType(types=members):
            for member in members:
                yield from extremes(member)
        case shapes.StructType(fields=fields):
            usual = plain(kind)
            yield usual
            for field in fields:
                for one in extremes(field.type):
                    yield msgspec.structs.replace(usual, **{field.name: one})
        case _:
            raise TypeError(kind)


def _texts(kind: shapes.StrType) -> Iterator[str]:
    """Texts of the shortest and the longest length that the pattern takes."""
    for length in dict.fromkeys((kind.min_length or 0, kind.max_length or 0)):
        for text in dict.fromkeys(letter * length for letter in _ALPHABETS):
            if kind.pattern is None or re.search(kind.pattern, text):
                yield text
