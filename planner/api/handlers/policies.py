"""Learned policies: the list, those from files, and as files."""

import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from stageloom.planner.api import routes
from stageloom.planner.api.context import ApiCall, ApiContext, handles, then
from stageloom.planner.api.handlers.plans import position
from stageloom.planner.schema import policy as schema
from stageloom.planner.schema.base import Page
from stageloom.planner.store.policies import (
    PolicyPosition,
    digest_beginning,
    policy_body,
    policy_infos,
    store_policy,
)

if TYPE_CHECKING:
    from stageloom.planner.replan.policy_file import CheckedPolicy


@handles(routes.POLICY_LIST)
def policy_list(api: ApiContext, request: schema.PolicyListRequest, call: ApiCall) -> Page[schema.PolicyInfo]:
    number, _, digest = request.after.partition(".")
    after = PolicyPosition(position(number), digest) if request.after else None
    infos = api.reader.read(policy_infos, after=after, limit=request.limit + 1)
    items = tuple(infos[: request.limit])
    following = f"{items[-1].trained_at_us}.{items[-1].digest}" if len(infos) > request.limit else ""
    return Page(items=items, next=following)


@handles(routes.POLICY_IMPORT)
def policy_import(
    api: ApiContext, request: schema.PolicyImportRequest, call: ApiCall
) -> "Future[schema.PolicyImportReply]":
    from stageloom.planner.replan.policy_file import checked_policy  # all of the search, too

    assert call.upload is not None

    def kept(policy: "CheckedPolicy") -> schema.PolicyImportReply:
        api.store.write(
            store_policy,
            policy.body,
            policy=policy.kind,
            device_class=policy.reply.device_class,
            provenance=policy.provenance,
            curves=(),
            trained_at_us=api.clock.wall_us(),
            unchecked=request.unchecked,
        )
        return policy.reply

    return then(api.live.readers.submit(checked_policy, call.upload, request.device), kept)


@handles(routes.POLICY_EXPORT)
def policy_export(api: ApiContext, request: schema.PolicyExportRequest, call: ApiCall) -> Path:
    digest = api.reader.read(digest_beginning, request.policy)
    body = api.reader.read(policy_body, digest)
    assert body is not None
    with tempfile.NamedTemporaryFile(prefix=".export-", dir=api.config.data_dir, delete=False) as file:
        try:
            file.write(body)
            file.flush()
        except BaseException:
            Path(file.name).unlink()
            raise
    return Path(file.name)
