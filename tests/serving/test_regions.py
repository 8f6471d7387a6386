"""Regions of system shared memory: which files are opened, and that a client cannot harm by changing them."""

import asyncio
import os
import socket
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from stageloom.edge_agent.serving import http_api
from stageloom.edge_agent.serving.access import check_account
from stageloom.edge_agent.serving.body import WaitingBytes
from stageloom.edge_agent.serving.failures import FailureKind, InferenceFailure
from stageloom.edge_agent.serving.http_api import HttpApi
from stageloom.edge_agent.serving.http_server import HttpServer, listen_on
from stageloom.edge_agent.serving.inference import InferenceService
from stageloom.edge_agent.serving.peer import uid_of
from stageloom.edge_agent.serving.regions import RegionInput, RegionTable
from stageloom.edge_agent.serving.verbs import Verbs
from stageloom.shared.errors import InputError


def _registered(file: Path, nbytes: int = 64, offset: int = 0) -> RegionTable:
    file.write_bytes(np.arange(64, dtype=np.uint8).tobytes())
    table = RegionTable()
    table.register("r", f"/{file.name}", offset, nbytes)
    return table


def test_parts_are_read_and_written_by_offset(shm_file: Path) -> None:
    region = _registered(shm_file, nbytes=32, offset=16).get("r")
    place = np.zeros((2, 4), np.uint8)
    RegionInput(place.dtype, place.shape, region, region.place(8, 8)).read_into(place)
    assert place.tolist() == [[24, 25, 26, 27], [28, 29, 30, 31]]
    region.write(place[::-1], region.place(0, 8))
    assert shm_file.read_bytes()[16:24] == bytes([28, 29, 30, 31, 24, 25, 26, 27])


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 33), (32, 1), (-1, 4), (0, -1), (2**70, 4)])
def test_part_outside_its_region_is_refused(offset: int, nbytes: int, shm_file: Path) -> None:
    region = _registered(shm_file, nbytes=32).get("r")
    with pytest.raises(InputError, match="lie outside"):
        region.place(offset, nbytes)


def test_file_that_was_cut_short_is_an_error_of_the_request(shm_file: Path) -> None:
    region = _registered(shm_file).get("r")
    os.truncate(shm_file, 10)
    with pytest.raises(InputError, match="too short"):
        region.read(np.zeros(16, np.uint8), region.place(0, 16))


def test_region_in_use_stays_open_after_it_was_forgotten(shm_file: Path) -> None:
    table = _registered(shm_file)
    region = table.get("r")
    source = RegionInput(np.dtype(np.uint8), (4,), region, 0)
    descriptor = region.descriptor
    table.unregister("")
    del region
    place = np.zeros(4, np.uint8)
    source.read_into(place)
    assert place.tolist() == [0, 1, 2, 3]
    del source
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("key", ["", "/", "..", "/../etc/passwd", "a/b", "/a\0b", "x" * 300, "/none-of-it"])
def test_key_that_is_no_shared_memory_is_refused(key: str) -> None:
    with pytest.raises(InputError):
        RegionTable().register("r", key, 0, 1)


def test_file_that_is_too_small_a_link_or_no_file_is_refused(shm_file: Path) -> None:
    shm_file.write_bytes(b"four")
    with pytest.raises(InputError, match="with 5 bytes"):
        RegionTable().register("r", shm_file.name, 1, 4)
    link = shm_file.with_name(f"{shm_file.name}-link")
    link.symlink_to("/etc/hostname")
    try:
        with pytest.raises(InputError, match="Unable to open"):
            RegionTable().register("r", link.name, 0, 1)
    finally:
        link.unlink()
    shm_file.unlink()
    os.mkfifo(shm_file)
    with pytest.raises(InputError, match="no shared memory of this account"):
        RegionTable().register("r", shm_file.name, 0, 1)


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_account_at_the_other_end_is_known(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as listening, socket.socket(family) as client:
        listening.bind((host, 0))
        listening.listen()
        client.connect(listening.getsockname())
        ends = client.getsockname()[:2], listening.getsockname()[:2]
        assert uid_of(*ends) == os.geteuid()
        check_account(*ends)


@pytest.mark.promise("serving-lets-in-only")
def test_client_that_is_not_of_this_machine_may_not_use_shared_memory() -> None:
    with pytest.raises(InferenceFailure, match="agent's account"):
        check_account(("192.0.2.1", 4711), ("127.0.0.1", 8000))
    with pytest.raises(InferenceFailure, match="agent's account"):
        check_account(None, None)


def test_each_connection_is_looked_at_once_and_none_passes_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []
    strangers: set[tuple[str, int]] = set()

    def check(client: tuple[str, int], server: tuple[str, int]) -> None:
        asked.append(client)
        if client in strangers:
            raise InferenceFailure(FailureKind.FORBIDDEN, "another account's")

    monkeypatch.setattr(http_api, "check_account", check)

    async def run() -> None:
        listening = listen_on("127.0.0.1", 0)
        api = HttpApi(
            Verbs(cast(InferenceService, None), RegionTable()), set(), 1 << 20, WaitingBytes(1 << 20)
        )
        server = HttpServer(api.application, listening, None, 8)
        await server.start()
        ends = [await asyncio.open_connection(*listening[0].getsockname()) for _ in range(2)]
        names = [writer.get_extra_info("sockname") for _, writer in ends]
        strangers.add(names[1])
        for status, (reader, writer) in zip((b"200", b"403") * 2, ends * 2, strict=True):
            writer.write(b"GET /v2/systemsharedmemory/status HTTP/1.1\r\nHost: a\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 " + status)
            length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
        assert asked == [names[0], names[1], names[1]]
        for _, writer in ends:
            writer.close()
        await server.stop()

    asyncio.run(run())
