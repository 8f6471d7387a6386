"""Trained policies: kept with what they were trained on and how, found by what they are for.

A training runs beside the planner, in a process of its own, and keeps its policy in one short transaction.

A policy of maddpg has a say in plans only once it passed its check, or
where an operator lets it plan unchecked. One of gpg needs none: its schedules are taken for what they cost.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from stageloom.planner.schema.policy import PolicyInfo, PolicyVerdict
from stageloom.planner.store.desired import Push, push
from stageloom.planner.store.replan_settings import change_replan_settings
from stageloom.planner.store.rows import blank_of, known_device, message_of, shown
from stageloom.planner.store.tables import CheckpointRow
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import InputError, NotFoundError, RefusedError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Desired
from stageloom.shared.text import bounded

_PREFIX: Final = 8  # characters of a digest that may stand for it
_GATED: Final = "maddpg"
"""The kind that devices plan with, which needs a check."""


def store_policy(
    session: Session,
    body: bytes,
    *,
    policy: str,
    device_class: str,
    provenance: Mapping[str, Any],
    curves: Sequence[Mapping[str, Any]],
    trained_at_us: int,
    verdict: PolicyVerdict | None = None,
    unchecked: bool = False,
) -> Digest:
    """Keep a policy; the same bytes again become the newest, and keep the verdict that they had.

    `provenance` has `models`, `settings`, `versions`, `steps` and `validation_ratio`.
    """
    digest = digest_bytes([body])
    kept = session.get(CheckpointRow, digest)
    said = None if kept is None else kept.verdict
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
            verdict=said if verdict is None else msgspec.json.encode(verdict).decode(),
            unchecked=unchecked,
        )
    )
    return digest


def keep_verdict(session: Session, verdict: PolicyVerdict) -> None:
    """Keep what a policy's check said, in place of what an earlier one did."""
    row = session.get(CheckpointRow, verdict.policy)
    if row is not None:  # else it was removed meanwhile
        row.verdict = msgspec.json.encode(verdict).decode()


def require_gated(session: Session, digest: Digest) -> None:
    """Raises:
    InputError: the policy is of a kind that needs no check.
    """
    kind = session.scalar(select(CheckpointRow.policy).where(CheckpointRow.digest == digest))
    if kind != _GATED:
        raise InputError(
            f"policy {digest[:12]} is of {kind}, which needs no check",
            remedy=f"name one of {_GATED}; see `stageloom policy list`",
        )


_SAY: Final = (
    CheckpointRow.digest,
    CheckpointRow.policy,
    CheckpointRow.verdict,
    CheckpointRow.unchecked,
)
"""The columns that say whether a policy may plan."""


def _withheld(row: Any) -> str:
    """Why a policy has no say; empty where it has one."""
    if row.policy != _GATED or row.unchecked:
        return ""
    verdict = _verdict(row)
    if verdict is None:
        return f"policy {row.digest[:12]} was not checked: stageloom policy check {row.digest[:12]}"
    return (
        ""
        if verdict.passed
        else bounded(f"policy {row.digest[:12]} did not pass its check: {verdict.reason}")
    )


def _verdict(row: Any) -> PolicyVerdict | None:
    """That of a policy's check; None before one, and where another version wrote it."""
    try:
        return msgspec.json.decode(row.verdict, type=PolicyVerdict) if row.verdict else None
    except msgspec.DecodeError:
        return None


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


class FittingPolicy(NamedTuple):
    """The policy that is asked for plans, b"" where there is none, and why the one that fits is withheld."""

    body: bytes
    withheld: str = ""


def fitting_policy(
    session: Session, policy: str, device_class: str, artifacts: Sequence[Digest]
) -> FittingPolicy:
    """The newest policy of a device class that was trained over just these models and may plan.

    Where all of these are withheld, none, with the reason of the newest. Where there is none over these
    models, the class's newest, which says itself why it is not for them.
    """
    row = CheckpointRow
    found = session.execute(
        select(*_SAY, row.artifacts)
        .where(row.policy == policy, row.device_class == device_class)
        .order_by(row.trained_at_us.desc(), row.digest)
    ).all()
    if not found:
        return FittingPolicy(b"")
    wanted = set(artifacts)
    fitting = [one for one in found if json.loads(one.artifacts).keys() == wanted]
    chosen = next((one for one in fitting if not _withheld(one)), None)
    if chosen is None and fitting:
        return FittingPolicy(b"", _withheld(fitting[0]))
    digest = found[0].digest if chosen is None else chosen.digest
    return FittingPolicy(session.scalar(select(row.body).where(row.digest == digest)) or b"")


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


def named_policy(session: Session, asked: str, device_class: str, *, unchecked: bool = False) -> Digest:
    """The policy whose digest begins with `asked`, else the newest of that kind for the device class.

    Of a kind the newest that may plan is meant; with `unchecked` the newest, whatever its check said.

    Raises:
        InputError: there is none, or devices do not plan with its kind.
        RefusedError: it may not plan.
    """
    row = CheckpointRow
    if len(asked) >= _PREFIX:
        wanted = row.digest.startswith(asked, autoescape=True)
    else:
        wanted = and_(row.policy == asked, row.device_class == device_class)
    newest_first = row.trained_at_us.desc(), row.digest
    found = session.execute(select(*_SAY).where(wanted).order_by(*newest_first)).all()
    if not found:
        raise InputError(
            f"there is no policy {asked!r} for the device class {device_class!r}",
            remedy="train one with `stageloom policy train maddpg`, or see `stageloom policy list`",
        )
    if found[0].policy != _GATED:
        raise InputError(
            f"policy {found[0].digest[:12]} is of {found[0].policy}, with which no device plans",
            remedy=f"attach one of {_GATED}; see `stageloom policy list`",
        )
    by_kind = found if len(asked) < _PREFIX else found[:1]
    chosen = next((one for one in by_kind if unchecked or not _withheld(one)), None)
    if chosen is None:
        raise RefusedError(_withheld(found[0]), remedy="train it longer, or attach it with --unchecked")
    return Digest(chosen.digest)


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
            row.ratio, row.steps, row.trained_at_us, row.verdict, row.unchecked,
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
        verdict=_verdict(row),
        withheld=_withheld(row),
        unshown="",
    )


def _unshown(row: Any, reason: str) -> PolicyInfo:
    return blank_of(
        PolicyInfo,
        digest=row.digest,
        policy=bounded(row.policy, 128),
        ratio=1.0,
        trained_at_us=row.trained_at_us,
        withheld=_withheld(row),
        unshown=reason,
    )


def attach_policy(session: Session, device: DeviceId, policy: str, *, unchecked: bool = False) -> Desired:
    """Have a device plan alone with a policy from its next generation on; empty: with none.

    From then on re-plans leave that alone (`ReplanSettings.attach`).

    Raises:
        InputError: there is no such device or policy, or the device is revoked.
        RefusedError: the policy did not pass its check, and may not go `unchecked`.
    """
    device_class = known_device(session, device).device_class
    digest = named_policy(session, policy, device_class, unchecked=unchecked) if policy else ""
    desired = push(session, Push(device=device, plan=None, decided_by="operator", policy=digest))
    change_replan_settings(session, device, {"attach": False})
    return desired
