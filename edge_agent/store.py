"""The agent's state directory: its lock, small state files that survive a power cut, and artifacts by digest.

A state file is written beside the old one, synced, and renamed over it; the copy before stays as `.previous`.
Each carries a digest over its body. A file that does not check is set aside as `.corrupt` and the previous
copy is used; if that is broken too the agent starts without, and says so. It never stops a start.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stageloom.shared.artifact import file_digest
from stageloom.shared.digest import DIGEST_BYTES
from stageloom.shared.durable_file import sync_directory, sync_file, write_synced
from stageloom.shared.errors import StateError, StorageError
from stageloom.shared.failpoint import failpoint
from stageloom.shared.ids import Digest

_MAGIC = b"STGLSTATE1\n"
_MAX_STATE_BYTES = 16 << 20
_PART = ".part"
_DIGEST_CHARS = 2 * DIGEST_BYTES


@dataclass(frozen=True)
class Loaded:
    """A state file's body, None if there is none that checks; `problem` says what was wrong on the way."""

    body: bytes | None
    problem: str = ""
    is_previous: bool = False  # the newest copy does not check, and this is the one before


class StateFile:
    """One checked file with its previous copy."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._previous = path.with_name(path.name + ".previous")

    def load(self) -> Loaded:
        """The newest copy that checks."""
        newest, previous = self._read(self.path), self._read(self._previous)
        problem = "; ".join(one.problem for one in (newest, previous) if one.problem)
        found = previous if newest.body is None else newest
        return Loaded(found.body, problem, is_previous=found is previous)

    def _read(self, path: Path) -> Loaded:
        try:
            return Loaded(_unsealed(path))
        except FileNotFoundError:
            return Loaded(None)
        except OSError as error:
            return Loaded(None, f"{path.name} cannot be read: {error.strerror}")
        except StateError as error:
            with contextlib.suppress(OSError):
                path.replace(path.with_name(self.path.name + ".corrupt"))
            return Loaded(None, f"{path.name} is corrupt ({error.cause}) and set aside")

    def save(self, body: bytes) -> None:
        """Durable when it returns; the file holds the old or the new body at every moment.

        Raises:
            StorageError: the disk is full, or the directory may not be written. Nothing has changed then.
        """
        fresh = self.path.with_name(self.path.name + ".new")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_synced(fresh, _MAGIC + _checksum(body) + body)
            failpoint("agent.file.written")
            if self.path.exists():
                spare = self._previous.with_name(self._previous.name + ".new")
                spare.unlink(missing_ok=True)
                os.link(self.path, spare)
                spare.replace(self._previous)
                failpoint("agent.file.previous")
            fresh.replace(self.path)
            sync_directory(self.path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise StorageError(
                f"{self.path} cannot be written: {error.strerror}", remedy="free space or mend permissions"
            ) from error


def _unsealed(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(_MAX_STATE_BYTES + 1)
    head = len(_MAGIC)
    if len(data) > _MAX_STATE_BYTES:
        raise StateError("too large")
    if data[:head] != _MAGIC:
        raise StateError("not a state file")
    body = data[head + DIGEST_BYTES :]
    if data[head : head + DIGEST_BYTES] != _checksum(body):
        raise StateError("its checksum is wrong")
    return body


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


RESERVE_BYTES: Final = 2 << 20
"""Left free for the link's state: three copies of the largest that there can be, and the spool's ledger."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ArtifactStore:
    """Artifacts by digest: `DIGEST` is a whole one, `DIGEST.part` the beginning of one that a fetch resumes.

    A device whose disk is full can store no state, so it could not even take a plan that fits. An artifact is
    therefore not begun where it does not fit, and the beginning of one goes when the disk fills meanwhile.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, digest: Digest) -> Path:
        """Where the whole artifact lies, or will."""
        return self.directory / digest

    def present(self) -> frozenset[Digest]:
        """Digests of the whole artifacts; their content is checked before a plan uses them."""
        if not self.directory.is_dir():
            return frozenset()
        names = (path.name for path in self.directory.iterdir())
        return frozenset(Digest(name) for name in names if len(name) == _DIGEST_CHARS)

    # -- downloads ------------------------------------------------------------------------------------------

    def partial_bytes(self, digest: Digest) -> int:
        """How much of an artifact lies here already."""
        part = self._part(digest)
        return part.stat().st_size if part.exists() else 0

    def require_room(self, size_bytes: int, have_bytes: int) -> None:
        """See that the rest of an artifact fits.

        Raises:
            OSError: it does not, or the directory cannot be made.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        disk = os.statvfs(self.directory)
        free_bytes = disk.f_bavail * disk.f_frsize
        if size_bytes - have_bytes + RESERVE_BYTES > free_bytes:
            text = f"{size_bytes - have_bytes} bytes are to come and {free_bytes} free"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {text}")

    def append(self, digest: Digest, offset_bytes: int, data: bytes) -> None:
        """Add a chunk at the end of the partial file.

        Raises:
            OSError: the disk is full, and the partial file is gone; or it is not `offset_bytes` long.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._part(digest).open("ab") as file:
                if file.tell() != offset_bytes:
                    raise OSError(f"the partial artifact has {file.tell()} bytes, not {offset_bytes}")
                file.write(data)
        except OSError as error:
            if error.errno in _FULL:
                self._part(digest).unlink(missing_ok=True)
            raise
        failpoint("agent.artifact.append")

    def finish(self, digest: Digest) -> bool:
        """Take a complete file in if it is what it should be; throw it away if not.

        Raises:
            OSError: it cannot be read or moved.
        """
        part = self._part(digest)
        if file_digest(part) != digest:
            part.unlink()
            return False
        failpoint("agent.artifact.rename")
        part.replace(self.path(digest))
        failpoint("agent.artifact.renamed")
        return True

    def _part(self, digest: Digest) -> Path:
        return self.directory / f"{digest}{_PART}"

    # -- whole artifacts ------------------------------------------------------------------------------------

    def adopt(self, path: Path, digest: Digest) -> Path:
        """Move an artifact that was made on this file system into the store.

        Raises:
            StorageError: it cannot be moved.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.replace(self.path(digest))
            sync_directory(self.directory)
        except OSError as error:
            raise StorageError(
                f"artifact {digest[:12]} cannot be stored: {error.strerror}", remedy="free space"
            ) from error
        return self.path(digest)

    def make_durable(self, digest: Digest) -> None:
        """Wait until the disk has it, name and content: last-known-good must survive a power cut.

        Raises:
            OSError: the disk failed.
        """
        sync_file(self.path(digest))

    def remove(self, digest: Digest) -> None:
        """Forget an artifact that turned out damaged."""
        self.path(digest).unlink(missing_ok=True)

    def collect(self, keep: Collection[Digest], *, downloads: bool = True) -> list[Digest]:
        """Remove artifacts that are not to be kept, and downloads too; returns the artifacts that went."""
        gone = []
        for path in list(self.directory.iterdir()) if self.directory.is_dir() else []:
            digest = Digest(path.name.removesuffix(_PART))
            if digest in keep or len(digest) != _DIGEST_CHARS or (path.name != digest and not downloads):
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError:  # the disk is read-only now: what stays does no harm
                continue
            if path.name == digest:
                gone.append(digest)
        return gone


LOCK_NAME = "lock"


class HomeLock:
    """Held for the life of the main process; the kernel lets go of it, however the process ends."""

    def __init__(self, home: Path) -> None:
        """Take it.

        Raises:
            StorageError: another agent holds it, or the directory cannot be used.
        """
        path = home / LOCK_NAME
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(
                f"the state directory {home} cannot be used: {error.strerror}",
                remedy="mend its permissions or choose another with STAGELOOM_AGENT_HOME",
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise StorageError(
                f"another agent (process {holder or 'unknown'}) uses the state directory {home}",
                remedy="stop it, or choose another with STAGELOOM_AGENT_HOME",
            ) from None
        with contextlib.suppress(OSError):  # for people only, and the disk may be full
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next agent in."""
        os.close(self._descriptor)
