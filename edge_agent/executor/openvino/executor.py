"""`openvino`: OpenVINO's kernels on the processor.

With one thread a session has none of its own: a lane's thread computes, wherever that is pinned. float32 is
computed as float32 on every processor, float16 in float32. What OpenVINO would compute in fewer bits than the
model says is refused as the session is made, and runs whose integers are too large go to onnxruntime. There
is one exception: a plan may say bf16, and float32 is computed in bfloat16 then, between inputs and outputs of
sessions that stay float32.
"""

import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np

from stageloom.edge_agent.executor.base import one_line, options_for, require_pinned
from stageloom.edge_agent.executor.onnx.cache import (
    SessionKey,
    ValuesSession,
    borders,
    session_borders,
    weight_bytes,
)
from stageloom.edge_agent.executor.onnx.parts import ModelParts
from stageloom.edge_agent.executor.onnx.session_executor import SessionExecutor
from stageloom.edge_agent.executor.openvino.fewer_bits import Integers, narrowed
from stageloom.edge_agent.executor.openvino.misread import misread
from stageloom.edge_agent.executor.openvino.model import openvino, read_model
from stageloom.edge_agent.executor.openvino.session import OpenvinoSession, Port
from stageloom.edge_agent.executor.slot_store import Values
from stageloom.shared.artifact import Artifact
from stageloom.shared.bound import BoundPlan
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.errors import ExecutorError, ModelError, Unsplittable
from stageloom.shared.graph import Graph
from stageloom.shared.ids import Digest, TensorId

_log = logging.getLogger(__name__)

REMEDY: Final = "use the executor onnx for this model"

_HINTS: Final = {"fp32": "f32", "bf16": "bf16"}
"""By precision of a plan what OpenVINO calls it."""

ELEMENT_TYPES: Final = frozenset(
    {"float32", "float16", "int64", "int32", "int16", "int8", "uint16", "uint8", "bool"}
)
"""What tensors that cross sessions may hold. OpenVINO computes float64 in float32, uint32 and uint64 in
int32, and hands out bfloat16 as float16. int64 is computed in int32, too: `OpenvinoSession` looks at inputs,
and `fewer_bits` at what lies between."""

_SESSION_BYTES: Final = 1 << 20
"""What a compiled model takes beside weights and tensors: its operators' kernels and descriptions."""

_OWN_TENSORS: Final = 2
"""How many of its largest tensors a compiled model keeps for what passes between its operators."""

_STAND_IN: Final = -1
"""As a copy's number: what stands in for a session and all of its copies."""

_SUMMARY = re.compile(r"^-- (.+)$", re.MULTILINE)
_WHERE_RAISED = re.compile(r"Exception from \S+:|Check '[^']*' failed at \S+:")


class OpenvinoExecutor(SessionExecutor):
    """Sessions of OpenVINO."""

    name = "openvino"
    precisions = tuple(_HINTS)
    one_caller = True

    def load(self, key: PlanKey, bound: BoundPlan, artifacts: Mapping[Digest, Artifact]) -> None:
        """Make the sessions of every atom at batch 1.

        Raises:
            ExecutorError: the plan says bf16 and the processor has no such units; or as for all executors.
        """
        if any(options.precision == "bf16" for options in options_for(bound, self.name)):
            require_bf16()
        require_pinned(bound, self.name)
        super().load(key, bound, artifacts)

    def _open(self, key: SessionKey, source: ModelParts) -> OpenvinoSession:
        own = _StandIn(key, source.artifact)  # of a session beside which none was to be there
        return open_session(key, source, lambda: self._cache.get(replace(key, copy=_STAND_IN)) or own)

    def _open_any(self, key: SessionKey, source: ModelParts) -> ValuesSession:
        return _StandIn(key, source.artifact) if key.copy == _STAND_IN else super()._open_any(key, source)

    def _stand_in(self, key: SessionKey, graph: Graph) -> SessionKey | None:
        """Of a session that reads integers: they may be too large."""
        read, _ = borders(graph, key.ops)
        integers = any(graph.tensors[tensor].dtype in ("int64", "int32") for tensor in read)
        return replace(key, copy=_STAND_IN) if integers else None

    @staticmethod
    def _weigh(key: SessionKey, graph: Graph) -> int:
        return weight_bytes(key, graph) if key.copy == _STAND_IN else session_bytes(key, graph)


