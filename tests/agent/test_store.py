"""State files and artifacts on disk: power cuts, corruption, a full disk."""

import errno
import os
from pathlib import Path

import pytest

from stageloom.edge_agent import store
from stageloom.edge_agent.store import ArtifactStore, HomeLock, StateFile
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import StorageError


def test_saved_state_is_loaded(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state" / "link")
    assert file.load().body is None
    file.save(b"one")
    file.save(b"two")
    assert file.load() == store.Loaded(b"two")
    assert oct(file.path.stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("damage", [b"", b"STGLSTATE1\n", b"rubbish" * 40])
def test_corrupt_state_falls_back_to_the_previous_copy_and_says_so(tmp_path: Path, damage: bytes) -> None:
    file = StateFile(tmp_path / "link")
    file.save(b"one")
    file.save(b"two")
    file.path.write_bytes(damage)
    found = file.load()
    assert found.body == b"one"
    assert "corrupt" in found.problem
    assert (tmp_path / "link.corrupt").read_bytes() == damage
    file.save(b"three")
    assert file.load() == store.Loaded(b"three")


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "link")
    file.save(b"body")
    whole = file.path.read_bytes()
    for at in range(len(whole)):
        file.path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        assert file.load().body is None, at


def test_both_copies_corrupt_is_an_empty_start_and_never_an_error(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "link")
    file.save(b"one")
    file.save(b"two")
    for path in tmp_path.iterdir():
        path.write_bytes(b"x")
    found = file.load()
    assert found.body is None
    assert found.problem.count("corrupt") == 2


@pytest.mark.promise("state-files-survive-cut")
@pytest.mark.parametrize("call", ["write_synced", "sync_directory"])
def test_full_disk_is_a_storage_error_and_the_old_state_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    file = StateFile(tmp_path / "link")
    file.save(b"old")

    def full(*args: object) -> None:
        if call == "write_synced":
            Path(str(args[0])).write_bytes(b"half")  # the part that still fitted
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(StorageError, match="No space left"):
        patched.setattr(store, call, full)
        file.save(b"new")
    assert file.load().body in (b"old", b"new")
    if call == "write_synced":
        assert file.load() == store.Loaded(b"old")
        assert not list(tmp_path.glob("*.new"))


@pytest.mark.promise("state-files-survive-cut")
@pytest.mark.parametrize("stop_at", range(6))
def test_a_cut_at_any_step_of_saving_leaves_the_old_or_the_new_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    class PowerCut(BaseException):
        pass

    file = StateFile(tmp_path / "link")
    file.save(b"old")
    file.save(b"old")
    steps = 0

    def counted(original: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal steps
            if steps == stop_at:
                raise PowerCut
            steps += 1
            return original(*args, **kwargs)  # type: ignore[operator]

        return call

    with monkeypatch.context() as patched:
        for owner, name in ((os, "fsync"), (os, "link"), (Path, "replace"), (store, "sync_directory")):
            patched.setattr(owner, name, counted(getattr(owner, name)))
        try:
            file.save(b"new")
        except PowerCut:
            pass
    assert file.load().body in (b"old", b"new")
    assert file.load().problem == ""
    file.save(b"later")
    assert file.load() == store.Loaded(b"later")


BLOB = bytes(range(256)) * 40
DIGEST = digest_bytes([BLOB])


def test_unreferenced_artifacts_and_downloads_are_collected(tmp_path: Path) -> None:
    artifacts = ArtifactStore(tmp_path / "artifacts")
    other = digest_bytes([b"other"])
    for digest, data in ((DIGEST, BLOB), (other, b"other")):
        (tmp_path / "made").write_bytes(data)
        assert artifacts.adopt(tmp_path / "made", digest).read_bytes() == data
    part = artifacts.directory / f"{digest_bytes([b'third'])}.part"
    part.write_bytes(b"thi")
    assert artifacts.collect({DIGEST}, downloads=False) == [other]
    assert part.exists()
    assert artifacts.collect({DIGEST}) == []
    assert [path.name for path in artifacts.directory.iterdir()] == [DIGEST]


def test_second_agent_on_one_state_directory_is_told_who_holds_it(tmp_path: Path) -> None:
    lock = HomeLock(tmp_path)
    with pytest.raises(StorageError, match=f"process {os.getpid()}.*STAGELOOM_AGENT_HOME"):
        HomeLock(tmp_path)
    lock.release()
    HomeLock(tmp_path).release()
