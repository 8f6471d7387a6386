"""Which addresses a process listens on, as Linux tells."""

import os
from pathlib import Path

IPV4_LOOPBACK = "0100007F"  # as /proc/net/tcp spells 127.0.0.1 on a little-endian machine
MAPPED_LOOPBACK = "0000000000000000FFFF0000" + IPV4_LOOPBACK
IPV6_LOOPBACK = "00000000000000000000000001000000"
_LISTEN = "0A"


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return []
    return [one for child in children for one in (child, *descendants(child))]


def listening_addresses(pid: int) -> list[str]:
    """The addresses of its listening TCP sockets, in hexadecimal."""
    try:
        sockets = {os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return []
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1].partition(":")[0])
    return found
