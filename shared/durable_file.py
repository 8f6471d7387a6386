"""Files that a power cut leaves either as they were or as they were to be."""

import os
from pathlib import Path


def write_synced(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a whole file and wait until the disk has it.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file by one that the disk has.

    Raises:
        OSError: it cannot be written; the old one stands.
    """
    new = path.with_name(f"{path.name}.new")
    write_synced(new, data, mode)
    new.replace(path)
    sync_directory(path.parent)


def create_synced(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Make a new file that the disk has, whole or not at all.

    Raises:
        FileExistsError: there is one, which stands.
        OSError: it cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # of whoever was interrupted, with whatever mode it has
    write_synced(new, data, mode)
    try:
        os.link(new, path)  # a rename would replace what is there
    finally:
        new.unlink()
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Have a file's content, and its name, reach the disk.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Have the names in a directory reach the disk.

    Raises:
        OSError: the disk failed.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
