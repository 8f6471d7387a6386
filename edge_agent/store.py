"""What the agent keeps on disk: small state files that survive a power cut, and artifacts by digest.

A state file is written beside the old one, synced, and renamed over it; the copy before stays as `.previous`.
Each carries a digest over its body. A file that does not check is set aside as `.corrupt` and the previous
copy is used; if that is broken too the agent starts without, and says so. It never stops a start.
"""

import contextlib
import hashlib
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from shared.artifact import file_digest
from shared.digest import DIGEST_BYTES
from shared.errors import DecodeError, StateError, StorageError
from shared.ids import Digest

_log = logging.getLogger(__name__)

_MAGIC = b"STGLSTATE1\n"
_MAX_STATE_BYTES = 16 << 20


@dataclass(frozen=True)
class Loaded:
    """A state file's body, None if there is none that checks; `problem` says what was wrong on the way."""

    body: bytes | None
    problem: str = ""


class StateFile:
    """One checked file with its previous copy."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._previous = path.with_name(path.name + ".previous")

    def load(self) -> Loaded:
        """The newest copy that checks."""
        newest, previous = self._read(self.path), self._read(self._previous)
        problem = "; ".join(one.problem for one in (newest, previous) if one.problem)
        return Loaded(previous.body if newest.body is None else newest.body, problem)

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
            if self.path.exists():
                spare = self._previous.with_name(self._previous.name + ".new")
                spare.unlink(missing_ok=True)
                os.link(self.path, spare)
                spare.replace(self._previous)
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


def write_synced(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a whole file and wait until the disk has it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make a rename in it durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ArtifactStore:
    """Artifacts by digest. What has its final name was whole and had that digest when it got it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, digest: Digest) -> Path:
        """Where the whole artifact lies, if it is present."""
        return self.directory / f"{digest}.artifact"

    def present(self) -> frozenset[Digest]:
        """Digests of the whole artifacts."""
        try:
            return frozenset(
                Digest(p.name.removesuffix(".artifact")) for p in self.directory.glob("*.artifact")
            )
        except OSError:
            return frozenset()

    def received_bytes(self, digest: Digest) -> int:
        """How much of a download is here: where to resume."""
        try:
            return self._part(digest).stat().st_size
        except FileNotFoundError:
            return 0

    def append(self, digest: Digest, offset: int, data: bytes) -> int:
        """Add a chunk at the end of a download; one that lies elsewhere is late or repeated and ignored.

        Returns:
            Bytes received so far.

        Raises:
            StorageError: the disk is full; what was there before stays.
        """
        part = self._part(digest)
        have = self.received_bytes(digest)
        if offset != have:
            return have
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with part.open("ab") as file:
                file.write(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(part, have)
            raise StorageError(
                f"artifact {digest[:12]} cannot be stored: {error.strerror}", remedy="free space"
            ) from error
        return have + len(data)

    def finish(self, digest: Digest) -> Path:
        """Check a whole download and give it its final name.

        Raises:
            DecodeError: the bytes have another digest; they are removed.
            StorageError: the disk failed.
        """
        part = self._part(digest)
        try:
            if (found := file_digest(part)) != digest:
                part.unlink()
                raise DecodeError(
                    f"artifact {digest[:12]} arrived with the digest {found[:12]}", remedy="fetch it again"
                )
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            part.replace(self.path(digest))
            sync_directory(self.directory)
        except OSError as error:
            raise StorageError(f"artifact {digest[:12]} cannot be stored: {error.strerror}") from error
        return self.path(digest)

    def adopt(self, digest: Digest, blob: bytes) -> Path:
        """Store a whole artifact that was made here.

        Raises:
            DecodeError: the blob has another digest.
            StorageError: the disk failed.
        """
        if not self.path(digest).exists():
            self._part(digest).unlink(missing_ok=True)
            self.append(digest, 0, blob)
            self.finish(digest)
        return self.path(digest)

    def remove(self, digest: Digest) -> None:
        """Forget an artifact that turned out damaged."""
        self.path(digest).unlink(missing_ok=True)

    def collect(self, keep: Collection[Digest]) -> list[Digest]:
        """Remove every artifact and download that is not to be kept; returns whole ones that went."""
        gone = []
        for path in list(self.directory.glob("*.artifact")) + list(self.directory.glob("*.part")):
            digest = Digest(path.name.partition(".")[0])
            if digest in keep:
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("%s cannot be removed: %s", path.name, error.strerror)
                continue
            if path.suffix == ".artifact":
                gone.append(digest)
        return gone

    def _part(self, digest: Digest) -> Path:
        return self.directory / f"{digest}.part"
