"""Trained policies: kept with what they were trained on and how, found by what they are for.

A training runs beside the planner, in a process of its own, and keeps its policy in one short transaction.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from stageloom.planner.schema.policy import PolicyInfo
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.replans import change_replan_settings
from stageloom.planner.store.rows import blank_of, known_device, message_of, shown
from stageloom.planner.store.tables import CheckpointRow
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import InputError, NotFoundError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Desired
from stageloom.shared.text import bounded

_PREFIX: Final = 8  # characters of a digest that may stand for it


def store_policy(
    session: Session,
    body: bytes,
    *,
    policy: str,
    device_class: str,
    provenance: Mapping[str, Any],
    curves: Sequence[Mapping[str, Any]],
    trained_at_us: int,
) -> Digest:
    """Keep a policy; the same bytes again only become the newest.

    `provenance` has `models`, `settings`, `versions`, `steps` and `validation_ratio`.
    """
    digest = digest_bytes([body])
    session.merge(
        CheckpointRow(
            digest=digest,
            policy=policy,
            device_class=device_class,
            artifacts=json.dumps(provenance["models"], sort_keys=True),
            settings=json.dumps(provenance["settings"], sort_keys=True),
            versions=json.dumps(provenance["versions"], sort_keys=True),
            curves=json.dumps(list(curves)),
            ratio=provenance["validation_ratio"],
            steps=provenance["steps"],
            trained_at_us=trained_at_us,
            body=body,
        )
    )
    return digest


def newest_policy(session: Session, policy: str, device_class: str) -> bytes | None:
    """The newest policy of a device class, else the newest of those for any device."""
    for wanted in dict.fromkeys((device_class, "")):
        body = session.scalar(
            select(CheckpointRow.body)
            .where(CheckpointRow.policy == policy, CheckpointRow.device_class == wanted)
            .order_by(CheckpointRow.trained_at_us.desc(), CheckpointRow.digest)
            .limit(1)
        )
        if body is not None:
            return body
    return None


def fitting_policy(session: Session, policy: str, device_class: str, artifacts: Sequence[Digest]) -> bytes:
    """The newest policy of a device class that was trained over just these models.

    Where there is none, the class's newest, which says itself why it is not for them; b"" where there is
    no policy of the class at all.
    """
    row = CheckpointRow
    found = session.execute(
        select(row.digest, row.artifacts)
        .where(row.policy == policy, row.device_class == device_class)
        .order_by(row.trained_at_us.desc(), row.digest)
    ).all()
    if not found:
        return b""
    wanted = set(artifacts)
    chosen = next((one for one in found if json.loads(one.artifacts).keys() == wanted), found[0])
    body = session.scalar(select(row.body).where(row.digest == chosen.digest))
    return body or b""


def policy_body(session: Session, digest: Digest) -> bytes | None:
    """A policy's bytes; None where there is none of this digest."""
    return session.scalar(select(CheckpointRow.body).where(CheckpointRow.digest == digest))


def digest_beginning(session: Session, beginning: str) -> Digest:
    """The digest of the newest policy whose digest begins so.

    Raises:
        NotFoundError: there is none.
    """
    row = CheckpointRow
    found = session.scalar(
        select(row.digest)
        .where(row.digest.startswith(beginning, autoescape=True))
        .order_by(row.trained_at_us.desc(), row.digest)
        .limit(1)
    )
    if found is None:
        raise NotFoundError(f"there is no policy {beginning!r}", remedy="see `stageloom policy list`")
    return Digest(found)


def named_policy(session: Session, asked: str, device_class: str) -> Digest:
    """The policy whose digest begins with `asked`, else the newest of that kind for the device class.

    Raises:
        InputError: there is none.
    """
    row = CheckpointRow
    newest_first = row.trained_at_us.desc(), row.digest
    if len(asked) >= _PREFIX:
        wanted = row.digest.startswith(asked, autoescape=True)
    else:
        wanted = and_(row.policy == asked, row.device_class == device_class)
    found = session.scalar(select(row.digest).where(wanted).order_by(*newest_first).limit(1))
    if found is None:
        raise InputError(
            f"there is no policy {asked!r} for the device class {device_class!r}",
            remedy="train one with `stageloom policy train maddpg`, or see `stageloom policy list`",
        )
    return Digest(found)


class PolicyPosition(NamedTuple):
    """Where a list of policies goes on: after this one."""

    trained_at_us: int
    digest: str


def policy_infos(
    session: Session, *, after: PolicyPosition | None = None, limit: int = 1_000_000
) -> list[PolicyInfo]:
    """Policies, newest first."""
    row = CheckpointRow
    wanted = (
        select(
            row.digest, row.policy, row.device_class, row.artifacts, row.settings, row.versions,
            row.ratio, row.steps, row.trained_at_us,
        )
        .order_by(row.trained_at_us.desc(), row.digest)
        .limit(limit)
    )  # fmt: skip
    if after is not None:
        same = and_(row.trained_at_us == after.trained_at_us, row.digest > after.digest)
        wanted = wanted.where(or_(row.trained_at_us < after.trained_at_us, same))
    return [shown(partial(_info, one), partial(_unshown, one)) for one in session.execute(wanted)]


def _info(row: Any) -> PolicyInfo:
    return message_of(
        PolicyInfo,
        row,
        artifacts=json.loads(row.artifacts),
        settings=json.loads(row.settings),
        versions=json.loads(row.versions),
        unshown="",
    )


def _unshown(row: Any, reason: str) -> PolicyInfo:
    return blank_of(
        PolicyInfo,
        digest=row.digest,
        policy=bounded(row.policy, 128),
        ratio=1.0,
        trained_at_us=row.trained_at_us,
        unshown=reason,
    )


def attach_policy(session: Session, device: DeviceId, policy: str) -> Desired:
    """Have a device plan alone with a policy from its next generation on; empty: with none.

    From then on re-plans leave that alone (`ReplanSettings.attach`).

    Raises:
        InputError: there is no such device or policy, or the device is revoked.
    """
    digest = named_policy(session, policy, known_device(session, device).device_class) if policy else ""
    desired = push(session, Push(device=device, plan=None, decided_by="operator", policy=digest))
    change_replan_settings(session, device, {"attach": False})
    return desired
