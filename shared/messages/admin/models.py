"""Models: imported, listed, removed."""

from typing import Annotated

from msgspec import Meta, Struct

from stageloom.shared.messages.admin.fields import After, Page, PathText
from stageloom.shared.messages.base import DigestText, Message, MicroSeconds, Name, PositiveBytes, SmallCount


class ModelInfo(Struct, frozen=True, kw_only=True):
    """One model of the store; `size_bytes` is its artifact's."""

    model: Name
    digest: DigestText
    size_bytes: PositiveBytes
    operators: SmallCount
    base_cuts: SmallCount
    opaque: SmallCount
    added_at_us: MicroSeconds


class ModelAddRequest(Message, frozen=True, kw_only=True, tag="model_add_request"):
    """Take an artifact that the command has imported; `path` is on this machine and is copied."""

    model: Name
    path: PathText
    digest: DigestText


class ModelReply(Message, frozen=True, kw_only=True, tag="model_reply"):
    model: ModelInfo


class ModelListRequest(Message, frozen=True, kw_only=True, tag="model_list_request"):
    after: After = ""
    limit: Page = 128


class ModelListReply(Message, frozen=True, kw_only=True, tag="model_list_reply"):
    models: Annotated[tuple[ModelInfo, ...], Meta(max_length=256)]
    more: bool = False


class ModelRemoveRequest(Message, frozen=True, kw_only=True, tag="model_remove_request"):
    model: Name
