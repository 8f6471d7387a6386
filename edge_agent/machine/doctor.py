"""Is this machine fit for an agent? Each check looks at one thing and says what to do about it.

Nothing heavy is imported: versions come from the installed metadata, so that a broken package is named and
not run. Where there is a GPU, torch and onnxruntime are tried on it in processes of their own.

No remedy is a command that would replace a wheel of the GPU's vendor by one of the registry.
"""

import os
import resource
import shutil
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from stageloom.edge_agent.config import OLD_SETTINGS_NAME, SETTINGS_NAME, load_config, settings_file
from stageloom.edge_agent.executor.executors import added_executors
from stageloom.edge_agent.lifecycle.alone import require_names
from stageloom.edge_agent.machine.control_groups import WHOLE_CORES, cpu_quota, quota_warning
from stageloom.edge_agent.machine.device import cpu_flags, cpu_name, gpu_names, has_bf16, installed
from stageloom.edge_agent.machine.executors import (
    OnnxFacts,
    TorchFacts,
    added_problems,
    core_ranges,
    executor_problems,
    onnx_facts,
    torch_facts,
)
from stageloom.edge_agent.machine.gpu_trial import GpuTrial, has_kernels, run_trial
from stageloom.edge_agent.machine.jetson import how_to_install, jetpack, memory_text, toolkit_version
from stageloom.edge_agent.machine.utilisation import (
    UtilisationChain,
    is_tegra,
    l4t_release,
    this_machine,
)
from stageloom.edge_agent.metrics.settings import check_metrics
from stageloom.edge_agent.serving.settings import check_settings
from stageloom.shared.errors import StageloomError
from stageloom.shared.extensions import Extensions
from stageloom.shared.search.registry import added_schedulers
from stageloom.shared.systemd.install import PACKAGED_UNIT_DIRECTORY, UNIT_DIRECTORY
from stageloom.shared.systemd.unit import words_of
from stageloom.shared.text import counted

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


def _ok(name: str, detail: str, remedy: str = "") -> Check:
    return Check(name=name, result="ok", detail=detail, remedy=remedy)


def _warn(name: str, detail: str, remedy: str) -> Check:
    return Check(name=name, result="warn", detail=detail, remedy=remedy)


def _fail(name: str, detail: str, remedy: str) -> Check:
    return Check(name=name, result="fail", detail=detail, remedy=remedy)


def examine(home: Path) -> list[Check]:
    checks: list[Callable[[], Check]] = [
        _python,
        _packages,
        lambda: runtime_check(installed(("onnxruntime", "onnxruntime-gpu"))),
        lambda: executors_check(executor_problems() | added_problems(), sorted(os.sched_getaffinity(0))),
        lambda: quota_check(len(os.sched_getaffinity(0)), cpu_quota()),
        lambda: gpu_check(gpu_names(), installed(("onnxruntime", "onnxruntime-gpu", "torch"))),
        lambda: openvino_check(installed(("openvino",))),
        lambda: gpu_state_check(gpu_names()),
        lambda: onnx_cuda_check(onnx_facts(), gpu_names(), trial=partial(run_trial, "onnxruntime")),
        lambda: torch_check(torch_facts(), gpu_names(), trial=partial(run_trial, "torch")),
        lambda: extensions_check(added_executors(), added_schedulers()),
        lambda: home_check(home),
        lambda: settings_check(home),
        lambda: disk_check(home),
        lambda: key_check(home),
        _files,
        _shared_memory,
        lambda: clock_check(time.time()),
        lambda: unit_check((UNIT_DIRECTORY, PACKAGED_UNIT_DIRECTORY)),
    ]
    return [check() for check in checks]


def _python() -> Check:
    number = ".".join(map(str, sys.version_info[:3]))
    return _ok("python", f"{number}, {cpu_name()}, {os.cpu_count()} processors")


def _packages() -> Check:
    missing = [name for name in _NEEDED if find_spec(_IMPORT_NAMES.get(name, name)) is None]
    if missing:
        return _fail("packages", f"missing: {', '.join(missing)}", "pip install 'stageloom[edge]'")
    found = installed(_NEEDED)
    return _ok("packages", ", ".join(f"{n} {v}" for n, v in found.items()))


