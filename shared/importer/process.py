"""Run the importing child process under limits and turn its outcome into a report or a `ModelError`."""

import json
import math
import os
import re
import resource
import selectors
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from stageloom import shared
from stageloom.shared.blas_threads import ONE_THREAD
from stageloom.shared.errors import ExecutorError, ModelError, NotNow, OpenInput, SettingError, UnpinnedShape
from stageloom.shared.module_command import module_command

_MAX_PROGRESS_CHARS = 1 << 16
RESULT_NAME = "result.json"
ARTIFACT_NAME = "artifact"
STORAGE_EXIT = 64
_TAIL_CHARS = 200
_OUT_OF_MEMORY = (
    "memoryerror", "bad_alloc", "bad allocation", "failed to allocate", "out of memory",
    "cannot allocate memory", "failed to map segment", "can't start new thread", "libgcc_s.so.1",
)  # fmt: skip
"""Parts of the messages by which libraries report that the memory limit was met."""
GIB = 1 << 30
VARIABLE: Final = "STAGELOOM_IMPORT_LIMITS"
OF_ONE_PROTOBUF: Final = "split the model, or store its weights in float16: one ONNX file ends at 2 GiB"
_SETTABLE: Final = {
    "memory_bytes": 1 << 44,
    "tensor_bytes": 1 << 40,
    "nodes": 1 << 30,
    "wall_s": 1_000_000,
    "cpu_s": 1_000_000,
}
"""What `VARIABLE` takes, each up to here: the other limits are those of a protobuf."""
_UNITS: Final = ("", "K", "M", "G", "T")
_OF_HOST: Final = {
    "memory_bytes": (resource.RLIMIT_AS, "ulimit -Hv"),
    "cpu_s": (resource.RLIMIT_CPU, "ulimit -Ht"),
}

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ImportLimits:
    """Limits of one import of an untrusted file; `limits_in_force` has those that a user set."""

    file_bytes: int = 2 * GIB - 1  # the model file with its external data; a protobuf cannot be larger
    memory_bytes: int = 4 * GIB  # address space of the importing child process
    tensor_bytes: int = GIB  # one run-time value of batch 1, or one folded constant
    constant_bytes: int = 2 * GIB - (1 << 24)  # all weights once constants are folded
    nodes: int = 100_000  # nodes of the normalised graph
    wall_s: float = 300.0
    cpu_s: int = 600


def limits_in_force(environment: Mapping[str, str]) -> ImportLimits:
    """The limits of imports, with those that `VARIABLE` sets: `memory_bytes=8G,wall_s=900`.

    Raises:
        SettingError: it names something else, or a number that cannot be used.
    """
    chosen: dict[str, int] = {}
    for part in filter(None, environment.get(VARIABLE, "").replace(" ", "").split(",")):
        name, _, text = part.partition("=")
        if name not in _SETTABLE:
            raise SettingError(
                f"{VARIABLE} names no limit {name[:40]!r}",
                remedy=f"write it like memory_bytes=8G,wall_s=900; there are {', '.join(_SETTABLE)}",
            )
        units = "[KMGT]?" if name.endswith("_bytes") else ""
        found = re.fullmatch(f"([0-9]{{1,18}})({units})", text)
        chosen[name] = int(found[1]) << 10 * _UNITS.index(found[2]) if found else 0
        if not 1 <= chosen[name] <= _SETTABLE[name]:
            raise SettingError(
                f"{name} = {text[:40]!r} in {VARIABLE} cannot be used",
                remedy=f"write a whole number from 1 to {_written(name, _SETTABLE[name])}",
            )
    return replace(ImportLimits(), **chosen)


def how_to_raise(name: str, limits: ImportLimits, least: int = 0) -> str:
    """The remedy where a limit was met: a setting to paste; `least` is what is known to be needed.

    It keeps those that are raised already.
    """
    usual = ImportLimits()
    raised = {one: getattr(limits, one) for one in _SETTABLE if getattr(limits, one) > getattr(usual, one)}
    raised[name] = min(max(2 * getattr(limits, name), least), _SETTABLE[name])
    setting = ",".join(f"{one}={_written(one, math.ceil(value))}" for one, value in raised.items())
    return f"set {VARIABLE}={setting} in the environment if you trust the file"


