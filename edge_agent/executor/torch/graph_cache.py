"""Which captured graphs to keep: those used last, up to so many bytes."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class GraphCache(Generic[K]):
    """Sizes by key, in order of use; it holds no graph itself."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._sizes: OrderedDict[K, int] = OrderedDict()
        self._total = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return self._total

    def put(self, key: K, nbytes: int) -> list[K]:
        """Keep one, as the last used; the keys to give up for it, longest unused first.

        The newcomer stays even if it is larger than the limit: it is wanted now.
        """
        self.drop(key)
        self._sizes[key] = nbytes
        self._total += nbytes
        given_up = []
        while self._total > self.limit_bytes and len(self._sizes) > 1:
            oldest, size = self._sizes.popitem(last=False)
            self._total -= size
            given_up.append(oldest)
        return given_up

    def touch(self, key: K) -> None:
        """It was used."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def drop(self, key: K) -> None:
        """It is gone."""
        self._total -= self._sizes.pop(key, 0)