def runtime_check(versions: dict[str, str]) -> Check:
    """onnxruntime and onnxruntime-gpu share an import name and overwrite each other's files."""
    if len(versions) == 2:
        return _fail(
            "onnxruntime",
            "onnxruntime and onnxruntime-gpu are both installed and break each other",
            "pip uninstall both, then install one of them",
        )
    if versions:
        ((name, number),) = versions.items()
        return _ok("onnxruntime", f"{name} {number}")
    if find_spec("onnxruntime") is not None:
        return _ok("onnxruntime", "present, installed by other means")
    return _warn(
        "onnxruntime",
        "not installed: plans for the onnx executor cannot run",
        f"{how_to_install('onnx')}; for a GPU the wheel that its vendor offers",
    )


def executors_check(problems: Mapping[str, str], cores: Sequence[int]) -> Check:
    """Which executors plans can name here, on which cores, and why not the others."""
    usable = [name for name, problem in problems.items() if not problem]
    where = f"on cores {', '.join(f'{a}-{b}' if a < b else f'{a}' for a, b in core_ranges(cores))}"
    rest = "; ".join(f"not {name}: {problem}" for name, problem in problems.items() if problem)
    if not usable:
        return _fail("executors", f"none can be used; {rest}", how_to_install("onnx"))
    return _ok("executors", f"{', '.join(usable)} {where}" + (f"; {rest}" if rest else ""))


def quota_check(cores: int, quota: float) -> Check:
    """Whether control groups leave the time of all cores that the agent may run on."""
    if warning := quota_warning(cores, quota):
        return _warn("processor time", warning, WHOLE_CORES)
    return _ok("processor time", f"all of {counted(cores, 'core')}")


def extensions_check(*added: Extensions) -> Check:
    """What other packages add by entry points; none is imported."""
    problems = [error.cause for found in added for error in found.problems.values()]
    if problems:
        return _warn("extensions", "; ".join(problems), "repair that package, or uninstall it")
    names = [f"{one.name} of {one.distribution}" for found in added for one in found.usable.values()]
    return _ok("extensions", ", ".join(names) or "none")


def gpu_check(names: list[str], versions: dict[str, str]) -> Check:
    """Is there a GPU, and something that can use it?"""
    if not names:
        return _ok("gpu", "none: models run on the processor")
    usable = [name for name in ("onnxruntime-gpu", "torch") if name in versions]
    if usable:
        return _ok("gpu", f"{', '.join(names)}, used through {', '.join(usable)}")
    return _warn(
        "gpu",
        f"{', '.join(names)}, but nothing installed here uses it",
        f"{how_to_install('torch')}, or the same of onnx-gpu",
    )


def gpu_state_check(
    names: Sequence[str],
    machine: UtilisationChain | None = None,
    proc: Path = Path("/proc"),
    root: Path = Path("/"),
) -> Check:
    """System, power mode, clocks and memory: what figures of two machines may differ by."""
    if not names:
        return _ok("gpu state", "no GPU")
    machine = machine or this_machine()
    release, number = l4t_release(root), jetpack(root)
    system = f"L4T {release}" + (f" (JetPack {number})" if number else "") if release else ""
    toolkit, mode = toolkit_version(root), machine.power_mode()
    clocks = [f"{metric.name} {metric.text}" for metric in machine.clocks() if metric.value is not None]
    parts = (
        system,
        toolkit and f"CUDA toolkit {toolkit}",
        mode and f"power mode {mode}",
        *clocks,
        memory_text(proc) if is_tegra(proc, root) else "",
    )
    return _ok("gpu state", ", ".join(part for part in parts if part) or "the driver tells nothing")


def openvino_check(versions: dict[str, str]) -> Check:
    """What the executor openvino would find."""
    if versions:
        return _ok("openvino", f"openvino {versions['openvino']}: openvino can run, without its telemetry")
    return _ok(
        "openvino",
        "not installed: plans for openvino cannot run",
        "pip install 'stageloom[edge,openvino]' if they should",
    )


