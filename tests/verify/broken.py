"""The onnx executor with one defect planted; `hits` counts how often it struck."""

import threading
from collections.abc import Mapping

import numpy as np

from stageloom.edge_agent.executor.base import Rows
from stageloom.edge_agent.executor.onnx.cache import SessionKey
from stageloom.edge_agent.executor.onnx.executor import OnnxExecutor
from stageloom.edge_agent.executor.slot_store import Values
from stageloom.shared.engine.steps import InstanceId, ProgramKey, Step, StepMember
from stageloom.shared.errors import ExecutorError
from stageloom.shared.graph import Graph
from stageloom.shared.ids import TensorId


class Broken(OnnxExecutor):
    """No defect yet."""

    def __init__(self) -> None:
        super().__init__()
        self.hits = 0


class DroppedEdge(Broken):
    """One operator does not wait for one of its inputs: it reads zeros, or what the last instance left.

    Only where the input comes from another session; inside one there is no edge to drop.
    """

    def __init__(self, graph: Graph, op: int, *, stale: bool) -> None:
        super().__init__()
        self._op = op
        self._tensor = graph.operators[op].inputs[-1]
        self._stale = stale
        self._left: np.ndarray | None = None

    def _run_session(self, key: SessionKey, values: Values) -> None:
        if self._op not in key.ops or self._tensor not in values:
            super()._run_session(key, values)
            return
        self.hits += 1
        due = values[self._tensor]
        seen = np.zeros_like(due) if self._left is None else self._left
        if self._stale:
            self._left = due
        changed = {**values, self._tensor: seen}
        super()._run_session(key, changed)
        values.update({t: array for t, array in changed.items() if t != self._tensor})


class StaleSlot(Broken):
    """The slot before one block keeps the previous instance's tensors."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self._block = block
        self._left: Values | None = None

    def _gather(self, step: Step, member: StepMember, feeds: Mapping[InstanceId, Rows]) -> Values:
        due = super()._gather(step, member, feeds)
        if member.member.block != self._block:
            return due
        left, self._left = self._left, dict(due)
        if left is None:
            return due
        self.hits += 1
        return left


class SwappedGroups(Broken):
    """Two groups of one stage write each other's results; their tensors have one shape."""

    def __init__(self, left: TensorId, right: TensorId) -> None:
        super().__init__()
        self._pair = (left, right)
        self._made: dict[int, set[TensorId]] = {}  # by the instance's values
        self._lock = threading.Lock()

    def _run_session(self, key: SessionKey, values: Values) -> None:
        before = [values.get(tensor) for tensor in self._pair]
        super()._run_session(key, values)
        with self._lock:
            made = self._made.setdefault(id(values), set())
            made |= {t for t, old in zip(self._pair, before, strict=True) if values.get(t) is not old}
            if len(made) == len(self._pair):
                del self._made[id(values)]
                left, right = self._pair
                values[left], values[right] = values[right], values[left]
                self.hits += 1


class Unsteady(Broken):
    """The very first result differs from all later ones in its last bits, far below the tolerance."""

    def _run_session(self, key: SessionKey, values: Values) -> None:
        before = dict(values)
        super()._run_session(key, values)
        self.hits += 1
        if self.hits > 1:
            return
        for tensor, array in values.items():
            if before.get(tensor) is not array:
                values[tensor] = array * np.float32(1.0 + 2.0**-23)


class OtherRounding(Broken):
    """Every result is one unit in the last place larger: another kernel's rounding, which is no defect."""

    def _run_session(self, key: SessionKey, values: Values) -> None:
        before = dict(values)
        super()._run_session(key, values)
        self.hits += 1
        for tensor, array in values.items():
            if before.get(tensor) is not array and array.dtype == np.float32:
                values[tensor] = array * np.float32(1.0 + 2.0**-23)


class Poisoned(Broken):
    """One operator's result holds one value that is no number, or an infinite one."""

    def __init__(self, op: int, value: float) -> None:
        super().__init__()
        self._op = op
        self._value = value

    def _run_session(self, key: SessionKey, values: Values) -> None:
        before = dict(values)
        super()._run_session(key, values)
        if self._op in key.ops:
            self.hits += 1
            for tensor, array in values.items():
                if before.get(tensor) is not array:
                    values[tensor] = array.copy()
                    values[tensor].flat[0] = self._value


class Failing(Broken):
    """One operator raises."""

    def __init__(self, op: int) -> None:
        super().__init__()
        self._op = op

    def _run_session(self, key: SessionKey, values: Values) -> None:
        if self._op in key.ops:
            self.hits += 1
            raise ExecutorError("planted")
        super()._run_session(key, values)


class Unprepared(Broken):
    """Programs cannot be built, so members run one after another instead of by the schedule."""

    def prepare(self, program: ProgramKey) -> None:
        self.hits += 1
        raise ExecutorError("planted")
