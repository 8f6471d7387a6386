"""The bulk lane: chunks of those artifacts that a device's desired value names, within its credits."""

from collections import Counter
from dataclasses import dataclass

from stageloom.planner.dispatch import events as ev
from stageloom.planner.dispatch.core.fleet import Device, DispatchConfig, Fleet
from stageloom.shared.ids import Digest
from stageloom.shared.messages import bulk, control
from stageloom.shared.messages.base import RefusalCode


@dataclass(frozen=True)
class _Open:
    who: Device
    route: bytes
    request: bulk.ChunkRequest


class BulkCore:
    """Decisions of the bulk lane."""

    def __init__(self, fleet: Fleet, config: DispatchConfig) -> None:
        self._fleet = fleet
        self._config = config
        self._open: dict[int, _Open] = {}  # by ticket
        self._on_their_way: Counter[str] = Counter()  # chunks, by key

    def received(self, event: ev.BulkReceived) -> list[ev.Action]:
        """A device asks for a chunk."""
        request = event.message
        who = self._fleet.authorise(ev.Lane.BULK, event.route, event.key, request.correlation)
        if isinstance(who, ev.Send):
            return [who]
        if request.digest not in _artifacts_of(who.member.desired):
            return [self._refuse(event.route, request, RefusalCode.NOT_FOUND, "not part of what is desired")]
        if self._on_their_way[event.key] >= self._config.bulk_credits:
            return [self._refuse(event.route, request, RefusalCode.BUSY, "credits used up")]
        self._on_their_way[event.key] += 1
        ticket = self._fleet.ticket()
        self._open[ticket] = _Open(who, event.route, request)
        return [
            ev.ReadChunk(
                ticket, who.member.device, request.digest, request.offset_bytes, request.length_bytes
            )
        ]

    def read(self, event: ev.ChunkRead) -> list[ev.Action]:
        """The store answered."""
        done = self._open.pop(event.ticket, None)
        if done is None:
            return []
        self._on_their_way[done.who.member.public_key] -= 1
        if done.who.member.revoked:
            return []
        request = done.request
        if event.data is None:
            return [self._refuse(done.route, request, RefusalCode.NOT_FOUND, event.reason)]
        chunk = bulk.Chunk(
            correlation=request.correlation,
            digest=request.digest,
            offset_bytes=request.offset_bytes,
            size_bytes=event.size_bytes,
            data=event.data,
        )
        return [ev.Send(ev.Lane.BULK, done.route, chunk)]

    def _refuse(self, route: bytes, request: bulk.ChunkRequest, code: RefusalCode, reason: str) -> ev.Action:
        return self._fleet.refuse(ev.Lane.BULK, route, request.correlation, code, reason)


def _artifacts_of(desired: control.Desired | None) -> set[Digest]:
    if desired is None:
        return set()
    policies = {desired.policy.digest} if desired.policy is not None else set()
    profiled = {one.artifact.digest for one in desired.profiles}
    staged = desired.stage_profile.artifacts if desired.stage_profile is not None else ()
    return {need.digest for need in (*desired.artifacts, *staged)} | profiled | policies