def _written(name: str, value: int) -> str:
    """A value as `limits_in_force` reads it."""
    power = 0
    while name.endswith("_bytes") and value % 1024 == 0 and power < len(_UNITS) - 1:
        value, power = value >> 10, power + 1
    return f"{value}{_UNITS[power]}"


def within_host(which: int, wanted: int) -> int:
    """The limit that is wanted, or the hard one that this host sets on its processes where that is lower."""
    hard = resource.getrlimit(which)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def require_model_file(path: Path, limits: ImportLimits) -> None:
    """Check the file before a child process is started; no library is needed.

    Raises:
        ModelError: it is empty or too large; `NotNow` if it is no readable regular file at present.
    """
    try:
        status = path.stat()
        readable = os.access(path, os.R_OK)
    except (OSError, ValueError) as error:
        raise NotNow(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}",
            remedy="give the path of an ONNX file",
        ) from error
    if not stat.S_ISREG(status.st_mode) or not readable:
        raise NotNow(f"{path} is not a readable file", remedy="give the path of an ONNX file")
    if status.st_size == 0:
        raise ModelError(f"{path.name} is empty", remedy="export or copy the model again")
    if status.st_size > limits.file_bytes:
        raise ModelError(
            f"{path.name} has {status.st_size} bytes, the limit is {limits.file_bytes}",
            remedy=OF_ONE_PROTOBUF,
        )