class _StandIn:
    """Of onnxruntime: takes the runs whose integers are too large, and is opened by the first of them."""

    def __init__(self, key: SessionKey, artifact: Artifact) -> None:
        self._key, self._artifact = key, artifact
        self._lock = threading.Lock()  # over the opening
        self._session: ValuesSession | None = None

    def run(self, values: Values) -> None:
        """As the session's.

        Raises:
            ExecutorError: onnxruntime is not installed, or cannot build it.
        """
        with self._lock:
            if self._session is None:
                self._session = self._opened()
        self._session.run(values)

    def _opened(self) -> ValuesSession:
        try:
            from stageloom.edge_agent.executor.onnx.executor import open_session as open_exact
        except ImportError as error:
            raise ExecutorError(
                "openvino computes no integers so large, and onnxruntime, which does, is missing",
                remedy="pip install 'stageloom[edge,onnx]'",
            ) from error
        name = self._artifact.graph.name
        _log.warning("model %r: onnxruntime takes runs with integers that are too large for openvino", name)
        return open_exact(self._key, ModelParts(self._artifact))


def session_bytes(key: SessionKey, graph: Graph) -> int:
    """What a session keeps: weights in its kernels' layout, its own tensors, and its operators' descriptions.

    What it reads and makes it may keep again in the layout of its kernels. Kernels that were stacked for a
    merge are in no file, and are kept as they were read, too; so are weights that several operators share.
    """
    inputs, outputs = borders(graph, key.ops)
    own = sum(graph.tensors[tensor].nbytes for tensor in (*inputs, *outputs))
    if len(key.ops) > 1:
        made = [graph.tensors[tensor].nbytes for op in key.ops for tensor in graph.operators[op].outputs]
        own += _OWN_TENSORS * max(made, default=0)
    twice = key.merge or graph.shares_weights(key.ops)
    return _SESSION_BYTES + key.batch * own + weight_bytes(key, graph) * (1 + twice)


def open_session(
    key: SessionKey, source: ModelParts, exact: Callable[[], ValuesSession] | None = None
) -> OpenvinoSession:
    """Make a session. `exact` has what takes runs whose integers are too large; without they fail.

    Raises:
        ExecutorError: OpenVINO does not have an operator, or would compute one differently.
    """
    try:
        graph, inputs, outputs = session_borders(key, source)
    except (ModelError, Unsplittable) as error:
        raise ExecutorError(str(error)) from error
    for tensor in (*inputs, *outputs):
        if graph.tensors[tensor].dtype not in ELEMENT_TYPES:
            what = f"{graph.tensors[tensor].name!r} of model {graph.name!r} is {graph.tensors[tensor].dtype}"
            raise ExecutorError(f"{what}, in which openvino does not compute", remedy=REMEDY)
    try:
        if kind := misread(source.nodes(key.ops), source):
            what = f"openvino computes {kind} of model {graph.name!r} differently than onnxruntime"
            raise ExecutorError(what, remedy=REMEDY)
        model = read_model(_core(), source, key)
        _refuse_strings(model, graph)
        integers = _kept_exact(model, graph)
        compiled = _core().compile_model(model, "CPU", _properties(key))
        reads = _ports(compiled.inputs, inputs, graph, key.batch)
        makes = _handed_on(_ports(compiled.outputs, outputs, graph, key.batch), model, reads)
        session = OpenvinoSession(compiled.create_infer_request(), reads, makes, integers, exact)
        if len(session.outputs) < len(outputs):
            raise ExecutorError(f"openvino leaves out an output of model {graph.name!r}", remedy=REMEDY)
    except ModelError as error:
        raise ExecutorError(str(error)) from error
    except ExecutorError:
        raise
    except Exception as error:  # OpenVINO's exceptions share no base class
        raise ExecutorError(
            f"openvino cannot load {len(key.ops)} operators of model {graph.name!r}: {reason(error)}",
            remedy=REMEDY,
        ) from error
    finally:
        source.release_pages()
    return session


def reason(error: BaseException) -> str:
    """What an exception of OpenVINO says, without the places in its sources."""
    if found := _SUMMARY.findall(str(error).partition("Summary:")[2]):
        return "; ".join(found)[:300]
    return one_line(error.with_traceback(None)) if not str(error) else _WHERE_RAISED.sub("", one_line(error))


@cache
def _core() -> Any:
    """Of the process: it holds the plugin."""
    return openvino.Core()


def computes_bf16() -> bool:
    """Whether the processor has units for bfloat16; without, OpenVINO may imitate it, slower than float32."""
    able = "BF16" in _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return able and bool(_core().get_property("CPU", "INFERENCE_PRECISION_HINT") == openvino.Type.bf16)


def require_bf16() -> None:
    """Raises:
    ExecutorError: the processor has no units for bfloat16.
    """
    if not computes_bf16():
        raise ExecutorError(
            "this processor has no units for bfloat16 (avx512_bf16 or amx_bf16)",
            remedy="use the precision fp32",
        )


