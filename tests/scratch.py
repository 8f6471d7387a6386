"""Folders for tests: files that many tests of a process look at, and disks that can be filled."""

import atexit
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import pytest


def scratch() -> Path:
    """An empty folder that lasts as long as this process."""
    made = mkdtemp(prefix="stageloom-test-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


@contextmanager
def small_disk(size_bytes: int) -> Iterator[Path]:
    """A file system of so many bytes; the test is left out where it may not be mounted."""
    # Not below pytest's own folder: were this run killed, a mount there would fail every later one.
    folder = Path(mkdtemp(prefix="stageloom-disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        folder.rmdir()
        pytest.skip("only root may mount a small file system to fill")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


def resize_disk(folder: Path, size_bytes: int) -> None:
    """What `small_disk` gave, larger."""
    subprocess.run(["mount", "-o", f"remount,size={size_bytes}", str(folder)], check=True)