def onnx_cuda_check(
    facts: OnnxFacts, gpus: list[str], *, trial: Callable[[], GpuTrial] | None = None
) -> Check:
    """Is CUDAExecutionProvider there, and can the executor onnx_cuda use it? `trial` runs a kernel by it."""
    install = how_to_install("onnx-gpu")
    if not is_tegra():
        install = f"pip uninstall onnxruntime, then {install}"
    if not facts.cuda:
        why = "this onnxruntime has no CUDAExecutionProvider" if facts.present else "no onnxruntime"
        detail = f"{why}: plans for onnx_cuda cannot run"
        return _ok("onnx_cuda", detail, f"{install} if they should")
    if not facts.bindings:
        return _warn(
            "onnx_cuda",
            "CUDAExecutionProvider is there, cuda-bindings is not: onnx_cuda cannot run",
            f"pip install 'cuda-bindings=={'12' if jetpack() == '6' else '13'}.*', for the driver's CUDA",
        )
    detail = f"CUDAExecutionProvider, cuda-bindings {facts.bindings}"
    if not gpus:
        return _ok("onnx_cuda", f"{detail}: onnx_cuda has no GPU")
    found = trial() if trial is not None else None
    if found is not None and not found.worked:
        return _warn(
            "onnx_cuda",
            f"{detail}: no kernel ran on {', '.join(gpus)}: {found.error or 'its result was wrong'}",
            "take the wheel that was built for this GPU and this CUDA, with their cuDNN",
        )
    tried = ", a kernel ran" if found is not None else ""
    return _ok("onnx_cuda", f"{detail}{tried}: onnx_cuda can run on {', '.join(gpus)}")


def torch_check(facts: TorchFacts, gpus: list[str], *, trial: Callable[[], GpuTrial] | None = None) -> Check:
    """What the executors torch_cpu and torch_cuda would find, and what torch_cuda lacks.

    `trial` allocates a tensor on the GPU and tells for which architectures torch was built.
    """
    if not facts.torch:
        return _ok(
            "torch",
            "not installed: plans for torch_cuda and torch_cpu cannot run",
            f"{how_to_install('torch')} if they should",
        )
    parts = [f"torch {facts.torch}", f"CUDA {facts.cuda}" if facts.cuda else "no CUDA", *facts.libraries]
    if facts.driver:
        parts.append(f"driver {facts.driver}")
    detail = ", ".join(parts)
    if not gpus:
        return _ok("torch", f"{detail}: torch_cpu can run, torch_cuda has no GPU")
    if not facts.cuda:
        return _warn(
            "torch",
            f"{detail}: this torch cannot use {', '.join(gpus)}",
            "install the torch wheel for the driver's CUDA version",
        )
    if not facts.driver and "jetson" not in gpus[0].lower():
        return _warn(
            "torch", f"{detail}: no NVIDIA driver is loaded", "install the driver and load its kernel module"
        )
    if trial is not None and (problem := _trial_problem(trial(), parts, tegra=is_tegra())):
        return _warn(
            "torch",
            f"{', '.join(parts)}: {problem}",
            "take the torch wheel whose architectures have this GPU's",
        )
    return _ok("torch", f"{', '.join(parts)}: torch_cuda and torch_cpu can run")


def _trial_problem(found: GpuTrial, parts: list[str], *, tegra: bool) -> str:
    """Why torch does not reach the GPU, empty where it does; what it told goes to `parts`."""
    if found.architectures:
        parts.append(f"kernels for {' '.join(found.architectures)}")
    if found.capability is not None:
        own = f"sm_{found.capability[0]}{found.capability[1]}"
        parts.append(f"the GPU is {own}")
        if found.architectures and not has_kernels(found.architectures, found.capability, tegra=tegra):
            return f"this torch has no kernels for {own}"
    if not found.worked:
        return f"no tensor could be allocated: {found.error or 'its values were wrong'}"
    parts.append("a tensor was allocated")
    return ""


def _nearest(home: Path) -> Path:
    """The directory itself, or the nearest one above it that exists."""
    return next((path for path in (home, *home.parents) if os.path.exists(path)), home)


def home_check(home: Path) -> Check:
    """The state directory can be written by us and read by nobody else."""
    directory = _nearest(home)
    if not os.access(directory, os.W_OK | os.X_OK | (os.R_OK if directory == home else 0)):
        return _fail(
            "home",
            f"{directory} cannot be read and written",
            "run as the agent's account, mend its permissions, or set STAGELOOM_AGENT_HOME",
        )
    if home.exists() and stat.S_IMODE(home.stat().st_mode) & 0o022:
        return _fail("home", f"{home} can be written by others", f"chmod go-w {home}")
    return _ok("home", str(home.absolute()))


