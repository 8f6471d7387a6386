"""Artifact files beside the database, named by what they contain.

A blob appears under its name only when it is complete and on disk, so whoever finds one may trust its size;
its bytes are checked against the digest when it comes in.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stageloom.shared.artifact import file_digest
from stageloom.shared.durable_file import sync_directory
from stageloom.shared.errors import DecodeError, StorageError
from stageloom.shared.ids import Digest


class Blobs:
    """A directory `ab/abcdef...` of files by digest."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, digest: Digest) -> Path:
        """Where the blob lies, or would lie."""
        return self.root / digest[:2] / digest

    def has(self, digest: Digest) -> bool:
        """Whether the blob is here, complete."""
        return self.path(digest).is_file()

    def put_file(self, source: Path, digest: Digest) -> int:
        """Copy a file in and return its size in bytes; a blob that is here already is left alone.

        Raises:
            DecodeError: the bytes copied do not have the digest.
            StorageError: the source cannot be read or the disk is full.
        """
        target = self.path(digest)
        if not target.is_file():
            with _os_errors(target.parent):
                target.parent.mkdir(parents=True, exist_ok=True)
                handle, name = tempfile.mkstemp(dir=target.parent, prefix=".incoming-")
                incoming = Path(name)
                try:
                    with os.fdopen(handle, "wb") as out, source.open("rb") as read:
                        shutil.copyfileobj(read, out, 1 << 20)
                        out.flush()
                        os.fsync(out.fileno())
                    # The copy is digested, not the source: the source may change while it is read.
                    if file_digest(incoming) != digest:
                        raise DecodeError(
                            f"{source} does not have the digest {digest[:12]}",
                            remedy="import the model again",
                        )
                    incoming.replace(target)
                    sync_directory(target.parent)
                finally:
                    incoming.unlink(missing_ok=True)
        return target.stat().st_size

    def put_bytes(self, data: bytes, digest: Digest) -> int:
        """`put_file` for a blob that is at hand.

        Raises:
            DecodeError, StorageError: as `put_file`.
        """
        with _os_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.root, prefix=".incoming-") as source:
                source.write(data)
                source.flush()
                return self.put_file(Path(source.name), digest)

    def remove(self, digest: Digest) -> None:
        """Delete a blob; absent is fine."""
        self.path(digest).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Delete what an interrupted `put_file` left; returns the number of files."""
        left = [*self.root.glob(".incoming-*"), *self.root.glob("*/.incoming-*")]
        for path in left:
            path.unlink(missing_ok=True)
        return len(left)


@contextmanager
def _os_errors(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{error.filename or where}: {error.strerror}",
            remedy="free space or fix the permissions of the data directory",
        ) from error
