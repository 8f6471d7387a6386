"""How much memory a GPU has left that shares it with the processor: a Jetson's.

`cudaMemGetInfo` there tells what lies idle, and leaves out the page cache, which the kernel gives up as soon
as memory is asked for: after a model was read from disk, a plan that fits would be refused. `MemAvailable`
counts that cache. Beyond it the kernel swaps or kills, so that some of it is left alone.
"""

import re
from pathlib import Path
from typing import Final

from stageloom.edge_agent.machine.utilisation import is_tegra, text_of

_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)
_TOTAL = re.compile(r"^MemTotal:\s+(\d+) kB", re.MULTILINE)
_LEAST_RESERVE_BYTES: Final = 256 << 20
_RESERVED_SHARE: Final = 1 / 16


def free_device_bytes(told_bytes: int, proc: Path = Path("/proc"), root: Path = Path("/")) -> int:
    """What a plan may take; `told_bytes` is CUDA's own answer, which holds where the GPU has its own memory.

    On a Jetson it is what the kernel has available less a sixteenth of all memory, at least 256 MiB, for the
    system and for what libraries allocate outside of plans.
    """
    if not is_tegra(proc, root):
        return told_bytes
    text = text_of(proc / "meminfo") or ""
    available, total = _AVAILABLE.search(text), _TOTAL.search(text)
    if available is None or total is None:
        return told_bytes
    reserve = max(_LEAST_RESERVE_BYTES, int(_RESERVED_SHARE * (int(total[1]) << 10)))
    return max(0, (int(available[1]) << 10) - reserve)
