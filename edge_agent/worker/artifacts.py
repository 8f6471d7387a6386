"""Artifacts that the engine process has open, each for as long as someone uses it."""

import threading
from collections.abc import Hashable, Mapping
from pathlib import Path

from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.errors import PlanError
from stageloom.shared.ids import Digest


class ArtifactTable:
    """Plans and profile requests share what is open; may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Digest, Artifact] = {}
        self._users: dict[Digest, set[Hashable]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def use(self, user: Hashable, digest: Digest, paths: Mapping[str, str]) -> Artifact:
        """Open the artifact, or share it, until `release(user)`.

        Raises:
            PlanError: it is not open and `paths` does not name it.
            StageloomError, OSError: it cannot be read.
        """
        with self._lock:
            known = self._open.get(digest)
            if known is None:
                if digest not in paths:
                    raise PlanError(f"artifact {digest[:12]} is not here", remedy="fetch it first")
                known = self._open[digest] = open_artifact(Path(paths[digest]), digest)
            self._users.setdefault(digest, set()).add(user)
            return known

    def release(self, user: Hashable) -> None:
        """The user needs none of its artifacts any more."""
        with self._lock:
            for digest, users in list(self._users.items()):
                users.discard(user)
                if not users:
                    del self._users[digest], self._open[digest]
