"""What an application and the agent say to each other over the local socket.

One message is one packet of the `SOCK_SEQPACKET` socket, at most `MAX_PACKET_BYTES`, so a reader never waits
for the rest of one. Tensors do not travel: the application allocates an arena (a sealed memfd), passes its
descriptor with `AttachArena`, and declares layouts: which models, and where in the arenas each of a task's
tensors lies. A task then names its layout, so that all checking and looking up is done once per layout and
not once per task. Packets are plain msgpack of positional structs whose fields are all bounded; the packet's
own limit bounds what decoding can cost.
"""

from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

from stageloom.shared.errors import DecodeError
from stageloom.shared.graph import MAX_SIGNATURE_CHARS, MAX_SIGNATURE_RANK
from stageloom.shared.messages.base import ModelVersion
from stageloom.shared.shape_ranges import range_text, within

PROTOCOL_VERSION: Final = 1
MAX_PACKET_BYTES: Final = 64 << 10
MAX_TENSORS: Final = 256
MAX_SHARED_MODELS: Final = 16
MAX_TRACE_S: Final = 600.0
MAX_REASON_CHARS: Final = 1000
MAX_PRIORITY: Final = 2**31
LONGEST_S: Final = 1e9
"""Of a deadline, in seconds from when its task is submitted."""
ALIGNMENT_BYTES: Final = 64
"""Tensors lie at multiples of this in an arena: a cache line, and wide enough for every vector unit."""

Id = Annotated[int, Meta(ge=0, le=2**53)]
Offset = Annotated[int, Meta(ge=0, le=2**44)]
ModelName = Annotated[str, Meta(min_length=1, max_length=128)]
TensorName = Annotated[str, Meta(max_length=MAX_SIGNATURE_CHARS)]
Dtype = Annotated[str, Meta(max_length=16)]
Dim = Annotated[int, Meta(ge=0, le=2**40)]
Shape = Annotated[tuple[Dim, ...], Meta(max_length=MAX_SIGNATURE_RANK)]
Line = Annotated[str, Meta(max_length=1024)]
Instant = Annotated[float, Meta(ge=0.0, le=1e12)]
"""Seconds on CLOCK_MONOTONIC, which both processes share."""


class TensorInfo(Struct, frozen=True, array_like=True):
    """One tensor of a model: numpy's type name and the shape of one task, the largest where that is open."""

    name: TensorName
    dtype: Dtype
    shape: Shape
    smallest: Shape | None = None  # None: the shape is pinned

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether a task's tensor may have this shape."""
        return shape == self.shape or (self.smallest is not None and within(shape, self.smallest, self.shape))

    @property
    def shapes_text(self) -> str:
        """`1x3x224x224`, `1..6x3x48x16..2400` or `scalar`."""
        return range_text(self.shape if self.smallest is None else self.smallest, self.shape)


class ModelSignature(Struct, frozen=True, array_like=True):
    """What a model takes and gives.

    `batchable`: axis 0 of every input and output counts rows that do not depend on each other, as the
    importer tried it. `version`: which one of the model this is, as the planner counts them.
    """

    name: ModelName
    inputs: Annotated[tuple[TensorInfo, ...], Meta(max_length=MAX_TENSORS)]
    outputs: Annotated[tuple[TensorInfo, ...], Meta(max_length=MAX_TENSORS)]
    batchable: bool = False
    version: ModelVersion = 1

    @property
    def is_open(self) -> bool:
        """Whether tasks have shapes of their own within the model's ranges."""
        return any(info.smallest is not None for info in self.inputs)


class InputRef(Struct, frozen=True, array_like=True):
    """An input tensor in an arena; type and shape are what the application believes, checked by the agent."""

    tensor: TensorName
    arena: Id
    offset_bytes: Offset
    dtype: Dtype
    shape: Shape


class OutputRef(Struct, frozen=True, array_like=True):
    """Where an output of `models[model]` of the layout goes; `nbytes` is the room there.

    Type and shape (the largest where it is open) are what the application believes, checked by the agent; an
    application of an older version names none.
    """

    model: Annotated[int, Meta(ge=0, lt=MAX_SHARED_MODELS)]
    tensor: TensorName
    arena: Id
    offset_bytes: Offset
    nbytes: Offset
    dtype: Dtype = ""
    shape: Shape | None = None


class ClientHello(Struct, frozen=True, array_like=True, tag=1):
    """Application to agent, first on every connection."""

    version: Annotated[int, Meta(ge=1, le=255)]


class AttachArena(Struct, frozen=True, array_like=True, tag=2):
    """Application to agent, with the descriptor of a memfd sealed against shrinking and growing."""

    arena: Id
    nbytes: Annotated[int, Meta(ge=1, le=2**44)]


class DetachArena(Struct, frozen=True, array_like=True, tag=3):
    """Application to agent: no task in flight uses the arena any more."""

    arena: Id


class DeclareLayout(Struct, frozen=True, array_like=True, tag=8):
    """Application to agent: a layout for tasks to come. More than one model: all read the same input.

    What is wrong with it is said to the tasks that use it. A number that is declared again is replaced.
    """

    layout: Id
    models: Annotated[tuple[ModelName, ...], Meta(min_length=1, max_length=MAX_SHARED_MODELS)]
    inputs: Annotated[tuple[InputRef, ...], Meta(max_length=MAX_TENSORS)]
    outputs: Annotated[tuple[OutputRef, ...], Meta(max_length=MAX_TENSORS)]


class RetractLayout(Struct, frozen=True, array_like=True, tag=9):
    """Application to agent: no task to come uses the layout."""

    layout: Id


