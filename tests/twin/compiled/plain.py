"""The kernels run as plain Python, without a compiler, and with defects planted in their text."""

import sys
from collections.abc import Mapping
from importlib import resources
from types import ModuleType
from typing import Any

from stageloom.planner.twin.compiled.compile_cache import KERNELS
from stageloom.planner.twin.compiled.tables import WorldMemory
from stageloom.planner.twin.compiled.twin import CompiledTwin

_PACKAGE = "stageloom.planner.twin.compiled"
_KERNELS = KERNELS[1:]  # without their constants


def plain_kernels(defects: Mapping[str, tuple[str, str]] | None = None) -> Any:
    """`stageloom.planner.twin.compiled.engine.run`, uncompiled. `defects`: by file, a text and what replaces
    it."""
    names = [f"{_PACKAGE}.{name}" for name in ("jit", *_KERNELS)]
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        stub = ModuleType(names[0])
        stub.jit = stub.jit_entry = _same  # type: ignore[attr-defined]
        sys.modules[names[0]] = stub
        for kernel in _KERNELS:
            source = (resources.files(_PACKAGE) / f"{kernel}.py").read_text(encoding="utf-8")
            if defects and kernel in defects:
                before, after = defects[kernel]
                assert source.count(before) == 1, f"{before!r} is not once in {kernel}"
                source = source.replace(before, after)
            module = ModuleType(f"{_PACKAGE}.{kernel}")
            sys.modules[module.__name__] = module
            exec(compile(source, f"{kernel}.py", "exec"), module.__dict__)
        return sys.modules[names[-1]].run
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


def _same(function: Any) -> Any:
    return function


class PlainTwin(CompiledTwin):
    """A compiled twin without its compiler."""

    run_kernels: Any = staticmethod(plain_kernels())

    def _kernels(self, memory: WorldMemory, end_s: float, deploy: int) -> int:
        stopped: int = self.run_kernels([memory.world], self._arrivals, self._samples, end_s, deploy)
        return stopped
