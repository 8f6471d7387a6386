"""What each device should do: pushes, and the whole value that goes to a device.

A push is a handful of statements, and the same handful for a thousand devices as for one: whoever asks for
many at once, or at the same time as others, shares them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET
from sqlalchemy import BindParameter, Connection, bindparam, func, literal, select
from sqlalchemy.orm import Session

from stageloom.planner.schema.plan import MAX_PUSHED
from stageloom.planner.store.database import now_us
from stageloom.planner.store.plans import keep_plan, plan_info
from stageloom.planner.store.rollout_needs import is_asked
from stageloom.planner.store.rows import insert_rows
from stageloom.planner.store.tables import (
    ArtifactRow,
    CheckpointRow,
    DesiredRow,
    DeviceRow,
    GenerationRow,
    ModelVersionRow,
    PlannerRow,
    PlanRow,
    ProfileRow,
    ReplanRow,
    StageProfileRow,
)
from stageloom.planner.store.tried_replans import PENDING, tell_replans
from stageloom.shared.errors import InputError
from stageloom.shared.failpoint import failpoint
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.base import MOST
from stageloom.shared.messages.control import (
    Activation,
    ArtifactNeed,
    Autonomy,
    Desired,
    LocalPlan,
    PolicyNeed,
    ProfileRequest,
    StageProfileRequest,
)
from stageloom.shared.plan import Plan, decode_plan

LOCAL: Final = "local"
"""Who decides a plan that a device made, and the scheduler that it is kept under."""

_MOST: Final = 256
"""Devices a statement."""

_PROFILES: Final = 64  # what one message holds

_NUMBERS: Final = msgspec.msgpack.Decoder(tuple[int, ...])

_PREFIX: Final = 8  # characters of a digest that may stand for it


_decoded = lru_cache(maxsize=64)(decode_plan)
"""A plan is a value, and a fleet runs few of them."""


_NAMES: Final[BindParameter[Any]] = bindparam("names", expanding=True)

# The row of a device is the lock of what is desired of it: on a server another planner may push as well.
_DEVICES: Final = (
    select(
        DeviceRow.name,
        DeviceRow.revoked,
        select(PlannerRow.epoch).where(PlannerRow.id == 1).scalar_subquery(),
    )
    .where(DeviceRow.name.in_(_NAMES))
    .order_by(DeviceRow.name)
    .with_for_update(of=DeviceRow)
)

_LEVELS: Final = select(
    DesiredRow.device,
    DesiredRow.epoch,
    DesiredRow.generation,
    DesiredRow.plan,
    DesiredRow.autonomy,
    DesiredRow.activation,
    DesiredRow.policy,
    DesiredRow.compare_outputs,
    select(ReplanRow.replan)
    .where(
        ReplanRow.device == DesiredRow.device,
        ReplanRow.epoch == DesiredRow.epoch,
        ReplanRow.generation == DesiredRow.generation,
        ReplanRow.outcome == literal(PENDING, literal_execute=True),
    )
    .exists(),
).where(DesiredRow.device.in_(_NAMES))

_PLANS: Final = select(PlanRow.name, PlanRow.digest, PlanRow.wire).where(PlanRow.name.in_(_NAMES))

_ARTIFACTS: Final = (
    select(ArtifactRow.digest, ArtifactRow.size_bytes, ModelVersionRow.model, ModelVersionRow.number)
    .outerjoin(ModelVersionRow, ModelVersionRow.digest == ArtifactRow.digest)
    .where(ArtifactRow.digest.in_(_NAMES))
)

_POLICIES: Final = select(CheckpointRow.digest, func.length(CheckpointRow.body)).where(
    CheckpointRow.digest.in_(_NAMES)
)

_PROFILES_ASKED: Final = (
    select(
        ProfileRow.device,
        ProfileRow.request,
        ProfileRow.model,
        ProfileRow.artifact,
        ArtifactRow.size_bytes,
        ProfileRow.batch,
        ProfileRow.budget_s,
        ProfileRow.executor,
        ProfileRow.intra_op_threads,
        ProfileRow.parts,
    )
    .join(ArtifactRow, ArtifactRow.digest == ProfileRow.artifact)
    .where(ProfileRow.device.in_(_NAMES), ProfileRow.answered_at_us.is_(None))
    .order_by(ProfileRow.request)
)

_STAGES_ASKED: Final = (
    select(
        StageProfileRow.device,
        StageProfileRow.request,
        StageProfileRow.plan,
        StageProfileRow.budget_s,
        StageProfileRow.combined_blocks,
    )
    .where(StageProfileRow.device.in_(_NAMES), StageProfileRow.answered_at_us.is_(None))
    .order_by(StageProfileRow.request)
)

_LEVEL: Final = ("epoch", "generation", "plan", "autonomy", "activation", "policy", "compare_outputs")

_NEWER: Final = (
    f"ON CONFLICT (device) DO UPDATE SET version = {DesiredRow.__tablename__}.version + 1, "
    + ", ".join(f"{name} = excluded.{name}" for name in _LEVEL)
)

_HISTORY: Final = (
    *("device", "epoch", "generation", "plan", "digest", "decided_by", "decided_at_us"),
    *("state", "reason", "state_at_us"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """The next generation of one device.

    `plan` None keeps what runs and only numbers the change, such as a profile request. `activation` says
    whether the plan must win a trial on the device; `autonomy` None leaves it as it was. Generations rise by
    one, over epochs too, and are above `above_generation`. A revoked device takes what `even_revoked` desires
    of it when it joins again.
    """

    device: DeviceId
    plan: str | None
    decided_by: str
    autonomy: Autonomy | None = None
    activation: Activation = Activation.TRIAL
    above_generation: int = 0
    policy: str | None = None  # a checkpoint's digest; None leaves it as it was, empty takes it away
    compare_outputs: float | None = None  # within what the outputs of new versions are to agree; None: any
    even_revoked: bool = False


class _Level(NamedTuple):
    """What is desired of a device, as the tables hold it."""

    epoch: int
    generation: int
    plan: str | None
    autonomy: str
    activation: str
    policy: str | None
    compare_outputs: float | None
    needs_load: bool  # a re-plan under way pushed the plan; in its own table


class _Plan(NamedTuple):
    """A plan with what a device needs for it; `removed` names models of it whose artifact went."""

    name: str
    digest: Digest
    wire: bytes
    artifacts: tuple[ArtifactNeed, ...]
    removed: tuple[ArtifactNeed, ...]


def push(session: Session, request: Push) -> Desired:
    """Make a plan the device's next generation; returns what is desired now.

    Raises:
        InputError: there is no such device or plan, or the device is revoked, without `even_revoked`.
    """
    (result,) = push_all(session, [request])
    if isinstance(result, InputError):
        raise result
    return result


def push_all(session: Session, pushes: Sequence[Push]) -> list[Desired | InputError]:
    """`push` for many, each of which succeeds or is refused by itself."""
    session.flush()  # what follows goes past the session's memory
    results: list[Desired | InputError] = []
    for at in range(0, len(pushes), _MOST):
        results += _push_some(session.connection(), pushes[at : at + _MOST], now_us(session))
    return results


def push_wanted(session: Session, pushes: Sequence[Push]) -> list[Desired | InputError]:
    """`push_all` for pushes that somebody asked for, behind the failpoint of their commit."""
    results = push_all(session, pushes)
    failpoint("planner.desired.before")
    return results


def push_fleet(
    session: Session,
    devices: Sequence[DeviceId],
    plan: str,
    *,
    decided_by: str,
    after: str = "",
    autonomy: Autonomy | None = None,
    activation: Activation = Activation.TRIAL,
    compare_outputs: float | None = None,
) -> tuple[list[tuple[DeviceId, Desired | InputError]], bool]:
    """Push a plan to many devices; without names to all enrolled ones after `after`.

    Returns each device's new desired value or why it was refused, and whether more devices follow.

    Raises:
        InputError: there is no such plan, or it names a model that was removed.
    """
    plan_info(session, plan)
    names, more = list(dict.fromkeys(devices)), False
    if not names:
        names = _enrolled_after(session, after, MAX_PUSHED + 1)
        names, more = names[:MAX_PUSHED], len(names) > MAX_PUSHED
    wanted = [
        Push(
            device=name,
            plan=plan,
            decided_by=decided_by,
            autonomy=autonomy,
            activation=activation,
            compare_outputs=compare_outputs,
        )
        for name in names
    ]
    return list(zip(names, push_wanted(session, wanted), strict=True)), more


def _enrolled_after(session: Session, after: str, limit: int) -> list[DeviceId]:
    """Names of devices that are not revoked, in order, from the one after `after` on."""
    wanted = (
        select(DeviceRow.name)
        .where(DeviceRow.name > after, DeviceRow.revoked.is_(False))
        .order_by(DeviceRow.name)
        .limit(limit)
    )
    return [DeviceId(name) for name in session.scalars(wanted)]


def _push_some(connection: Connection, pushes: Sequence[Push], at_us: int) -> Sequence[Desired | InputError]:
    devices = {one.device for one in pushes}
    known, epoch = _locked(connection, devices)
    levels = _levels(connection, devices)
    before = dict(levels)
    cache = _PlanCache(connection)
    cache.fetch([one.plan for one in pushes if one.plan is not None])
    cache.fetch([level.plan for level in levels.values() if level.plan is not None])
    given: list[_Level | InputError] = []
    history: list[tuple[Any, ...]] = []
    changed: dict[DeviceId, _Level] = {}
    for one in pushes:
        try:
            wanted = _permitted(one, known, cache)
            level = _next(one, levels.get(one.device), wanted, epoch)
        except InputError as refusal:
            given.append(refusal)
            continue
        given.append(level)
        levels[one.device] = changed[one.device] = level
        name, digest = (wanted.name, wanted.digest) if wanted is not None else (None, None)
        history.append((one.device, epoch, level.generation, name, digest, one.decided_by, at_us, "", "", 0))
    rows = [(device, *level[: len(_LEVEL)], 1) for device, level in changed.items()]
    insert_rows(connection, DesiredRow.__tablename__, ("device", *_LEVEL, "version"), rows, conflict=_NEWER)
    insert_rows(connection, GenerationRow.__tablename__, _HISTORY, history)
    both = {device: (before[device], level) for device, level in changed.items() if device in before}
    tell_replans(
        connection,
        {
            device: ((old.epoch, old.generation), (new.epoch, new.generation), old.plan == new.plan)
            for device, (old, new) in both.items()
        },
    )
    extras = _Extras(connection, changed, cache)
    return [
        level if isinstance(level, InputError) else _whole(one.device, level, cache, extras)
        for one, level in zip(pushes, given, strict=True)
    ]


def _permitted(one: Push, known: dict[str, bool], cache: "_PlanCache") -> "_Plan | None":
    """The plan of a push that may be; None where it names none.

    Raises:
        InputError: as `push`.
    """
    if one.device not in known:
        raise InputError(f"there is no device {one.device!r}", remedy="see `stageloom device list`")
    if known[one.device] and not one.even_revoked:
        raise InputError(f"device {one.device!r} is revoked", remedy="enrol it again with a new token")
    if one.plan is None:
        return None
    wanted = cache.get(one.plan)
    if wanted is None:
        raise InputError(f"there is no plan {one.plan!r}", remedy="see `stageloom plan list`")
    for need in wanted.removed:
        raise InputError(  # a device would wait for the artifact for ever
            f"plan {wanted.name!r} needs artifact {need.digest[:12]} of model {need.model!r}, "
            "which was removed",
            remedy="add the model again, or make another plan",
        )
    return wanted


def _next(one: Push, before: _Level | None, wanted: _Plan | None, epoch: int) -> _Level:
    before = before or _Level(epoch, 0, None, Autonomy.OFF.value, one.activation.value, None, None, False)
    generation = max(before.generation, one.above_generation) + 1
    if generation > MOST:
        raise InputError(
            f"device {one.device!r} has no generation above {before.generation}",
            remedy="enrol it under another name",
        )
    return _Level(
        epoch=epoch,
        generation=generation,
        plan=wanted.name if wanted is not None else before.plan,
        autonomy=one.autonomy.value if one.autonomy is not None else before.autonomy,
        activation=one.activation.value if wanted is not None else before.activation,
        policy=before.policy if one.policy is None else one.policy or None,
        compare_outputs=one.compare_outputs if wanted is not None else before.compare_outputs,
        needs_load=before.needs_load and (wanted is None or wanted.name == before.plan),  # as `tell_replans`
    )


def newest_desired(session: Session, device: DeviceId) -> tuple[int, int]:
    """(epoch, generation) of what is desired of a device, (0, 0) for nothing; no one else pushes to it until
    this transaction ends."""
    session.flush()
    connection = session.connection()
    _locked(connection, [device])
    level = _levels(connection, [device]).get(device)
    return (level.epoch, level.generation) if level is not None else (0, 0)


def may_plan(session: Session, device: DeviceId) -> bool:
    """Whether a device may plan alone at all."""
    session.flush()
    level = _levels(session.connection(), [device]).get(device)
    return level is not None and level.autonomy != Autonomy.OFF.value


def adopt_plan(session: Session, device: DeviceId, local: LocalPlan, plan: Plan) -> Desired | None:
    """Keep a plan that the device made; its next generation, if nothing newer was desired meanwhile.

    Returns what is desired then, None where a newer value stands, or a rollout waits for the device's verdict
    on it: that may fail, and what runs on is what re-plans begin with. Whether the device may make it is for
    `stageloom.planner.store.generations.require_permitted` to say.

    Raises:
        InputError: an artifact of it is not here, or the device is revoked.
    """
    newest = newest_desired(session, device)
    name = keep_plan(session, plan, LOCAL)
    if newest != (local.epoch, local.generation) or is_asked(session, device):
        return None
    return push(session, Push(device=device, plan=name, decided_by=LOCAL))


# -- reading -------------------------------------------------------------------------------------------------


def desired(session: Session, device: DeviceId) -> Desired | None:
    """What the device should do, whole; None if nothing was ever desired of it."""
    return desired_of(session, [device]).get(device)


def settled_desired(session: Session, device: DeviceId) -> Desired | None:
    """`desired`, once whoever is at work on it has committed; for a transaction that writes."""
    _locked(session.connection(), [device])
    return desired(session, device)


def desired_of(session: Session, devices: Sequence[DeviceId]) -> dict[DeviceId, Desired]:
    """`desired` for many; devices of which nothing was ever desired are left out."""
    session.flush()
    connection = session.connection()
    cache = _PlanCache(connection)
    found: dict[DeviceId, Desired] = {}
    for at in range(0, len(devices), _MOST):
        levels = _levels(connection, devices[at : at + _MOST])
        cache.fetch([level.plan for level in levels.values() if level.plan is not None])
        extras = _Extras(connection, levels, cache)
        found |= {device: _whole(device, level, cache, extras) for device, level in levels.items()}
    return found


def _locked(connection: Connection, devices: Collection[DeviceId]) -> tuple[dict[str, bool], int]:
    """(whether each known device is revoked, this database's epoch)."""
    rows = connection.execute(_DEVICES, {"names": sorted(devices)}).all()
    return {name: revoked for name, revoked, _ in rows}, rows[0][2] if rows else 0


def _levels(connection: Connection, devices: Collection[DeviceId]) -> dict[DeviceId, _Level]:
    rows = connection.execute(_LEVELS, {"names": list(devices)})
    return {DeviceId(row.device): _Level(*row[1:]) for row in rows}


def _whole(device: DeviceId, level: _Level, cache: "_PlanCache", extras: "_Extras") -> Desired:
    plan = cache.get(level.plan) if level.plan is not None else None
    return Desired(
        epoch=level.epoch,
        generation=level.generation,
        plan_digest=plan.digest if plan is not None else None,
        plan=plan.wire if plan is not None else b"",
        artifacts=plan.artifacts if plan is not None else (),
        profiles=extras.profiles.get(device, ()),
        stage_profile=extras.stage_profiles.get(device),
        autonomy=Autonomy(level.autonomy),
        activation=Activation(level.activation),
        policy=extras.policies.get(level.policy or ""),
        compare_outputs=UNSET if level.compare_outputs is None else level.compare_outputs,
        needs_load=level.needs_load or UNSET,
    )


class _PlanCache:
    """Plans by what they are asked for, each read once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._plans: dict[str, _Plan | None] = {}

    def get(self, asked: str) -> _Plan | None:
        """The plan of that name, or whose digest begins with it; None if `fetch` found none."""
        return self._plans[asked]

    def fetch(self, asked: Iterable[str]) -> None:
        """Read what is not here yet."""
        missing = set(asked) - self._plans.keys()
        if not missing:
            return
        rows = {row[0]: row for row in self._connection.execute(_PLANS, {"names": sorted(missing)})}
        for prefix in missing - rows.keys():
            row = self._by_digest(prefix) if len(prefix) >= _PREFIX else None
            if row is not None:
                rows[prefix] = row
        needed = {model.artifact for row in rows.values() for model in _decoded(row[2]).models}
        known = self._artifacts(needed)
        for one in missing:
            self._plans[one] = _plan(*rows[one][:3], known) if one in rows else None

    def _by_digest(self, prefix: str) -> Any:
        wanted = (
            select(PlanRow.name, PlanRow.digest, PlanRow.wire)
            .where(PlanRow.digest.startswith(prefix, autoescape=True))
            .order_by(PlanRow.created_at_us)
            .limit(1)
        )
        return self._connection.execute(wanted).first()

    def _artifacts(self, digests: Collection[Digest]) -> dict[str, "_Artifact"]:
        known: dict[str, _Artifact] = {}
        rows = self._connection.execute(_ARTIFACTS, {"names": sorted(digests)})
        for digest, size_bytes, model, number in rows:
            artifact = known.setdefault(digest, _Artifact(size_bytes, {}))
            if model is not None:
                artifact.versions[model] = number
        return known


class _Artifact(NamedTuple):
    """An artifact of the store: its size in bytes, and by model which version it is of it."""

    size_bytes: int
    versions: dict[str, int]


def _plan(name: str, digest: str, wire: bytes, known: Mapping[str, _Artifact]) -> _Plan:
    needs = []
    for model in _decoded(wire).models:
        size_bytes, versions = known.get(model.artifact, _Artifact(1, {}))
        needs.append(ArtifactNeed(model.name, model.artifact, size_bytes, versions.get(model.name, 1)))
    removed = (need for need in needs if not known.get(need.digest, _Artifact(1, {})).versions)
    return _Plan(name, Digest(digest), wire, tuple(needs), tuple(removed))


class _Extras:
    """Policies that devices plan with, and measurements that they were asked for and have not answered."""

    def __init__(self, connection: Connection, levels: Mapping[DeviceId, _Level], cache: _PlanCache) -> None:
        names = {"names": list(levels)}
        self.policies: dict[str, PolicyNeed] = {}
        if wanted := {level.policy for level in levels.values() if level.policy}:
            for digest, size_bytes in connection.execute(_POLICIES, {"names": sorted(wanted)}):
                self.policies[digest] = PolicyNeed(Digest(digest), size_bytes)
        self.profiles: dict[str, tuple[ProfileRequest, ...]] = {}
        for (
            device,
            request,
            model,
            artifact,
            size_bytes,
            batch,
            budget_s,
            executor,
            threads,
            parts,
        ) in connection.execute(_PROFILES_ASKED, names):
            before = self.profiles.get(device, ())
            if len(before) < _PROFILES:
                asked = ProfileRequest(
                    request,
                    ArtifactNeed(model, Digest(artifact), size_bytes),
                    batch,
                    budget_s,
                    executor or UNSET,
                    threads or UNSET,
                    parts or UNSET,
                )
                self.profiles[device] = (*before, asked)
        self.stage_profiles: dict[str, StageProfileRequest] = {}
        rows = connection.execute(_STAGES_ASKED, names).all()
        cache.fetch(row.plan for row in rows)
        for device, request, name, budget_s, combined_blocks in rows:
            plan = cache.get(name)
            if plan is not None and device not in self.stage_profiles:  # the oldest: one plan at a time
                self.stage_profiles[device] = StageProfileRequest(
                    request=request,
                    plan_digest=plan.digest,
                    plan=plan.wire,
                    artifacts=plan.artifacts,
                    budget_s=budget_s,
                    combined_blocks=_NUMBERS.decode(combined_blocks),
                )
