"""Learned policies: which are kept, those from files, and as files."""

from typing import Annotated, Any

from msgspec import Meta

from stageloom.planner.schema.base import After, PageSize, Reply, Request
from stageloom.shared.messages.base import Count, DeviceName, DigestText, Line, MicroSeconds, Real, ShortText

DigestBeginning = Annotated[str, Meta(min_length=8, max_length=64, pattern=r"^[0-9a-f]*\Z")]


class PolicyListRequest(Request, frozen=True, kw_only=True):
    """Policies, newest first."""

    after: After = ""
    limit: PageSize = 64


class PolicyInfo(Reply, frozen=True, kw_only=True):
    """One trained policy; `device_class` empty: for any.

    `artifacts` are those of its models, with the models' names where these are known. `ratio` is what a task
    costs under it over what it costs without, on blocks or arrivals that it did not learn from. `unshown`:
    what of it cannot be shown, and why.
    """

    digest: DigestText
    policy: ShortText
    device_class: ShortText
    artifacts: Annotated[dict[str, str], Meta(max_length=64)]
    settings: Annotated[dict[str, Any], Meta(max_length=256)]
    versions: Annotated[dict[str, ShortText], Meta(max_length=64)]
    ratio: Real
    steps: Count
    trained_at_us: MicroSeconds
    unshown: Line = ""


class PolicyImportRequest(Request, frozen=True, kw_only=True):
    """Keep a policy that was trained elsewhere; the body is its checkpoint.

    With `device` it is adopted for that device's class and for the artifacts here with the same graphs, else
    kept for the class that it names.
    """

    device: DeviceName | None = None


class PolicyImportReply(Reply, frozen=True, kw_only=True):
    """The policy's digest, its class here, the class that it was trained for, and its models' artifacts."""

    policy: DigestText
    device_class: ShortText
    trained_for: ShortText
    models: Annotated[tuple[DigestText, ...], Meta(max_length=64)]


class PolicyExportRequest(Request, frozen=True, kw_only=True):
    """A policy's checkpoint, by the beginning of its digest, as `policy.import` takes it."""

    policy: DigestBeginning
