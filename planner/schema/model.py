"""Models of the store."""

from typing import Annotated

from msgspec import Meta

from stageloom.planner.schema.base import After, PageSize, Reply, Request
from stageloom.shared.messages.base import (
    DeviceName,
    DigestText,
    MicroSeconds,
    ModelVersion,
    Name,
    NameOrVersion,
    PositiveBytes,
    SmallCount,
)

_DeviceNames = Annotated[tuple[DeviceName, ...], Meta(max_length=1 << 16)]


class ModelInfo(Reply, frozen=True, kw_only=True):
    """One version of a model; `size_bytes` is its artifact's, and plans are made with the `newest`."""

    model: Name
    version: ModelVersion
    newest: bool
    digest: DigestText
    size_bytes: PositiveBytes
    operators: SmallCount
    base_cuts: SmallCount
    opaque: SmallCount
    added_at_us: MicroSeconds


class ModelAdded(ModelInfo, frozen=True, kw_only=True):
    """The version that an artifact is; `added` says whether it was made now."""

    added: bool


class ModelDetail(Reply, frozen=True, kw_only=True):
    """A version, the plans that hold it, and the devices that should run one of them or do."""

    info: ModelInfo
    plans: Annotated[tuple[Name, ...], Meta(max_length=1 << 16)]
    desired_on: _DeviceNames
    running_on: _DeviceNames


class ModelAddRequest(Request, frozen=True, kw_only=True):
    """Take an artifact that the client has imported: the body is its file, whose digest this is.

    Another artifact under a name that is taken is the model's next version.
    """

    model: Name
    digest: DigestText


class ModelExportRequest(Request, frozen=True, kw_only=True):
    """Get the normalised ONNX file of a version, which plans are of."""

    model: NameOrVersion


class ModelListRequest(Request, frozen=True, kw_only=True):
    """Every version of every model, by name and version; `after` is such a name, or `NAME@VERSION`."""

    after: After = ""
    limit: PageSize = 128


class ModelShowRequest(Request, frozen=True, kw_only=True):
    model: NameOrVersion


class ModelRemoveRequest(Request, frozen=True, kw_only=True):
    """Forget a version, or all of a model's; the numbers of forgotten ones are not given again.

    `force`: though devices, measurements that were asked for or kept plans use it.
    """

    model: NameOrVersion
    force: bool = False
