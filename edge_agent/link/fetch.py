"""Fetching artifacts as a pure core: bounded chunks, a few in flight, in order on disk, resumed at any byte.

At most `credits` requests are open over all artifacts, so at most credits x chunk bytes are held here. Chunks
reach the disk in order: the length of the partial file is all that a restart needs to know.
"""

from dataclasses import dataclass, field

from stageloom.edge_agent.lifecycle.events import FetchFailed
from stageloom.shared.ids import Digest
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.messages.bulk import MAX_CHUNK_BYTES, BulkToDevice, Chunk, ChunkRequest
from stageloom.shared.messages.control import ArtifactNeed


@dataclass(frozen=True)
class Write:
    """Append to the partial file, whose length is `offset_bytes`."""

    digest: Digest
    offset_bytes: int
    data: bytes


@dataclass(frozen=True)
class Finish:
    """The partial file is whole: check its digest, then move it into the store or start over."""

    digest: Digest


FetchAction = ChunkRequest | Write | Finish | FetchFailed
"""A `ChunkRequest` goes out on the bulk lane; what failed is asked for again while it is wanted."""


@dataclass
class _Fetch:
    need: ArtifactNeed
    written_bytes: int
    asked_bytes: int
    open: dict[int, tuple[int, float]] = field(default_factory=dict)  # correlation: (offset, asked at)
    held: dict[int, bytes] = field(default_factory=dict)  # offset: data that arrived early


class FetchCore:
    """Which chunk to ask for next. One instance per agent; it forgets nothing but what `stop` names."""

    def __init__(self, *, again_after_s: float = 5.0, chunk_bytes: int = MAX_CHUNK_BYTES) -> None:
        self.credits = 1
        self._chunk_bytes = chunk_bytes
        self._again_after_s = again_after_s
        self._fetches: dict[Digest, _Fetch] = {}
        self._correlation = 0

    def want(self, need: ArtifactNeed, have_bytes: int, now_s: float) -> list[FetchAction]:
        """Fetch an artifact of which `have_bytes` lie on disk already. Wanting it twice changes nothing."""
        if need.digest in self._fetches:
            return self.tick(now_s)
        have_bytes = min(have_bytes, need.size_bytes)
        self._fetches[need.digest] = _Fetch(need, have_bytes, have_bytes)
        return self._advance(self._fetches[need.digest]) + self._fill(now_s)

    def stop(self, digest: Digest) -> None:
        """Forget a fetch: it failed on our side, or nobody wants it any more."""
        self._fetches.pop(digest, None)

    def received(self, message: BulkToDevice, now_s: float) -> list[FetchAction]:
        """An answer; one that was not asked for changes nothing."""
        for fetch in self._fetches.values():
            asked = fetch.open.pop(message.correlation, None)
            if asked is not None:
                if isinstance(message, Chunk):
                    return self._chunk(fetch, asked[0], message, now_s) + self._fill(now_s)
                return self._refused(fetch, asked[0], message, now_s)
        return []

    def tick(self, now_s: float) -> list[FetchAction]:
        """Ask again for what has not come."""
        for fetch in self._fetches.values():
            late = [key for key, (_, at_s) in fetch.open.items() if now_s - at_s >= self._again_after_s]
            if late:
                fetch.asked_bytes = min(fetch.asked_bytes, *(fetch.open.pop(key)[0] for key in late))
        return self._fill(now_s)

    def lost(self) -> None:
        """The connection is gone, and with it every open request."""
        for fetch in self._fetches.values():
            fetch.open.clear()
            fetch.held.clear()
            fetch.asked_bytes = fetch.written_bytes

    def _chunk(self, fetch: _Fetch, offset: int, chunk: Chunk, now_s: float) -> list[FetchAction]:
        good = chunk.digest == fetch.need.digest and chunk.offset_bytes == offset
        if not good or chunk.size_bytes != fetch.need.size_bytes or not chunk.data:
            self.stop(fetch.need.digest)
            return [
                FetchFailed(fetch.need.digest, "the planner's artifact does not have the size that was named")
            ]
        if offset >= fetch.written_bytes:
            fetch.held[offset] = chunk.data[: fetch.need.size_bytes - offset]
        return self._advance(fetch)

    def _advance(self, fetch: _Fetch) -> list[FetchAction]:
        actions: list[FetchAction] = []
        while (data := fetch.held.pop(fetch.written_bytes, None)) is not None:
            actions.append(Write(fetch.need.digest, fetch.written_bytes, data))
            fetch.written_bytes += len(data)
        fetch.held = {at: data for at, data in fetch.held.items() if at > fetch.written_bytes}
        fetch.asked_bytes = max(fetch.asked_bytes, fetch.written_bytes)
        if fetch.written_bytes == fetch.need.size_bytes:
            self.stop(fetch.need.digest)
            actions.append(Finish(fetch.need.digest))
        return actions

    def _refused(self, fetch: _Fetch, offset: int, refused: Refused, now_s: float) -> list[FetchAction]:
        if refused.code is RefusalCode.BUSY:
            # Asked for again by `tick`, as if the answer had been lost.
            self._correlation += 1
            fetch.open[self._correlation] = (offset, now_s)
            return []
        self.stop(fetch.need.digest)
        return [FetchFailed(fetch.need.digest, refused.reason or refused.code.value), *self._fill(now_s)]

    def _fill(self, now_s: float) -> list[FetchAction]:
        """Use free credits, oldest fetch first."""
        actions: list[FetchAction] = []
        free = self.credits - sum(len(fetch.open) + len(fetch.held) for fetch in self._fetches.values())
        for fetch in self._fetches.values():
            asked_for = {offset for offset, _ in fetch.open.values()} | set(fetch.held)
            while free > 0 and fetch.asked_bytes < fetch.need.size_bytes:
                offset = fetch.asked_bytes
                length = min(self._chunk_bytes, fetch.need.size_bytes - offset)
                fetch.asked_bytes = offset + length
                if offset in asked_for:
                    continue
                self._correlation += 1
                fetch.open[self._correlation] = (offset, now_s)
                free -= 1
                actions.append(
                    ChunkRequest(
                        correlation=self._correlation,
                        digest=fetch.need.digest,
                        offset_bytes=offset,
                        length_bytes=length,
                    )
                )
        return actions
