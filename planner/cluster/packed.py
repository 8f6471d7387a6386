"""A value that many tasks of a pool have in common: pickled once, and unpickled once by each process."""

import pickle
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar, cast

T = TypeVar("T")

_KEPT: Final = 2  # the one that is worked with, and one that is about to end


@dataclass(frozen=True, slots=True)
class Packed(Generic[T]):
    """The value as bytes, which pools hand on as they are."""

    data: bytes

    @classmethod
    def of(cls, value: T) -> "Packed[T]":
        """Pickle it."""
        return cls(pickle.dumps(value))

    @property
    def value(self) -> T:
        """The value, the same object for the same bytes; whoever changes it changes it for later tasks."""
        return cast(T, _unpacked(self.data))


@lru_cache(maxsize=_KEPT)
def _unpacked(data: bytes) -> Any:
    return pickle.loads(data)  # of this planner's own process
