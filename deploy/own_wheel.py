"""A wheel of this checkout as it lies here, committed or not."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
_NOT_COPIED: Final = shutil.ignore_patterns(
    ".git", ".venv*", "var", "build", "*.egg-info", "__pycache__", ".*_cache"
)


def build_wheel(folder: Path) -> Path:
    """The wheel, in `folder`; built from a copy, since setuptools packs what an old build left behind.

    Raises:
        subprocess.CalledProcessError: pip, which has said why on standard error.
    """
    copy = folder / "source"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=_NOT_COPIED)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    subprocess.run([*command, str(copy)], check=True)
    shutil.rmtree(copy)
    (wheel,) = folder.glob("stageloom-*.whl")
    return wheel
