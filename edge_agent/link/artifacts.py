"""The agent's artifacts: whole ones by digest, and partial ones that a fetch resumes.

A device whose disk is full can store no state, so it could not even take a plan that fits. An artifact is
therefore not begun where it does not fit, and the beginning of one goes when the disk fills meanwhile.
"""

import errno
import os
from pathlib import Path
from typing import Final

from stageloom.shared.artifact import file_digest
from stageloom.shared.failpoint import failpoint
from stageloom.shared.ids import Digest

RESERVE_BYTES: Final = 2 << 20
"""Left free for the link's state: three copies of the largest that there can be, and the spool's ledger."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ArtifactFolder:
    """`DIGEST` is a whole artifact, `DIGEST.part` the beginning of one."""

    def __init__(self, folder: Path) -> None:
        """Raises:
        OSError: the folder can be neither made nor read.
        """
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, digest: Digest) -> Path:
        """Where the whole artifact lies, or will."""
        return self._folder / digest

    def present(self) -> frozenset[Digest]:
        """Whole artifacts, by name: their digests were checked when they came and are again when opened."""
        return frozenset(Digest(path.name) for path in self._folder.iterdir() if len(path.name) == 64)

    def partial_bytes(self, digest: Digest) -> int:
        """How much of an artifact lies here already."""
        part = self._part(digest)
        return part.stat().st_size if part.exists() else 0

    def require_room(self, size_bytes: int, have_bytes: int) -> None:
        """See that the rest of an artifact fits.

        Raises:
            OSError: it does not.
        """
        disk = os.statvfs(self._folder)
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
        """Take a complete file in if it is what it should be; throw it away if not."""
        part = self._part(digest)
        if file_digest(part) != digest:
            part.unlink()
            return False
        failpoint("agent.artifact.rename")
        part.replace(self.path(digest))
        failpoint("agent.artifact.renamed")
        return True

    def _part(self, digest: Digest) -> Path:
        return self._folder / f"{digest}.part"
