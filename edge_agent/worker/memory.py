"""How much memory this machine can still give."""

from pathlib import Path
from typing import Final

_MEMORY: Final = Path("/proc/meminfo")
_SHARE: Final = 0.8
"""Of what is available; the rest is for what serving needs meanwhile."""


def spare_bytes(source: Path = _MEMORY) -> int | None:
    """What may be taken for something that can be left out; None where the system does not say."""
    try:
        for line in source.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(_SHARE * 1024 * int(value.split()[0]))
    except (OSError, ValueError, IndexError):
        pass
    return None
