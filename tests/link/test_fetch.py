"""Artifacts are fetched in bounded chunks, in order on disk, resumed at any byte."""

import msgspec
import pytest

from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.link import fetch as fetching
from stageloom.shared.digest import digest_bytes
from stageloom.shared.messages import bulk
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.messages.control import ArtifactNeed


def _blob_need(size: int) -> tuple[bytes, ArtifactNeed]:
    blob = bytes(at % 251 for at in range(size))
    return blob, ArtifactNeed("m", digest_bytes([blob]), size)


def _answer(blob: bytes, ask: bulk.ChunkRequest) -> bulk.Chunk:
    data = blob[ask.offset_bytes : ask.offset_bytes + ask.length_bytes]
    return bulk.Chunk(
        correlation=ask.correlation,
        digest=ask.digest,
        offset_bytes=ask.offset_bytes,
        size_bytes=len(blob),
        data=data,
    )


@pytest.mark.parametrize("have", [0, 1, 10, 25, 99])
def test_a_fetch_resumes_where_the_partial_file_ends(have: int) -> None:
    blob, need = _blob_need(100)
    core = fetching.FetchCore(chunk_bytes=10)
    core.credits = 3
    part, asked, open_asks = blob[:have], 0, list(core.want(need, have, 0.0))
    while open_asks:
        ask = open_asks.pop()  # answered in reverse: chunks arrive out of order
        if isinstance(ask, fetching.Finish):
            continue
        assert isinstance(ask, bulk.ChunkRequest)
        asked += 1
        for action in core.received(_answer(blob, ask), 0.0):
            if isinstance(action, fetching.Write):
                assert action.offset_bytes == len(part)
                part += action.data
            else:
                open_asks.append(action)
    assert part == blob and asked == -(-(100 - have) // 10)


def test_no_more_requests_are_open_than_there_are_credits() -> None:
    core = fetching.FetchCore(chunk_bytes=10)
    core.credits = 3
    (_, first), (_, second) = _blob_need(100), _blob_need(90)
    assert len(core.want(first, 0, 0.0)) == 3
    assert core.want(second, 0, 0.0) == []


def test_a_lost_chunk_is_asked_for_again_and_a_late_one_does_no_harm() -> None:
    blob, need = _blob_need(20)
    core = fetching.FetchCore(chunk_bytes=20, again_after_s=5.0)
    (ask,) = core.want(need, 0, 0.0)
    assert core.tick(4.9) == []
    (again,) = core.tick(5.0)
    assert isinstance(ask, bulk.ChunkRequest) and isinstance(again, bulk.ChunkRequest)
    assert core.received(_answer(blob, ask), 5.1) == [], "its number is not open any more"
    assert [type(one) for one in core.received(_answer(blob, again), 5.2)] == [
        fetching.Write,
        fetching.Finish,
    ]


def test_an_artifact_of_another_size_is_given_up() -> None:
    blob, need = _blob_need(20)
    core = fetching.FetchCore()
    (ask,) = core.want(need, 0, 0.0)
    assert isinstance(ask, bulk.ChunkRequest)
    (action,) = core.received(msgspec.structs.replace(_answer(blob, ask), size_bytes=21), 0.0)
    assert isinstance(action, ev.FetchFailed)


def test_a_busy_planner_is_asked_again_and_a_missing_artifact_is_given_up() -> None:
    _, need = _blob_need(20)
    core = fetching.FetchCore(again_after_s=5.0)
    (ask,) = core.want(need, 0, 0.0)
    assert isinstance(ask, bulk.ChunkRequest)
    assert core.received(Refused(correlation=ask.correlation, code=RefusalCode.BUSY), 1.0) == []
    (again,) = core.tick(6.0)
    assert isinstance(again, bulk.ChunkRequest) and again.offset_bytes == 0
    gone = Refused(correlation=again.correlation, code=RefusalCode.NOT_FOUND, reason="no such artifact")
    assert core.received(gone, 7.0) == [ev.FetchFailed(need.digest, "no such artifact")]
