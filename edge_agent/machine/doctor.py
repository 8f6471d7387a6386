"""Is this machine fit for an agent? Each check looks at one thing and says what to do about it.

Nothing heavy is imported: versions come from the installed metadata, so that a broken package is named and
not run.
"""

import os
import resource
import shutil
import stat
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from stageloom.edge_agent.config import SETTINGS_NAME, load_config
from stageloom.edge_agent.lifecycle.alone import require_names
from stageloom.edge_agent.machine.device import cpu_name, gpu_names, installed
from stageloom.edge_agent.machine.onnx_facts import OnnxFacts, onnx_facts
from stageloom.edge_agent.machine.torch_facts import TorchFacts, torch_facts
from stageloom.shared.errors import SettingError
from stageloom.shared.systemd.install import UNIT_DIRECTORY

_NEEDED = ("msgpack", "msgspec", "numpy", "pyzmq")
_IMPORT_NAMES = {"pyzmq": "zmq"}
_LEAST_FREE_BYTES = 512 << 20
_LEAST_FILES = 1024
_BUILT_S = 1_735_689_600  # 2025-01-01: a clock before this was never set


class Check(Struct, frozen=True, kw_only=True):
    """One finding; `result` is ok, warn or fail."""

    name: str
    result: str
    detail: str
    remedy: str = ""


def examine(home: Path) -> list[Check]:
    """All checks."""
    checks: list[Callable[[], Check]] = [
        _python,
        _packages,
        lambda: runtime_check(installed(("onnxruntime", "onnxruntime-gpu"))),
        lambda: gpu_check(gpu_names(), installed(("onnxruntime", "onnxruntime-gpu", "torch"))),
        lambda: onnx_cuda_check(onnx_facts(), gpu_names()),
        lambda: torch_check(torch_facts(), gpu_names()),
        lambda: home_check(home),
        lambda: settings_check(home),
        lambda: disk_check(home),
        lambda: key_check(home),
        _files,
        _shared_memory,
        lambda: clock_check(time.time()),
        lambda: unit_check(UNIT_DIRECTORY / "stageloom-agent.service"),
    ]
    return [check() for check in checks]


def _python() -> Check:
    number = ".".join(map(str, sys.version_info[:3]))
    return Check(name="python", result="ok", detail=f"{number}, {cpu_name()}, {os.cpu_count()} processors")


def _packages() -> Check:
    missing = [name for name in _NEEDED if find_spec(_IMPORT_NAMES.get(name, name)) is None]
    if missing:
        return Check(
            name="packages",
            result="fail",
            detail=f"missing: {', '.join(missing)}",
            remedy="pip install 'stageloom[edge]'",
        )
    found = installed(_NEEDED)
    return Check(name="packages", result="ok", detail=", ".join(f"{n} {v}" for n, v in found.items()))


def runtime_check(versions: dict[str, str]) -> Check:
    """onnxruntime and onnxruntime-gpu share an import name and overwrite each other's files."""
    if len(versions) == 2:
        return Check(
            name="onnxruntime",
            result="fail",
            detail="onnxruntime and onnxruntime-gpu are both installed and break each other",
            remedy="pip uninstall both, then install one of them",
        )
    if versions:
        ((name, number),) = versions.items()
        return Check(name="onnxruntime", result="ok", detail=f"{name} {number}")
    if find_spec("onnxruntime") is not None:
        return Check(name="onnxruntime", result="ok", detail="present, installed by other means")
    return Check(
        name="onnxruntime",
        result="warn",
        detail="not installed: plans for the onnx executor cannot run",
        remedy="pip install 'stageloom[onnx]', or the wheel that your GPU's vendor offers",
    )


def gpu_check(names: list[str], versions: dict[str, str]) -> Check:
    """Is there a GPU, and something that can use it?"""
    if not names:
        return Check(name="gpu", result="ok", detail="none: models run on the processor")
    usable = [name for name in ("onnxruntime-gpu", "torch") if name in versions]
    if usable:
        return Check(name="gpu", result="ok", detail=f"{', '.join(names)}, used through {', '.join(usable)}")
    return Check(
        name="gpu",
        result="warn",
        detail=f"{', '.join(names)}, but nothing installed here uses it",
        remedy="pip install 'stageloom[torch]' or 'stageloom[onnx-gpu]'",
    )


def onnx_cuda_check(facts: OnnxFacts, gpus: list[str]) -> Check:
    """Is CUDAExecutionProvider there, and can the executor onnx_cuda use it?"""
    install = "pip uninstall onnxruntime, then pip install 'stageloom[edge,onnx-gpu]'"
    if not facts.cuda:
        why = "this onnxruntime has no CUDAExecutionProvider" if facts.present else "no onnxruntime"
        detail = f"{why}: plans for onnx_cuda cannot run"
        return Check(name="onnx_cuda", result="ok", detail=detail, remedy=f"{install} if they should")
    if not facts.bindings:
        return Check(
            name="onnx_cuda",
            result="warn",
            detail="CUDAExecutionProvider is there, cuda-bindings is not: onnx_cuda cannot run",
            remedy="pip install 'stageloom[edge,onnx-gpu]'",
        )
    detail = f"CUDAExecutionProvider, cuda-bindings {facts.bindings}"
    if not gpus:
        return Check(name="onnx_cuda", result="ok", detail=f"{detail}: onnx_cuda has no GPU")
    return Check(name="onnx_cuda", result="ok", detail=f"{detail}: onnx_cuda can run on {', '.join(gpus)}")


