"""Who may use the API: roles, access tokens, the audit log."""

from enum import Enum
from typing import Annotated, Final

from msgspec import Meta

from stageloom.planner.schema.base import After, PageSize, Reply, Request
from stageloom.shared.messages.base import MicroSeconds, Name, ShortText, SmallCount


class Role(str, Enum):
    """What a client may do; each role may do what those before it may."""

    VIEWER = "viewer"  # read everything but secrets, tokens and the audit log
    OPERATOR = "operator"  # models, plans, measurements, trainings
    ADMIN = "admin"  # who may join, who may use the API, backups

    def includes(self, other: "Role") -> bool:
        """Whether this role may do what `other` may."""
        return _RANK[self] >= _RANK[other]


_RANK: Final = {role: rank for rank, role in enumerate(Role)}

TokenText = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]*\Z")]


class AccessCreateRequest(Request, frozen=True, kw_only=True):
    """Make an access token for a client of the API."""

    name: Name
    role: Role = Role.VIEWER


class AccessCreateReply(Reply, frozen=True, kw_only=True):
    """The token's text, shown once; the planner keeps its digest."""

    name: Name
    role: Role
    token: TokenText


class AccessListRequest(Request, frozen=True, kw_only=True):
    after: After = ""
    limit: PageSize = 128


class AccessInfo(Reply, frozen=True, kw_only=True):
    """One access token; `revoked_at_us` 0: it holds."""

    name: Name
    role: Role
    created_at_us: MicroSeconds
    revoked_at_us: MicroSeconds


class AccessRevokeRequest(Request, frozen=True, kw_only=True):
    """Refuse a token from its next request on. A repeat changes nothing."""

    name: Name


class AuditListRequest(Request, frozen=True, kw_only=True):
    """What clients changed, or tried to, and who took a backup, newest first."""

    after: After = ""
    limit: PageSize = 64


class AuditEntry(Reply, frozen=True, kw_only=True):
    """One request: who asked what of which thing, from where, and how it was answered (an HTTP status)."""

    at_us: MicroSeconds
    who: ShortText
    role: ShortText
    source: ShortText
    operation: ShortText
    target: ShortText
    status: SmallCount
