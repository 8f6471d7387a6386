"""Files that many tests of a process look at, made once; they are gone when it ends."""

import atexit
import shutil
from pathlib import Path
from tempfile import mkdtemp


def scratch() -> Path:
    """An empty folder that lasts as long as this process."""
    made = mkdtemp(prefix="stageloom-test-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)
