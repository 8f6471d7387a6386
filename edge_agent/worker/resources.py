"""What plans use together in the engine process: open artifacts, and memory."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stageloom.edge_agent.executor.base import SharedTable
from stageloom.edge_agent.machine.control_groups import group_folders
from stageloom.shared.artifact import Artifact, open_artifact
from stageloom.shared.errors import PlanError
from stageloom.shared.ids import Digest


class ArtifactTable(SharedTable[Digest, Artifact]):
    """Plans and profile requests share the artifacts that are open."""

    def use(self, user: Hashable, digest: Digest, paths: Mapping[str, str]) -> Artifact:
        """Open the artifact, or share it, until `release(user)`.

        Raises:
            PlanError: it is not open and `paths` does not name it.
            StageloomError, OSError: it cannot be read.
        """

        def opened() -> Artifact:
            if digest not in paths:
                raise PlanError(f"artifact {digest[:12]} is not here", remedy="fetch it first")
            return open_artifact(Path(paths[digest]), digest)

        return self.hold(user, digest, opened)


_SHARE = 0.9
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes for plans."""

    room_bytes: int  # beyond what is loaded
    memory_bytes: int  # with nothing loaded


def budget(setting_bytes: int, held_bytes: int, root: Path = Path("/")) -> MemoryBudget:
    """What there is; `setting_bytes` 0: what the machine has. `held_bytes` is what loaded plans state."""
    if setting_bytes:
        return MemoryBudget(max(setting_bytes - held_bytes, 0), setting_bytes)
    room_bytes = int(_SHARE * min(_available_bytes(root), _group_bytes(root)))
    return MemoryBudget(room_bytes, room_bytes + held_bytes)


def _available_bytes(root: Path) -> int:
    """What the kernel could hand out without swapping."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return _UNLIMITED


def _group_bytes(root: Path) -> int:
    """What the control groups of this process leave, up to the root: version 2, else version 1."""
    return max(min((_left_bytes(*level) for level in _group_files(root)), default=_UNLIMITED), 0)


def _left_bytes(limits: Path, used: Path, statistics: Path) -> int:
    try:
        limit, current = limits.read_text().strip(), int(used.read_text())
        if limit == "max":
            return _UNLIMITED
        return int(limit) - current + _reclaimable_bytes(statistics)
    except (OSError, ValueError):
        return _UNLIMITED  # no limit at this level, or not for us to read


def _group_files(root: Path) -> list[tuple[Path, Path, Path]]:
    """Per level of the control groups that account memory: limit, usage, statistics."""
    names = {
        True: ("memory.max", "memory.current"),
        False: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    }
    return [
        (level / names[unified][0], level / names[unified][1], level / "memory.stat")
        for level, unified in group_folders("memory", root)
    ]


def _reclaimable_bytes(statistics: Path) -> int:
    """Cached files that the kernel drops when asked for memory."""
    for line in statistics.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
