"""The good plan before the present one, on disk: what runs if last-known-good no longer does."""

from pathlib import Path

import msgspec

from stageloom.edge_agent.link.events import RunnablePlan
from stageloom.edge_agent.store import StateFile
from stageloom.shared.errors import StorageError


class FallbackFile:
    """One plan in a checked file; nothing about it ever stops a start."""

    def __init__(self, path: Path) -> None:
        self._file = StateFile(path)

    def load(self) -> tuple[RunnablePlan | None, str]:
        """The plan, if there is one that can be read, and what was wrong."""
        found = self._file.load()
        if found.body is None:
            return None, found.problem
        try:
            return msgspec.msgpack.decode(found.body, type=RunnablePlan), found.problem
        except msgspec.MsgspecError as error:
            return None, f"the fallback plan cannot be read and is forgotten: {error}"

    def save(self, plan: RunnablePlan) -> str:
        """Replace it durably; why not, if it cannot be written."""
        try:
            self._file.save(msgspec.msgpack.encode(plan))
        except StorageError as error:
            return str(error)
        return ""