def run_child(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    scratch: Path,
    limits: ImportLimits,
    progress: Progress,
    *,
    smallest: Mapping[str, Sequence[int]] | None = None,
    inputs_only: bool = False,
) -> dict[str, Any]:
    """Import `path` in a child process that writes to `scratch`; return the report as JSON.

    With `inputs_only` the child reads the file and reports its inputs, nothing more.

    Raises:
        ModelError: the child refused the model, crashed or exceeded a limit; `NotNow` if that may pass.
        ExecutorError: a package that importing needs is not installed.
        OSError: the child could not write to `scratch`.
    """
    if missing := [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]:
        raise ExecutorError(
            f"importing {path.name} needs {' and '.join(missing)}", remedy="pip install 'stageloom[onnx]'"
        )
    request = scratch / "request.json"
    request.write_text(
        json.dumps(
            {
                "path": str(path.absolute()),
                "shapes": {name: [int(d) for d in dims] for name, dims in shapes.items()},
                "smallest": {name: [int(d) for d in dims] for name, dims in (smallest or {}).items()},
                "scratch": str(scratch.absolute()),
                "limits": asdict(limits),
                "inputs_only": inputs_only,
            }
        )
    )
    before_s = sum(os.times()[2:4])  # processor time of children that have ended
    with (scratch / "stderr.txt").open("wb") as stderr:
        child = subprocess.Popen(
            module_command("stageloom.shared.importer.child", str(request.absolute())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=_environment(),
            cwd=scratch,
            start_new_session=True,  # so that the group can be killed
        )
    try:
        timed_out = not _relay(child, time.monotonic() + limits.wall_s, progress)
    finally:
        _kill_group(child)
    if timed_out:
        raise NotNow(
            f"importing {path.name} took longer than {limits.wall_s:g} s",
            remedy=how_to_raise("wall_s", limits),
        )
    return _outcome(child.returncode, sum(os.times()[2:4]) - before_s, scratch, path, limits)


def _environment() -> dict[str, str]:
    """Return variables that limit each library to one thread: stacks and arenas count as address space."""
    root = str(Path(shared.__file__).absolute().parents[2])
    search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": search, "MALLOC_ARENA_MAX": "1"}


def _relay(child: subprocess.Popen[bytes], deadline: float, progress: Progress) -> bool:
    """Forward progress lines until the child ends; return False if the deadline comes first."""
    assert child.stdout is not None
    passed = 0
    with selectors.DefaultSelector() as selector, child.stdout as stdout:
        selector.register(stdout, selectors.EVENT_READ)
        pending = b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                return False
            chunk = os.read(stdout.fileno(), 4096)
            if not chunk:
                break
            passed += len(chunk)
            if passed > _MAX_PROGRESS_CHARS:
                continue
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                progress(line.decode("ascii", "replace"))
    try:
        child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and its descendants."""
    if child.stdin is not None:
        child.stdin.close()
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def _outcome(code: int, cpu_s: float, scratch: Path, path: Path, limits: ImportLimits) -> dict[str, Any]:
    try:
        outcome = json.loads((scratch / RESULT_NAME).read_text())
    except (OSError, ValueError):
        if STORAGE_EXIT < code < 2 * STORAGE_EXIT:
            raise OSError(code - STORAGE_EXIT, os.strerror(code - STORAGE_EXIT)) from None
        raise _died(code, cpu_s, scratch, path, limits) from None
    if "unpinned" in outcome:
        raise UnpinnedShape([OpenInput(*fields) for fields in outcome["unpinned"]])
    if "error" in outcome:
        cause, remedy, may_pass = outcome["error"]
        if speaks_of_memory(cause):
            raise _out_of_memory(path, limits, cause)
        raise (NotNow if may_pass else ModelError)(cause, remedy=remedy)
    if "missing" in outcome:
        raise ModuleNotFoundError(f"No module named {outcome['missing']!r}", name=outcome["missing"])
    if "exhausted" in outcome or speaks_of_memory(outcome.get("crashed", "")):
        raise _out_of_memory(path, limits)
    if "crashed" in outcome:
        raise _crashed(path, outcome["crashed"][:_TAIL_CHARS])
    report: dict[str, Any] = outcome["report"]
    return report


def speaks_of_memory(text: str) -> bool:
    """Return whether a library's message reports that the memory limit was met."""
    return any(sign in text.lower() for sign in _OUT_OF_MEMORY)


def _died(code: int, cpu_s: float, scratch: Path, path: Path, limits: ImportLimits) -> ModelError:
    tail = " ".join((scratch / "stderr.txt").read_text(errors="replace").split())[-_TAIL_CHARS:]
    held, remedy = _exceeded("cpu_s", limits)
    # At a hard limit the kernel kills, too. It counts ticks: a sixth or so more than the time that it tells.
    if -code == signal.SIGXCPU or (-code == signal.SIGKILL and 2 * cpu_s > held):
        return ModelError(f"importing {path.name} used more than {held} s of processor time", remedy=remedy)
    if -code == signal.SIGKILL:
        return NotNow(
            f"importing {path.name} was killed, most likely for want of memory",
            remedy="free some, or import it on a larger machine, such as the planner's",
        )
    if speaks_of_memory(tail):
        return _out_of_memory(path, limits)
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return _crashed(path, f"{how} {tail}".strip())


def _crashed(path: Path, how: str) -> ModelError:
    return ModelError(
        f"the importer crashed on {path.name}: {how}", remedy="do not use this file, or export it again"
    )


def _exceeded(name: str, limits: ImportLimits) -> tuple[int, str]:
    """The limit that was met, which may be the host's, and how to raise it."""
    which, command = _OF_HOST[name]
    wanted = getattr(limits, name)
    if (held := within_host(which, wanted)) < wanted:
        return held, f"raise the hard limit of this machine (`{command}`) if you trust the file"
    return held, how_to_raise(name, limits)


def _out_of_memory(path: Path, limits: ImportLimits, detail: str = "") -> ModelError:
    held, remedy = _exceeded("memory_bytes", limits)
    return ModelError(
        f"importing {path.name} needs more than {held} bytes of memory" + (f": {detail}" if detail else ""),
        remedy=remedy,
    )
