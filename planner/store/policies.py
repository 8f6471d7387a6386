"""Trained policies: kept with what they were trained on and how, found by what they are for.

A training runs beside the planner, in a process of its own, and keeps its policy in one short transaction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import and_, select
from sqlalchemy.orm import Session, defer

from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.replans import replan_settings, set_replan_settings
from stageloom.planner.store.rows import known_device
from stageloom.planner.store.tables import CheckpointRow
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Desired

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
            artifacts=provenance["models"],
            settings=provenance["settings"],
            versions=provenance["versions"],
            curves=list(curves),
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
    chosen = next((one for one in found if one.artifacts.keys() == wanted), found[0])
    body = session.scalar(select(row.body).where(row.digest == chosen.digest))
    return body or b""


def policy_body(session: Session, digest: Digest) -> bytes | None:
    """A policy's bytes; None where there is none of this digest."""
    return session.scalar(select(CheckpointRow.body).where(CheckpointRow.digest == digest))


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
            remedy="train one with `stageloom train maddpg`, or give a digest from `stageloom policy list`",
        )
    return Digest(found)


def kept_policies(session: Session, policy: str) -> Sequence[CheckpointRow]:
    """All policies of a kind, newest first, without their bytes."""
    row = CheckpointRow
    return session.scalars(
        select(row)
        .options(defer(row.body, raiseload=True))
        .where(row.policy == policy)
        .order_by(row.trained_at_us.desc(), row.digest)
    ).all()


def attach_policy(session: Session, device: DeviceId, policy: str) -> Desired:
    """Have a device plan alone with a policy from its next generation on; empty: with none.

    From then on re-plans leave that alone (`ReplanSettings.attach`).

    Raises:
        InputError: there is no such device or policy, or the device is revoked.
    """
    settings = replan_settings(session, device)
    digest = named_policy(session, policy, known_device(session, device).device_class) if policy else ""
    desired = push(session, Push(device=device, plan=None, decided_by="operator", policy=digest))
    set_replan_settings(session, device, replace(settings, attach=False))
    return desired