class SubmitRequest(Struct, frozen=True, array_like=True, tag=4):
    """Application to agent: one task, whose inputs lie where its layout says. It ends once.

    `deadline_s` counts from `sent_at_s`, the instant the application called.
    """

    task: Id
    layout: Id
    sent_at_s: Instant
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    deadline_s: Annotated[float, Meta(ge=0.0, le=LONGEST_S)] | None = None


class CancelRequest(Struct, frozen=True, array_like=True, tag=5):
    """Application to agent: the task is not wanted any more. One that has ended already stays as it is."""

    task: Id


class ListModels(Struct, frozen=True, array_like=True, tag=6):
    """Application to agent: what can be run now, from the model at position `start` on."""

    request: Id
    start: Annotated[int, Meta(ge=0, le=1 << 20)] = 0


class AskStatus(Struct, frozen=True, array_like=True, tag=7):
    """Application to agent: how are you."""

    request: Id


class AskMetrics(Struct, frozen=True, array_like=True, tag=11):
    """Application to agent: what was counted, with times of models from position `start` on."""

    request: Id
    start: Annotated[int, Meta(ge=0, le=1 << 20)] = 0


class TraceRequest(Struct, frozen=True, array_like=True, tag=10):
    """Application to agent, with the descriptor of a memory file: record what the engine does into it."""

    request: Id
    seconds: Annotated[float, Meta(gt=0.0, le=MAX_TRACE_S)]


class AgentWelcome(Struct, frozen=True, array_like=True, tag=1):
    """Agent to application: what one connection may use."""

    version: Annotated[int, Meta(ge=1, le=255)]
    max_tasks: Id
    max_arena_bytes: Offset
    max_arenas: Id


class TaskEnded(Struct, frozen=True, array_like=True, tag=2):
    """Agent to application: the task's one end. A completed one has its outputs in the arena.

    `code` is a fixed word, `reason` one line: cause; remedy. The instants are when the agent read the task,
    when the engine queued it, when its first step began and when its last one had ended; 0 where it did not
    get that far. `shapes` are those of the layout's outputs where a model's are open: each lies at the
    beginning of its place.
    """

    task: Id
    outcome: Annotated[str, Meta(max_length=16)]
    code: Annotated[str, Meta(max_length=64)] = ""
    reason: Line = ""
    received_at_s: Instant = 0.0
    queued_at_s: Instant = 0.0
    started_at_s: Instant = 0.0
    ended_at_s: Instant = 0.0
    shapes: Annotated[tuple[Shape, ...], Meta(max_length=MAX_TENSORS)] = ()


class Models(Struct, frozen=True, array_like=True, tag=3):
    """Agent to application: part of the models; `more` says that the next part starts after these.

    `why_none`: where there are none, why no task is taken.
    """

    request: Id
    models: Annotated[tuple[ModelSignature, ...], Meta(max_length=64)]
    more: bool = False
    why_none: Line = ""


class Status(Struct, frozen=True, array_like=True, tag=4):
    """Agent to application: the status as JSON (see `stageloom.edge_agent.reporting.status.AgentStatus`)."""

    request: Id
    body: Annotated[bytes, Meta(max_length=MAX_PACKET_BYTES)]


class MetricsPage(Struct, frozen=True, array_like=True, tag=7):
    """Agent to application: what was counted (`stageloom.edge_agent.metrics.counting.AgentFigures`) as JSON.

    `more`: the next page starts after the models of this one.
    """

    request: Id
    body: Annotated[bytes, Meta(max_length=MAX_PACKET_BYTES)]
    more: bool = False


class TraceWritten(Struct, frozen=True, array_like=True, tag=6):
    """Agent to application: the recording is in the file; with a reason there is none."""

    request: Id
    reason: Line = ""


class Goodbye(Struct, frozen=True, array_like=True, tag=5):
    """Agent to application: the connection ends here, and why."""

    reason: Line


ToAgent = (
    ClientHello
    | AttachArena
    | DetachArena
    | DeclareLayout
    | RetractLayout
    | SubmitRequest
    | CancelRequest
    | ListModels
    | AskStatus
    | AskMetrics
    | TraceRequest
)
ToApplication = AgentWelcome | TaskEnded | Models | Status | MetricsPage | TraceWritten | Goodbye

_M = TypeVar("_M")
_encoder: Final = msgspec.msgpack.Encoder()
_to_agent: Final[msgspec.msgpack.Decoder[ToAgent]] = msgspec.msgpack.Decoder(ToAgent)
_to_application: Final[msgspec.msgpack.Decoder[ToApplication]] = msgspec.msgpack.Decoder(ToApplication)


def encode(message: ToAgent | ToApplication) -> bytes:
    return _encoder.encode(message)


def decode_to_agent(packet: bytes) -> ToAgent:
    """What an application sent.

    Raises:
        DecodeError: too long, or no message of this conversation.
    """
    return _decode(_to_agent, packet)


def decode_to_application(packet: bytes) -> ToApplication:
    """What the agent sent.

    Raises:
        DecodeError: too long, or no message of this conversation.
    """
    return _decode(_to_application, packet)


def _decode(decoder: "msgspec.msgpack.Decoder[_M]", packet: bytes) -> _M:
    if len(packet) > MAX_PACKET_BYTES:
        raise DecodeError(f"a packet of more than {MAX_PACKET_BYTES} bytes")
    try:
        return decoder.decode(packet)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise DecodeError(f"not a message: {str(error)[:200]}") from error
