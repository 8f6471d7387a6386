"""The admin conversation: the `stageloom` command and a running planner, over a local socket of mode 0600.

Whoever opens the socket is the operator. Lists come in pages: a reply's `more` says that the last item's
name continues as `after`. Every reply to a request is its own reply type or `Failed`.
"""

from typing import Annotated

from msgspec import Meta

from stageloom.shared.codec import Codec, CodecLimits
from stageloom.shared.messages.admin.contests import ContestFailure, ContestFigures, ContestInfo
from stageloom.shared.messages.admin.devices import (
    DeviceInfo,
    DeviceListReply,
    DeviceListRequest,
    DeviceProfileReply,
    DeviceProfileRequest,
    DeviceReleaseRequest,
    DeviceRevokeRequest,
    DeviceShowReply,
    DeviceShowRequest,
    DeviceTokenReply,
    DeviceTokenRequest,
    StageProfileCreate,
)
from stageloom.shared.messages.admin.live import (
    ClockTrustRequest,
    ModelRate,
    StatusReply,
    StatusRequest,
    TelemetryBooks,
    WatchReply,
    WatchRequest,
)
from stageloom.shared.messages.admin.models import (
    ModelAddRequest,
    ModelInfo,
    ModelListReply,
    ModelListRequest,
    ModelRemoveRequest,
    ModelReply,
)
from stageloom.shared.messages.admin.plans import (
    MAX_PUSHED,
    ArrivalRate,
    FleetPushReply,
    FleetPushRequest,
    HistoryEntry,
    ModelChoice,
    PlanCancelRequest,
    PlanCreateRequest,
    PlanHistoryReply,
    PlanHistoryRequest,
    PlanInfo,
    PlanProgressReply,
    PlanProgressRequest,
    PlanPushReply,
    PlanPushRequest,
    PlanReply,
    PlanShowRequest,
    PolicyAttachRequest,
    Pushed,
)
from stageloom.shared.messages.admin.replans import (
    DeviceReplanReply,
    DeviceReplanRequest,
    Proposer,
    ReplanInfo,
    TrialInfo,
)
from stageloom.shared.messages.base import Line, Message

__all__ = [
    "MAX_PUSHED",
    "REPLIES",
    "REQUESTS",
    "AdminReply",
    "AdminRequest",
    "ArrivalRate",
    "ClockTrustRequest",
    "ContestFailure",
    "ContestFigures",
    "ContestInfo",
    "DeviceInfo",
    "DeviceListReply",
    "DeviceListRequest",
    "DeviceProfileReply",
    "DeviceProfileRequest",
    "DeviceReleaseRequest",
    "DeviceReplanReply",
    "DeviceReplanRequest",
    "DeviceRevokeRequest",
    "DeviceShowReply",
    "DeviceShowRequest",
    "DeviceTokenReply",
    "DeviceTokenRequest",
    "Done",
    "Failed",
    "FleetPushReply",
    "FleetPushRequest",
    "HistoryEntry",
    "ModelAddRequest",
    "ModelChoice",
    "ModelInfo",
    "ModelListReply",
    "ModelListRequest",
    "ModelRate",
    "ModelRemoveRequest",
    "ModelReply",
    "PlanCancelRequest",
    "PlanCreateRequest",
    "PlanHistoryReply",
    "PlanHistoryRequest",
    "PlanInfo",
    "PlanProgressReply",
    "PlanProgressRequest",
    "PlanPushReply",
    "PlanPushRequest",
    "PlanReply",
    "PlanShowRequest",
    "PolicyAttachRequest",
    "Proposer",
    "Pushed",
    "ReplanInfo",
    "StageProfileCreate",
    "StatusReply",
    "StatusRequest",
    "TelemetryBooks",
    "TrialInfo",
    "WatchReply",
    "WatchRequest",
]


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """The request took effect, and there is nothing to tell."""


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """The request did not take effect; `exit_code` is what the command ends with."""

    cause: Line
    remedy: Line = ""
    exit_code: Annotated[int, Meta(ge=1, le=255)] = 1


AdminRequest = (
    DeviceTokenRequest
    | DeviceListRequest
    | DeviceShowRequest
    | DeviceReleaseRequest
    | DeviceRevokeRequest
    | DeviceProfileRequest
    | StageProfileCreate
    | DeviceReplanRequest
    | ModelAddRequest
    | ModelListRequest
    | ModelRemoveRequest
    | PlanCreateRequest
    | PlanCancelRequest
    | PlanProgressRequest
    | PlanShowRequest
    | PlanPushRequest
    | PolicyAttachRequest
    | FleetPushRequest
    | PlanHistoryRequest
    | WatchRequest
    | StatusRequest
    | ClockTrustRequest
)


AdminReply = (
    DeviceTokenReply
    | DeviceListReply
    | DeviceShowReply
    | DeviceProfileReply
    | DeviceReplanReply
    | ModelReply
    | ModelListReply
    | PlanReply
    | PlanProgressReply
    | PlanPushReply
    | FleetPushReply
    | PlanHistoryReply
    | WatchReply
    | StatusReply
    | Done
    | Failed
)


REQUESTS: Codec[AdminRequest] = Codec(AdminRequest, CodecLimits(frame_bytes=64 << 10, body_bytes=64 << 10))


REPLIES: Codec[AdminReply] = Codec(AdminReply, CodecLimits(frame_bytes=1 << 20, body_bytes=1 << 20))