def settings_check(home: Path) -> Check:
    """`run` would take the settings file."""
    try:
        config = load_config(home)
        require_names(config)
        check_settings(config.serving)
        check_metrics(config.metrics)
    except StageloomError as error:
        return _fail("settings", error.cause, error.remedy)
    if config.precision == "bf16" and not has_bf16(cpu_flags()):
        return _warn(
            "settings",
            "precision is bf16, and this processor has no units for bfloat16",
            "set precision to fp32",
        )
    file, old = settings_file(home), home / OLD_SETTINGS_NAME
    if file == old:
        convert = f"stageloom-agent config show --toml --home {home} > {home / SETTINGS_NAME}"
        return _warn("settings", f"{file} is of version 0.1.0", f"`{convert}`, then remove {old}")
    if os.path.exists(old):
        return _warn("settings", f"{file} is in force, and {old} of version 0.1.0 is not", f"remove {old}")
    return _ok("settings", str(file) if file.exists() else "all defaults")


def disk_check(home: Path) -> Check:
    """There is room for artifacts and telemetry."""
    directory = _nearest(home)
    free = shutil.disk_usage(directory).free
    detail = f"{free >> 20} MiB free in {directory.absolute()}"
    if free < _LEAST_FREE_BYTES:
        return _warn("disk", detail, f"free {_LEAST_FREE_BYTES >> 20} MiB, or artifacts may not fit")
    return _ok("disk", detail)


def key_check(home: Path) -> Check:
    """Secret files are for the owner only."""
    try:
        readable = [
            path.name
            for path in (sorted(home.iterdir()) if home.is_dir() else [])
            if path.is_file() and "key" in path.name and stat.S_IMODE(path.stat().st_mode) & 0o077
        ]
    except OSError as error:
        return _warn("keys", f"{home} cannot be read: {error.strerror}", "run as the agent's account")
    if readable:
        return _fail(
            "keys",
            f"others can read {', '.join(readable)}",
            "chmod 600 them, and join again with a new token if that was so for long",
        )
    return _ok("keys", "for the owner only")


def _files() -> Check:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # the agent raises its own limit to the hard one
    if most < _LEAST_FILES:
        return _warn(
            "open files", f"at most {most}", f"raise the hard limit to {_LEAST_FILES} (`ulimit -Hn`)"
        )
    return _ok("open files", f"at most {most}")


def _shared_memory() -> Check:
    try:
        os.close(os.memfd_create("stageloom-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (OSError, AttributeError) as error:
        return _fail(
            "shared memory",
            f"memory files cannot be made: {error}",
            "use Linux 3.17 or later; a sandbox may forbid memfd_create",
        )
    return _ok("shared memory", "memory files can be sealed")


def unit_check(directories: Sequence[Path]) -> Check:
    """The unit in the first of systemd's directories that has one starts a program that there is.

    Those of 0.1.0 start `python -m edge_agent`.
    """
    units = [directory / "stageloom-agent.service" for directory in directories]
    unit = next((path for path in units if path.exists()), None)
    if unit is None:
        return _ok("unit", "not installed as a service")
    lines = unit.read_text(encoding="utf-8").splitlines()
    command = next((line.partition("=")[2] for line in lines if line.startswith("ExecStart=")), "")
    words = words_of(command)
    if "-m" in words or not words or not os.access(words[0], os.X_OK):
        return _fail(
            "unit",
            f"{unit} starts `{command}`, which this version does not have",
            "run `sudo stageloom-agent install` again, with the options of the first time",
        )
    return _ok("unit", f"{unit} starts {words[0]}")


def clock_check(now_s: float) -> Check:
    """Telemetry carries wall-clock times."""
    if now_s < _BUILT_S:
        return _warn(
            "clock",
            f"it says {time.strftime('%Y-%m-%d', time.gmtime(now_s))}",
            "set the clock, for example by NTP: telemetry would carry that date",
        )
    return _ok("clock", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now_s)))
