"""The link goes on while a whole artifact is hashed, which takes longer than a planner may seem silent."""

import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.link.client import ClientConfig, LinkClient
from stageloom.edge_agent.link.connection import Membership, new_keys
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import ArtifactNeed
from stageloom.shared.token import Endpoints

BLOB = b"whole artifact"
NEED = ArtifactNeed("m", digest_bytes([BLOB]), len(BLOB))
TOO_LARGE = ArtifactNeed("n", digest_bytes([b"n"]), 1 << 60)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LinkClient]:
    """A device whose planner is not there."""
    endpoints = Endpoints(*["tcp://127.0.0.1:1"] * 3)
    member = Membership(device=DeviceId("d"), planner_key=new_keys().public, endpoints=endpoints)
    client = LinkClient(ClientConfig(folder=tmp_path, keys=new_keys(), membership=member, boot=1))
    client.artifacts.append(NEED.digest, 0, BLOB)
    client.start()
    yield client
    client.stop()


def next_events(client: LinkClient) -> list[ev.Event]:
    """What the link tells next; nothing for five seconds fails a test."""
    assert select.select([client.fileno()], [], [], 5.0)[0], "the link's thread stands still"
    return list(client.take())


def test_the_link_goes_on_while_a_whole_artifact_is_hashed(
    client: LinkClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The last chunk is here. 2. The core asks again meanwhile, and for another artifact."""
    hashed, finished, finish = threading.Event(), [], client.artifacts.finish

    def slow(digest: Digest) -> bool:
        finished.append(digest)
        return hashed.wait(30.0) and finish(digest)

    monkeypatch.setattr(client.artifacts, "finish", slow)
    try:
        for need in (NEED, NEED, TOO_LARGE):
            client.act(ev.FetchArtifact(need))
        (failed,) = next_events(client)
        assert isinstance(failed, ev.FetchFailed) and failed.digest == TOO_LARGE.digest
    finally:
        hashed.set()
    assert next_events(client) == [ev.ArtifactPresent(NEED.digest)]
    assert finished == [NEED.digest]


def test_a_whole_artifact_that_is_another_one_is_told_as_damaged(client: LinkClient) -> None:
    other = ArtifactNeed("m", digest_bytes([b"other"]), len(BLOB))
    client.artifacts.append(other.digest, 0, BLOB)
    client.act(ev.FetchArtifact(other))
    assert next_events(client) == [ev.FetchFailed(other.digest, "damaged")]
