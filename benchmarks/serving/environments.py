"""A virtual environment for each rival server: none of them is installed beside Stageloom."""

import json
import subprocess
import venv
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

from benchmarks.real_models.fetching import NoRegistryError
from benchmarks.runner import progress

CACHE: Final = Path("var/serving")
SERVERS: Final[Mapping[str, tuple[str, ...]]] = {
    "litserve": ("litserve==0.2.19",),
    "mlserver": ("mlserver==1.7.1", "uvloop==0.21.0"),  # its workers do not start over a newer uvloop
}
_INSTALL_S: Final = 600.0
_VERSIONS: Final = (
    "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
)
_TOLD: Final = ("onnxruntime", "numpy", "grpcio", "fastapi", "uvicorn")


def python_of(server: str, cache: Path) -> Path:
    """The interpreter of a server's environment, made unless `cache` has it; its onnxruntime is as ours.

    Raises:
        NoRegistryError: it cannot be installed.
    """
    pins = [*SERVERS[server], *(f"{name}=={version(name)}" for name in ("onnxruntime", "numpy"))]
    folder = cache / "-".join(pins).replace("==", "-")
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if not complete.exists():
        progress(f"installing {pins[0]}")
        venv.create(folder, clear=True, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        try:
            done = subprocess.run(
                [*command, *pins],
                capture_output=True,
                text=True,
                timeout=_INSTALL_S,
            )
        except subprocess.TimeoutExpired as error:
            raise NoRegistryError(f"{server} took longer than {_INSTALL_S:g} s") from error
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise NoRegistryError(f"{server}: {errors[0] if errors else 'pip failed'}")
        complete.touch()
    return python.absolute()


def versions_in(server: str, python: Path) -> dict[str, str]:
    """What an environment has of the server and of what it is built on."""
    done = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return {name: found[name] for name in (server, *_TOLD) if name in found}
