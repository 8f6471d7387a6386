"""What a disk may hold after a power cut, from the calls that a process made before it.

The model is stricter than ext4, xfs and btrfs are by default:

- What was written to a file since the last fsync of that file is there, is not, or is there in part; each
  write by itself, so a later one may have reached the disk and an earlier one not (zeros are in its place).
- Names that were made, renamed or removed since the last fsync of their directory are kept in order up to
  some moment, and not beyond. The fsync of a file says nothing about its name.

Making a directory counts as durable at once.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import PurePosixPath
from random import Random
from typing import TypeAlias

FileId: TypeAlias = int


@dataclass(frozen=True, slots=True)
class Write:
    file: FileId
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    file: FileId
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Sync:
    file: FileId


@dataclass(frozen=True, slots=True)
class Link:
    """A new name of a new or an old file."""

    path: str
    file: FileId


@dataclass(frozen=True, slots=True)
class Rename:
    """Within one directory."""

    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Unlink:
    path: str


@dataclass(frozen=True, slots=True)
class SyncDirectory:
    path: str


Change: TypeAlias = Write | Truncate
Naming: TypeAlias = Link | Rename | Unlink
Event: TypeAlias = Change | Naming | Sync | SyncDirectory


class Loss(Enum):
    """What becomes of what was not synced."""

    NOTHING = auto()
    ALL = auto()
    SOME = auto()  # drawn for every write and directory


def disk_after(events: Sequence[Event], loss: Loss, rng: Random) -> dict[str, bytes]:
    """File contents by path, after a power cut that comes behind the last event."""
    changes: defaultdict[FileId, list[Change]] = defaultdict(list)
    namings: defaultdict[str, list[Naming]] = defaultdict(list)
    durable: defaultdict[FileId | str, int] = defaultdict(int)
    for event in events:
        match event:
            case Write() | Truncate():
                changes[event.file].append(event)
            case Sync(file):
                durable[file] = len(changes[file])
            case SyncDirectory(path):
                durable[path] = len(namings[path])
            case _:
                namings[_directory(event)].append(event)
    names: dict[str, FileId] = {}
    for directory, made in namings.items():
        for naming in made[: _kept(durable[directory], len(made), loss, rng)]:
            _apply(names, naming)
    return {path: _content(changes[file], durable[file], loss, rng) for path, file in sorted(names.items())}


def _directory(naming: Naming) -> str:
    path = naming.new if isinstance(naming, Rename) else naming.path
    return str(PurePosixPath(path).parent)


def _kept(durable: int, total: int, loss: Loss, rng: Random) -> int:
    if loss is Loss.SOME:
        return rng.randint(durable, total)
    return total if loss is Loss.NOTHING else durable


def _apply(names: dict[str, FileId], naming: Naming) -> None:
    match naming:
        case Link(path, file):
            names[path] = file
        case Rename(old, new):
            names[new] = names.pop(old)
        case Unlink(path):
            del names[path]


def _content(changes: Sequence[Change], durable: int, loss: Loss, rng: Random) -> bytes:
    content = bytearray()
    for at, change in enumerate(changes):
        if at < durable or loss is Loss.NOTHING:
            _change(content, change)
        elif loss is Loss.SOME and rng.random() < 0.7:
            _change(content, _torn(change, rng))
    return bytes(content)


def _torn(change: Change, rng: Random) -> Change:
    if isinstance(change, Truncate) or rng.random() < 0.5:
        return change
    return Write(change.file, change.offset, change.data[: rng.randint(0, len(change.data))])


def _change(content: bytearray, change: Change) -> None:
    if isinstance(change, Truncate):
        del content[change.size_bytes :]
        content.extend(bytes(change.size_bytes - len(content)))
    elif change.data:
        content.extend(bytes(max(0, change.offset - len(content))))
        content[change.offset : change.offset + len(change.data)] = change.data