def _properties(key: SessionKey) -> Mapping[str, Any]:
    """How a model is compiled: exactly, and with no thread but the caller's and those that were asked for.

    Without a stream a compiled model runs on the caller's thread and has no other. With one it would have two
    idle threads of its own: 200 for a plan of a hundred sessions.
    """
    return {
        "INFERENCE_NUM_THREADS": key.intra_op_threads,
        "NUM_STREAMS": 0 if key.intra_op_threads == 1 else 1,
        "ENABLE_CPU_PINNING": False,  # it would pin every session's threads to the same cores
        "INFERENCE_PRECISION_HINT": _HINTS[key.precision],
        "EXECUTION_MODE_HINT": "ACCURACY",  # nothing in fewer bits than that
    }


def _refuse_strings(model: Any, graph: Graph) -> None:
    """Raises:
    ExecutorError: an operator makes strings, for which the processor's plugin has no kernels.
    """
    for node in model.get_ops():
        if any(port.get_element_type() == openvino.Type.string for port in node.outputs()):
            raise ExecutorError(
                f"openvino has no kernels for strings, as in model {graph.name!r}", remedy=REMEDY
            )


def _kept_exact(model: Any, graph: Graph) -> Integers:
    """The integers inside, which must not be too large in a run.

    Raises:
        ExecutorError: values that depend on inputs are of a type that OpenVINO would narrow, or are integers
            that are too large whatever the inputs are.
    """
    if kind := narrowed(model):
        raise ExecutorError(
            f"model {graph.name!r} computes in {kind} inside, which openvino would narrow", remedy=REMEDY
        )
    integers = Integers(model)
    if kind := integers.inexact({}):
        raise ExecutorError(
            f"{kind} of model {graph.name!r} has integers that openvino does not compute exactly",
            remedy=REMEDY,
        )
    return integers


def _ports(found: Sequence[Any], tensors: Sequence[TensorId], graph: Graph, batch: int) -> tuple[Port, ...]:
    """The tensors' places in a compiled model. An input that nothing reads has none there.

    Raises:
        ExecutorError: there is a tensor that the graph does not know, or one is not what the graph says.
    """
    return tuple(
        _port(index, found[index], tensor, graph, batch)
        for tensor, index in _places(found, tensors, graph).items()
    )


def _handed_on(makes: Sequence[Port], model: Any, reads: Sequence[Port]) -> tuple[Port, ...]:
    """The outputs, with those marked that are inputs.

    OpenVINO may take both for one tensor, and what is set as the output for the input.
    """
    inputs = {model.inputs[port.index].get_node().friendly_name: port.tensor for port in reads}
    marked = []
    for port in makes:
        maker = model.outputs[port.index].get_node().input_value(0).get_node()
        is_input = maker.get_type_name() == "Parameter"
        marked.append(replace(port, handed_on=inputs[maker.friendly_name] if is_input else None))
    return tuple(marked)


def _places(found: Sequence[Any], tensors: Sequence[TensorId], graph: Graph) -> dict[TensorId, int]:
    """Which port is which tensor, by name.

    An operator that hands its input on, as Dropout does, gives it its output's name: what is left over is
    that input, where it is one.

    Raises:
        ExecutorError: a port is left over.
    """
    names = {name: index for index, port in enumerate(found) for name in _names(port)}
    places = {t: names[graph.tensors[t].name] for t in tensors if graph.tensors[t].name in names}
    ports = [index for index in range(len(found)) if index not in places.values()]
    nameless = [tensor for tensor in tensors if tensor not in places]
    if len(ports) == len(nameless) == 1:
        places[nameless[0]] = ports[0]
    elif ports:
        raise ExecutorError(f"openvino names the tensors of model {graph.name!r} differently", remedy=REMEDY)
    return places


def _names(port: Any) -> set[str]:
    """What a tensor is called: a port may have lost its names, and a result has another than its tensor."""
    node: str = port.get_node().friendly_name
    return {*port.names, node.removesuffix("/sink_port_0")}


def _port(index: int, port: Any, tensor: TensorId, graph: Graph, batch: int) -> Port:
    described = graph.tensors[tensor]
    dtype, shape = np.dtype(described.dtype), tuple(described.batched(batch))
    fixed = bool(port.partial_shape.is_static)
    if port.element_type.to_dtype() != dtype or (fixed and tuple(port.shape) != shape):
        made = f"{port.element_type.to_dtype()} {port.partial_shape}"
        raise ExecutorError(
            f"openvino has {described.name!r} as {made}, not {dtype} {list(shape)}", remedy=REMEDY
        )
    return Port(index, tensor, described.name, dtype, shape, fixed)
