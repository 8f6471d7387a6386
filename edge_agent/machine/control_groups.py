"""The control groups of this process: which folders bound what it may take, and how much processor time.

A container or a service may have all cores of a machine and the time of a few: `docker run --cpus=2`,
`CPUQuota=`. Once a period's time is used up, all of its threads stand still until the next one begins.
"""

import math
import os
from pathlib import Path

from stageloom.shared.text import counted


def group_folders(controller: str, root: Path = Path("/")) -> list[tuple[Path, bool]]:
    """Folders of the process's groups for a controller, up to the root; each with whether it is version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, kinds, inner = line.split(":", 2)
        if kinds and controller not in kinds.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if kinds else "")
        at = Path(inner.strip("/"))
        folders += [(mount / level, not kinds) for level in (at, *at.parents)]
    return folders


def cpu_quota(root: Path = Path("/")) -> float:
    """How many cores' time the process may use at the most; infinity where nothing bounds it."""
    return min((_quota(*folder) for folder in group_folders("cpu", root)), default=math.inf)


def _quota(folder: Path, unified: bool) -> float:
    try:
        if unified:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if quota.strip() in ("max", "-1"):
            return math.inf
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf  # no limit at this level, or not for us to read


def usable_cores(root: Path = Path("/")) -> tuple[int, ...]:
    """Cores for a plan to reckon with: those that the process may run on, but no more than it has time of.

    With a quota they are so many and not these: see `has_own_cores`.
    """
    allowed = sorted(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return tuple(allowed if quota >= len(allowed) else allowed[: max(1, math.floor(quota))])


def has_own_cores(root: Path = Path("/")) -> bool:
    """Whether a lane may keep to a core. Where a quota leaves cores over, others may be busy on that one, and
    every container with a quota would choose the same."""
    return cpu_quota(root) >= len(os.sched_getaffinity(0))


def quota_warning(cores: int, quota: float) -> str:
    """What a quota on so many cores means for plans; empty where it does not bound them."""
    if quota >= cores:
        return ""
    return (
        f"a quota of {quota:.1f} cores on {cores}: lanes stand still in mid-step once it is used up; auto "
        f"plans for {counted(max(1, math.floor(quota)), 'core')} and pins no lane"
    )


WHOLE_CORES = "give whole cores: --cpuset-cpus in the place of --cpus, AllowedCPUs= in the place of CPUQuota="
