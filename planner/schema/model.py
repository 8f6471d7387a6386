"""Models of the store."""

from stageloom.planner.schema.base import After, PageSize, Reply, Request
from stageloom.shared.messages.base import DigestText, MicroSeconds, Name, PositiveBytes, SmallCount


class ModelInfo(Reply, frozen=True, kw_only=True):
    """One model of the store; `size_bytes` is its artifact's."""

    model: Name
    digest: DigestText
    size_bytes: PositiveBytes
    operators: SmallCount
    base_cuts: SmallCount
    opaque: SmallCount
    added_at_us: MicroSeconds


class ModelAddRequest(Request, frozen=True, kw_only=True):
    """Take an artifact that the client has imported: the body is its file, whose digest this is."""

    model: Name
    digest: DigestText


class ModelExportRequest(Request, frozen=True, kw_only=True):
    """Get the normalised ONNX file, which plans are of."""

    model: Name


class ModelListRequest(Request, frozen=True, kw_only=True):
    after: After = ""
    limit: PageSize = 128


class ModelRemoveRequest(Request, frozen=True, kw_only=True):
    model: Name
