"""A real process's calls that change files below one folder, as `strace` sees them.

Each thread has a file of its own (`-ff`), so that no line is broken by another thread's; the times at which
the calls began bring them into one order.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.adversary.disk import (
    Event,
    FileId,
    Link,
    Rename,
    Sync,
    SyncDirectory,
    Truncate,
    Unlink,
    Write,
)

_CALLS = (
    "openat,open,creat,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,lseek,fsync,fdatasync,"
    "ftruncate,truncate,rename,renameat,renameat2,link,linkat,unlink,unlinkat"
)
_LINE = re.compile(r"(\d+\.\d+) (\w+)\((.*)\) += (\d+)(?:<.*>)?")  # a call that failed has -1 there
_DESCRIPTOR = re.compile(r"(\d+)<([^>]*)>")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@dataclass(frozen=True)
class Recorded:
    """One event, and when its call began, in seconds since 1970."""

    at_s: float
    event: Event


def why_not() -> str:
    """Empty where processes can be traced here, or what is missing."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    done = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"ptrace is not allowed: {done.stderr.strip()[-200:]}"


def traced(prefix: Path) -> list[str]:
    """What to put before a command; its calls go to files PREFIX.PID."""
    options = ("-ff", "-y", "-xx", "-ttt", "-s", str(64 << 20), "--seccomp-bpf", "-e", f"trace={_CALLS}")
    return ["strace", *options, "-o", str(prefix)]


def recorded(prefix: Path, root: Path) -> list[Recorded]:
    """What the traced processes did to files below `root`, in order; shared memory of SQLite left out."""
    lines = (
        line
        for path in prefix.parent.glob(f"{prefix.name}.*")
        for line in path.read_text(encoding="ascii", errors="replace").splitlines()
    )
    found = sorted((match.groups() for line in lines if (match := _LINE.fullmatch(line))), key=_began_s)
    reading = _Reading(str(root))
    return [
        Recorded(float(at_s), event)
        for at_s, name, arguments, result in found
        for event in reading.events(name, arguments, int(result))
    ]


def _began_s(call: Sequence[str]) -> float:
    return float(call[0])


@dataclass
class _Reading:
    """Names, sizes and positions while the calls are gone through."""

    root: str
    files: dict[str, FileId] = field(default_factory=dict)
    sizes: dict[FileId, int] = field(default_factory=dict)
    positions: dict[tuple[int, str], int] = field(default_factory=dict)
    appending: set[tuple[int, str]] = field(default_factory=set)
    directories: set[str] = field(default_factory=set)

    def events(self, name: str, arguments: str, result: int) -> Iterator[Event]:
        """What one call that succeeded did to the files."""
        if name in ("openat", "open", "creat"):
            yield from self._opened(arguments, result)
        elif name in ("rename", "renameat", "renameat2"):
            old, new = map(_decoded, _TEXT.findall(arguments)[-2:])
            if old in self.files:
                assert PurePosixPath(old).parent == PurePosixPath(new).parent, (old, new)
                self.files[new] = self.files.pop(old)
                yield Rename(old, new)
        elif name in ("link", "linkat"):
            old, new = map(_decoded, _TEXT.findall(arguments)[-2:])
            if old in self.files:
                self.files[new] = self.files[old]
                yield Link(new, self.files[old])
        elif name in ("unlink", "unlinkat"):
            path = _decoded(_TEXT.findall(arguments)[-1])
            if self.files.pop(path, None) is not None:
                yield Unlink(path)
        elif found := _DESCRIPTOR.match(arguments):
            yield from self._on_descriptor(name, int(found[1]), _decoded(found[2]), arguments, result)

    def _opened(self, arguments: str, descriptor: int) -> Iterator[Event]:
        path = _decoded(_TEXT.findall(arguments)[-1])
        if not self._ours(path):
            return
        self.positions[descriptor, path] = 0
        self.appending.discard((descriptor, path))
        if "O_APPEND" in arguments:
            self.appending.add((descriptor, path))
        if path not in self.files and "O_CREAT" in arguments:
            file = len(self.sizes)
            self.files[path], self.sizes[file] = file, 0
            self.directories.add(str(PurePosixPath(path).parent))
            yield Link(path, file)
        elif path in self.files and "O_TRUNC" in arguments:
            self.sizes[self.files[path]] = 0
            yield Truncate(self.files[path], 0)

    def _on_descriptor(
        self, name: str, descriptor: int, path: str, arguments: str, result: int
    ) -> Iterator[Event]:
        if name in ("fsync", "fdatasync") and path in self.directories:
            yield SyncDirectory(path)
        if path not in self.files:
            return
        file, key = self.files[path], (descriptor, path)
        if name in ("fsync", "fdatasync"):
            yield Sync(file)
        elif name == "lseek":
            self.positions[key] = result
        elif name == "ftruncate":
            self.sizes[file] = int(arguments.rpartition(", ")[2])
            yield Truncate(file, self.sizes[file])
        else:
            assert name in ("write", "pwrite64"), f"{name} on {path} is not understood"
            data = bytes.fromhex(_TEXT.findall(arguments)[0].replace("\\x", ""))[:result]
            if name == "pwrite64":
                offset = int(arguments.rpartition(", ")[2])
            else:
                offset = self.sizes[file] if key in self.appending else self.positions.get(key, 0)
                self.positions[key] = offset + result
            self.sizes[file] = max(self.sizes[file], offset + result)
            yield Write(file, offset, data)

    def _ours(self, path: str) -> bool:
        return path.startswith(self.root + "/") and not path.endswith("-shm")


def _decoded(text: str) -> str:
    return bytes.fromhex(text.replace("\\x", "")).decode() if text.startswith("\\x") else text