def torch_check(facts: TorchFacts, gpus: list[str]) -> Check:
    """What the executors torch_cpu and torch_cuda would find, and what torch_cuda lacks."""
    if not facts.torch:
        return Check(
            name="torch",
            result="ok",
            detail="not installed: plans for torch_cuda and torch_cpu cannot run",
            remedy="pip install 'stageloom[torch]' if they should",
        )
    parts = [f"torch {facts.torch}", f"CUDA {facts.cuda}" if facts.cuda else "no CUDA", *facts.libraries]
    if facts.driver:
        parts.append(f"driver {facts.driver}")
    detail = ", ".join(parts)
    if not gpus:
        return Check(name="torch", result="ok", detail=f"{detail}: torch_cpu can run, torch_cuda has no GPU")
    if not facts.cuda:
        return Check(
            name="torch",
            result="warn",
            detail=f"{detail}: this torch cannot use {', '.join(gpus)}",
            remedy="install the torch wheel for the driver's CUDA version",
        )
    if not facts.driver and "jetson" not in gpus[0].lower():
        return Check(
            name="torch",
            result="warn",
            detail=f"{detail}: no NVIDIA driver is loaded",
            remedy="install the driver and load its kernel module",
        )
    return Check(name="torch", result="ok", detail=f"{detail}: torch_cuda and torch_cpu can run")


def home_check(home: Path) -> Check:
    """The state directory can be written by us and read by nobody else."""
    directory = home
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    if not os.access(directory, os.W_OK | os.X_OK):
        return Check(
            name="home",
            result="fail",
            detail=f"{directory} cannot be written",
            remedy="mend its permissions or set STAGELOOM_AGENT_HOME",
        )
    if home.exists() and stat.S_IMODE(home.stat().st_mode) & 0o022:
        return Check(
            name="home",
            result="fail",
            detail=f"{home} can be written by others",
            remedy=f"chmod go-w {home}",
        )
    return Check(name="home", result="ok", detail=str(home.absolute()))


def settings_check(home: Path) -> Check:
    """`run` would take the settings file."""
    try:
        config = load_config(home)
        if config.models:
            require_names(config)
    except SettingError as error:
        return Check(name="settings", result="fail", detail=error.cause, remedy=error.remedy)
    file = home / SETTINGS_NAME
    return Check(name="settings", result="ok", detail=str(file) if file.exists() else "all defaults")


def disk_check(home: Path) -> Check:
    """There is room for artifacts and telemetry."""
    directory = home
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    detail = f"{free >> 20} MiB free in {directory.absolute()}"
    if free < _LEAST_FREE_BYTES:
        return Check(
            name="disk",
            result="warn",
            detail=detail,
            remedy=f"free {_LEAST_FREE_BYTES >> 20} MiB, or artifacts may not fit",
        )
    return Check(name="disk", result="ok", detail=detail)


def key_check(home: Path) -> Check:
    """Secret files are for the owner only."""
    readable = [
        path.name
        for path in (sorted(home.iterdir()) if home.is_dir() else [])
        if path.is_file() and "key" in path.name and stat.S_IMODE(path.stat().st_mode) & 0o077
    ]
    if readable:
        return Check(
            name="keys",
            result="fail",
            detail=f"others can read {', '.join(readable)}",
            remedy="chmod 600 them, and join again with a new token if that was so for long",
        )
    return Check(name="keys", result="ok", detail="for the owner only")


def _files() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _LEAST_FILES:
        return Check(
            name="open files",
            result="warn",
            detail=f"at most {soft}",
            remedy=f"raise the limit to {_LEAST_FILES} (`ulimit -n {_LEAST_FILES}`)",
        )
    return Check(name="open files", result="ok", detail=f"at most {soft}")


def _shared_memory() -> Check:
    try:
        os.close(os.memfd_create("stageloom-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (OSError, AttributeError) as error:
        return Check(
            name="shared memory",
            result="fail",
            detail=f"memory files cannot be made: {error}",
            remedy="use Linux 3.17 or later; a sandbox may forbid memfd_create",
        )
    return Check(name="shared memory", result="ok", detail="memory files can be sealed")


def unit_check(unit: Path) -> Check:
    """An installed unit starts a program that there is; those of 0.1.0 start `python -m edge_agent`."""
    try:
        lines = unit.read_text(encoding="utf-8").splitlines()
    except OSError:
        return Check(name="unit", result="ok", detail="not installed as a service")
    command = next((line.partition("=")[2] for line in lines if line.startswith("ExecStart=")), "")
    words = command.split()
    if "-m" in words or not words or not os.access(words[0].strip('"'), os.X_OK):
        return Check(
            name="unit",
            result="fail",
            detail=f"{unit} starts `{command}`, which this version does not have",
            remedy="run `sudo stageloom-agent install` again, with the options of the first time",
        )
    return Check(name="unit", result="ok", detail=f"{unit} starts {words[0]}")


def clock_check(now_s: float) -> Check:
    """Telemetry carries wall-clock times."""
    if now_s < _BUILT_S:
        return Check(
            name="clock",
            result="warn",
            detail=f"it says {time.strftime('%Y-%m-%d', time.gmtime(now_s))}",
            remedy="set the clock, for example by NTP: telemetry would carry that date",
        )
    return Check(name="clock", result="ok", detail=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now_s)))
