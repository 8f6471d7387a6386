"""The agent's artifacts: whole ones by digest, and partial ones that a fetch resumes."""

from pathlib import Path

from shared.artifact import file_digest
from shared.failpoint import failpoint
from shared.ids import Digest


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

    def append(self, digest: Digest, offset_bytes: int, data: bytes) -> None:
        """Add a chunk at the end of the partial file.

        Raises:
            OSError: the disk is full, or the file is not `offset_bytes` long.
        """
        with self._part(digest).open("ab") as file:
            if file.tell() != offset_bytes:
                raise OSError(f"the partial artifact has {file.tell()} bytes, not {offset_bytes}")
            file.write(data)
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
