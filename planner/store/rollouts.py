"""Rollouts as the store holds them: made, advanced, paused, resumed, aborted. Each function is one part of a
transaction; what a rollout does next is for `stageloom.planner.rollout.machine` to say.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

from sqlalchemy import and_, delete, exists, func, select, tuple_, update
from sqlalchemy.orm import Session, aliased

from stageloom.planner.labels import label_text, parse_selection
from stageloom.planner.rollout.machine import (
    LIVE,
    UNDECIDED,
    Rollout,
    RolloutDevice,
    RolloutStep,
    next_step,
)
from stageloom.planner.rollout.waves import parse_waves, wave_ends
from stageloom.planner.schema.rollout import (
    AskState,
    RolloutCreateRequest,
    RolloutDeviceInfo,
    RolloutInfo,
    RolloutState,
)
from stageloom.planner.store.database import now_us
from stageloom.planner.store.desired import Push, push_all
from stageloom.planner.store.generations import ENDS, REFUSED
from stageloom.planner.store.labels import selected_devices
from stageloom.planner.store.models import named_models
from stageloom.planner.store.replans import IS_PENDING
from stageloom.planner.store.rollout_needs import REVERSIBLE
from stageloom.planner.store.rows import add_event, message_of, run_on_rows
from stageloom.planner.store.tables import (
    DesiredRow,
    GenerationRow,
    PlanRow,
    ReplanRow,
    ReportedRow,
    RolloutDeviceRow,
    RolloutRow,
)
from stageloom.shared.errors import InputError, NotFoundError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Desired, DeviceState
from stageloom.shared.plan import decode_plan
from stageloom.shared.text import bounded

DECIDED_BY: Final = "rollout"
MOST_LIVE: Final = 64
"""Rollouts that run or are paused at the same time."""

_ENDED: Final = {state.value for state in ENDS}
_KEPT: Final = aliased(GenerationRow)
_LIVE: Final = [state.value for state in LIVE]
_ROWS: Final = 256  # devices a statement
_GIVEN_ANOTHER: Final = "it was given another plan meanwhile"

_CHANGED: Final = """
WITH given (named, whose, now_is, why, in_epoch, in_generation, at_us) AS (VALUES {rows})
UPDATE rollout_devices SET
    state = now_is, reason = why, epoch = in_epoch, generation = in_generation, changed_at_us = at_us
FROM given WHERE rollout = named AND device = whose
"""

_ASKED: Final = """
WITH given (named, whose, now_is, why, in_epoch, in_generation, at_us, old, new) AS (VALUES {rows})
UPDATE rollout_devices SET
    state = now_is, reason = why, epoch = in_epoch, generation = in_generation, changed_at_us = at_us,
    old_plan = old, new_plan = new
FROM given WHERE rollout = named AND device = whose
"""


class DueDevice(NamedTuple):
    """A device that is to be asked: the plan that gets the version, above which (epoch, generation)."""

    device: DeviceId
    plan: str
    above: tuple[int, int]


@dataclass(frozen=True, slots=True)
class RolloutTurn:
    """What a turn of a rollout found: devices to ask, and what is desired of devices now."""

    model: str = ""
    artifact: Digest | None = None
    ask: tuple[DueDevice, ...] = ()
    changed: tuple[tuple[DeviceId, Desired], ...] = ()
    due: bool = False  # something is to be written


class _Change(NamedTuple):
    """A device's new state, and the generation that decides; `give_back`: it gets its old plan back."""

    device: DeviceId
    state: AskState
    reason: str = ""
    follow: tuple[int, int] | None = None
    give_back: bool = False


@dataclass(slots=True)
class _Members:
    """The devices of a rollout as rows, and what is desired of those that matter now.

    `base`: the plan that gets the version, which is the desired one unless the device does not keep that.
    """

    rows: dict[DeviceId, Any]
    desired: dict[DeviceId, tuple[tuple[int, int], str | None]]
    base: dict[DeviceId, str | None]
    holds: dict[str, bool] = field(default_factory=dict)  # by plan: whether it has the rollout's artifact


# -- making and showing --------------------------------------------------------------------------------------


def create_rollout(session: Session, request: RolloutCreateRequest) -> RolloutInfo:
    """Keep a new rollout, which runs from then on.

    Raises:
        InputError: there is no such version or device, a device is in another rollout that has not ended, the
            waves or labels are none, or the name is taken.
    """
    (version,) = named_models(session, [request.model])
    labels, words = parse_selection(request.label), parse_waves(request.waves)
    selected = selected_devices(session, labels)
    devices = _running(session, selected, version.model)
    if not devices:
        said = f" with {label_text(labels)}" if labels else ""
        raise InputError(
            f"no device{said} should run model {version.model!r}",
            remedy="see `stageloom device list`; a rollout replaces the version that a device's plan has",
        )
    live = session.scalar(select(func.count()).select_from(RolloutRow).where(RolloutRow.state.in_(_LIVE)))
    if (live or 0) >= MOST_LIVE:
        raise InputError(f"{MOST_LIVE} rollouts have not ended", remedy="end one of them first")
    _require_free(session, devices, beside=None)
    name = request.rollout or _free_name(session, f"{version.model[:48]}-v{version.version}")
    if session.get(RolloutRow, name) is not None:
        raise InputError(f"there is a rollout {name!r} already", remedy="choose another --name")
    at_us = now_us(session)
    ends = wave_ends(words, len(devices))
    session.add(
        RolloutRow(
            name=name,
            model=version.model,
            number=version.version,
            artifact=version.digest,
            labels=labels,
            waves=ends,
            max_failed=request.max_failed,
            reach_s=request.reach_s,
            state=RolloutState.RUNNING.value,
            wave=0,
            confirmed=0,
            reason="",
            created_at_us=at_us,
            changed_at_us=at_us,
            ended_at_us=None,
        )
    )
    session.flush()
    session.add_all(
        RolloutDeviceRow(
            rollout=name,
            device=device,
            wave=sum(end <= index for end in ends),
            state=AskState.WAITING.value,
            old_plan=None,
            new_plan=None,
            epoch=0,
            generation=0,
            reason="",
            changed_at_us=at_us,
        )
        for index, device in enumerate(devices)
    )
    add_event(
        session,
        None,
        "rollout",
        f"{name}: {version.model}@{version.version} to {len(devices)} devices in {len(ends)} waves",
    )
    return rollout_info(session, name)


def _running(session: Session, devices: Sequence[DeviceId], model: str) -> list[DeviceId]:
    """Those that should run a model, whatever version."""
    plans: dict[str, str] = {}
    for some in _some(devices):
        rows = session.execute(
            select(DesiredRow.device, DesiredRow.plan).where(
                DesiredRow.device.in_(some), DesiredRow.plan.is_not(None)
            )
        )
        plans |= {device: plan for device, plan in rows if plan is not None}
    with_model = {
        name for name, wire in _wires(session, set(plans.values())).items() if model in _artifacts(wire)
    }
    return [device for device in devices if plans.get(device) in with_model]


def _wires(session: Session, names: Collection[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for some in _some(sorted(names)):
        rows = session.execute(select(PlanRow.name, PlanRow.wire).where(PlanRow.name.in_(some)))
        found |= {name: wire for name, wire in rows}
    return found


@lru_cache(maxsize=2048)
def _artifacts(wire: bytes) -> Mapping[str, Digest]:
    """A plan's artifacts by the names of its models. A turn a second looks at the plans of all devices."""
    return {one.name: one.artifact for one in decode_plan(wire).models}


def _some(items: Sequence[Any]) -> Iterable[list[Any]]:
    return (list(items[at : at + _ROWS]) for at in range(0, len(items), _ROWS))


def _require_free(session: Session, devices: Sequence[DeviceId], *, beside: str | None) -> None:
    """Raises:
    InputError: a device is in a rollout that has not ended, other than `beside`.
    """
    for some in _some(devices):
        taken = session.execute(
            select(RolloutDeviceRow.device, RolloutDeviceRow.rollout)
            .join(RolloutRow, RolloutRow.name == RolloutDeviceRow.rollout)
            .where(
                RolloutDeviceRow.device.in_(some),
                RolloutRow.state.in_(_LIVE),
                RolloutRow.name != (beside or ""),
            )
            .order_by(RolloutDeviceRow.device)
            .limit(1)
        ).first()
        if taken is not None:
            raise InputError(
                f"device {taken[0]!r} is in rollout {taken[1]!r}, which has not ended",
                remedy=f"wait for it, or `stageloom rollout abort {taken[1]}`",
            )


def _free_name(session: Session, wanted: str) -> str:
    names = set(session.scalars(select(RolloutRow.name).where(RolloutRow.name.startswith(wanted))))
    if wanted not in names:
        return wanted
    return next(name for number in range(2, len(names) + 3) if (name := f"{wanted}-{number}") not in names)


def rollout_info(session: Session, name: str) -> RolloutInfo:
    """One rollout.

    Raises:
        NotFoundError: there is none of that name.
    """
    return _infos(session, [known_rollout(session, name)])[0]


def rollout_infos(session: Session, *, after: str = "", limit: int = 256) -> list[RolloutInfo]:
    """Rollouts, newest first, those after the one named.

    Raises:
        NotFoundError: there is no such rollout.
    """
    wanted = select(RolloutRow).order_by(RolloutRow.created_at_us.desc(), RolloutRow.name.desc()).limit(limit)
    if after:
        last = known_rollout(session, after)
        wanted = wanted.where(
            tuple_(RolloutRow.created_at_us, RolloutRow.name) < (last.created_at_us, last.name)
        )
    return _infos(session, list(session.scalars(wanted)))


def _infos(session: Session, rows: Sequence[RolloutRow]) -> list[RolloutInfo]:
    numbers: dict[str, dict[str, int]] = {}
    counts = session.execute(
        select(RolloutDeviceRow.rollout, RolloutDeviceRow.state, func.count())
        .where(RolloutDeviceRow.rollout.in_([row.name for row in rows]))
        .group_by(RolloutDeviceRow.rollout, RolloutDeviceRow.state)
    )
    for name, state, number in counts:
        numbers.setdefault(name, {})[state] = number
    return [
        message_of(
            RolloutInfo,
            row,
            rollout=row.name,
            version=row.number,
            state=RolloutState(row.state),
            wave=row.wave + 1,
            waves=len(row.waves),
            devices=sum(numbers.get(row.name, {}).values()),
            **{state.value: numbers.get(row.name, {}).get(state.value, 0) for state in AskState},
        )
        for row in rows
    ]


def rollout_devices(
    session: Session, name: str, *, after: str = "", limit: int = 256
) -> list[RolloutDeviceInfo]:
    """Devices of a rollout by wave and name, those after the device `after`.

    Raises:
        NotFoundError: there is no such rollout, or no such device in it.
    """
    known_rollout(session, name)
    wanted = (
        select(RolloutDeviceRow)
        .where(RolloutDeviceRow.rollout == name)
        .order_by(RolloutDeviceRow.wave, RolloutDeviceRow.device)
        .limit(limit)
    )
    if after:
        last = session.get(RolloutDeviceRow, (name, after))
        if last is None:
            raise NotFoundError(
                f"rollout {name!r} has no device {after!r}", remedy="use `next` of the page before"
            )
        wanted = wanted.where(
            tuple_(RolloutDeviceRow.wave, RolloutDeviceRow.device) > (last.wave, last.device)
        )
    return [
        message_of(
            RolloutDeviceInfo,
            row,
            device=DeviceId(row.device),
            wave=row.wave + 1,
            state=AskState(row.state),
        )
        for row in session.scalars(wanted)
    ]


def known_rollout(session: Session, name: str) -> RolloutRow:
    """The rollout's row.

    Raises:
        NotFoundError: there is no such rollout.
    """
    row = session.get(RolloutRow, name)
    if row is None:
        raise NotFoundError(f"there is no rollout {name!r}", remedy="see `stageloom rollout list`")
    return row


def live_rollouts(session: Session) -> list[str]:
    """Names of those that run or are paused, oldest first."""
    return list(
        session.scalars(
            select(RolloutRow.name)
            .where(RolloutRow.state.in_(_LIVE))
            .order_by(RolloutRow.created_at_us, RolloutRow.name)
        )
    )


def undecided_devices(session: Session, name: str) -> set[DeviceId]:
    """Devices of a rollout's current wave that are not decided."""
    rows = session.scalars(
        select(RolloutDeviceRow.device)
        .join(RolloutRow, RolloutRow.name == RolloutDeviceRow.rollout)
        .where(
            RolloutRow.name == name,
            RolloutDeviceRow.wave == RolloutRow.wave,
            RolloutDeviceRow.state.in_([state.value for state in UNDECIDED]),
        )
    )
    return {DeviceId(device) for device in rows}


# -- advancing -----------------------------------------------------------------------------------------------


def rollout_turn(session: Session, name: str, away_s: Mapping[DeviceId, float]) -> RolloutTurn:
    """What `advance_rollout` would do; for a transaction that only reads."""
    return _turn(session, name, away_s, write=False)


def advance_rollout(session: Session, name: str, away_s: Mapping[DeviceId, float]) -> RolloutTurn:
    """Take over what devices decided, and do what follows from it; devices to ask are only named.

    `away_s`: seconds for which devices have been offline; none for those online.
    """
    return _turn(session, name, away_s, write=True)


def _turn(session: Session, name: str, away_s: Mapping[DeviceId, float], *, write: bool) -> RolloutTurn:
    row = session.get(RolloutRow, name)
    if row is None or row.state not in _LIVE:
        return RolloutTurn()
    members = _members(session, row)
    changes = {change.device: change for change in _verdicts(session, row, members)}
    states = {
        device: changes[device].state if device in changes else AskState(one.state)
        for device, one in members.rows.items()
    }
    rollout = _rollout(row, members, states)
    step = _settled_step(rollout, away_s)
    for device in step.unreached:
        was_asked = states[device] is AskState.ASKED
        reason = f"offline for more than {row.reach_s:g} s"
        changes[device] = _Change(device, AskState.UNREACHED, reason, give_back=was_asked)
    for device in step.withdrawn:
        changes[device] = _Change(device, AskState.WITHDRAWN, "the rollout stopped", give_back=True)
    due = bool(changes) or (step.state.value, step.wave) != (row.state, row.wave)
    given: tuple[tuple[DeviceId, Desired], ...] = ()
    if write and due:
        given = _apply(session, row, members, list(changes.values()))
        if step.state.value != row.state:
            _enter(session, row, step.state, step.reason)
        row.wave, row.changed_at_us = step.wave, now_us(session)
        session.flush()
    _learn(session, row, members, [members.base[device] for device in step.ask])
    asks = tuple(
        DueDevice(device, plan, members.desired[device][0])
        for device in step.ask
        for plan in [members.base[device]]
        if plan is not None and plan in members.holds  # the others are left out at the next turn
    )
    return RolloutTurn(row.model, Digest(row.artifact), asks, given, due)


def _members(session: Session, row: RolloutRow) -> _Members:
    found = session.execute(
        select(
            RolloutDeviceRow.device,
            RolloutDeviceRow.wave,
            RolloutDeviceRow.state,
            RolloutDeviceRow.old_plan,
            RolloutDeviceRow.new_plan,
            RolloutDeviceRow.epoch,
            RolloutDeviceRow.generation,
            DesiredRow.epoch.label("desired_epoch"),
            DesiredRow.generation.label("desired_generation"),
            DesiredRow.plan.label("desired_plan"),
        )
        .outerjoin(DesiredRow, DesiredRow.device == RolloutDeviceRow.device)
        .where(RolloutDeviceRow.rollout == row.name)
        .order_by(RolloutDeviceRow.wave, RolloutDeviceRow.device)
    ).all()
    rows = {DeviceId(one.device): one for one in found}
    desired = {
        device: ((one.desired_epoch or 0, one.desired_generation or 0), one.desired_plan)
        for device, one in rows.items()
    }
    base = {device: plan for device, (_, plan) in desired.items()}
    return _Members(rows, desired, base | _plans_that_run(session, row))


def _plans_that_run(session: Session, row: RolloutRow) -> dict[DeviceId, str]:
    """Of devices that are to be asked soon, what they run instead of a desired plan that they did not keep.

    Such a plan was refused, or a re-plan has it tried and it may be yet: with another version of a model it
    would run without a trial. What runs is what the device says, else what it kept last.
    """
    said = select(func.min(PlanRow.name)).where(PlanRow.digest == ReportedRow.active).scalar_subquery()
    kept = (
        select(_KEPT.plan)
        .where(
            _KEPT.device == RolloutDeviceRow.device,
            _KEPT.plan.is_not(None),
            _KEPT.state == DeviceState.COMMITTED.value,
        )
        .order_by(_KEPT.position.desc())
        .limit(1)
        .scalar_subquery()
    )
    newest = (
        (GenerationRow.device == DesiredRow.device)
        & (GenerationRow.epoch == DesiredRow.epoch)
        & (GenerationRow.generation == DesiredRow.generation)
    )
    is_tried = exists().where(
        ReplanRow.device == DesiredRow.device,
        ReplanRow.epoch == DesiredRow.epoch,
        ReplanRow.generation == DesiredRow.generation,
        IS_PENDING,
    )
    rows = session.execute(
        select(RolloutDeviceRow.device, func.coalesce(said, kept))
        .join(DesiredRow, DesiredRow.device == RolloutDeviceRow.device)
        .join(GenerationRow, newest)
        .outerjoin(ReportedRow, ReportedRow.device == RolloutDeviceRow.device)
        .where(
            RolloutDeviceRow.rollout == row.name,
            RolloutDeviceRow.state == AskState.WAITING.value,
            RolloutDeviceRow.wave <= row.wave + 1,
            GenerationRow.state.in_(REFUSED) | is_tried,
        )
    )
    return {DeviceId(device): plan for device, plan in rows if plan is not None}


def _rollout(row: RolloutRow, members: _Members, states: Mapping[DeviceId, AskState]) -> Rollout:
    return Rollout(
        state=RolloutState(row.state),
        wave=row.wave,
        waves=len(row.waves),
        confirmed=row.confirmed,
        max_failed=row.max_failed,
        reach_s=row.reach_s,
        devices=tuple(
            RolloutDevice(device, one.wave, states[device]) for device, one in members.rows.items()
        ),
    )


def _settled_step(rollout: Rollout, away_s: Mapping[DeviceId, float]) -> RolloutStep:
    """The step that a rollout takes now; past waves of which nothing is left to do."""
    step = next_step(rollout, away_s)
    while step.state is rollout.state and step.wave != rollout.wave:
        rollout = Rollout(
            state=step.state,
            wave=step.wave,
            waves=rollout.waves,
            confirmed=rollout.confirmed,
            max_failed=rollout.max_failed,
            reach_s=rollout.reach_s,
            devices=rollout.devices,
        )
        step = next_step(rollout, away_s)
    return step


def _verdicts(session: Session, row: RolloutRow, members: _Members) -> list[_Change]:
    """What devices that were asked have decided, or what became of the asking."""
    asked = {device: one for device, one in members.rows.items() if one.state == AskState.ASKED.value}
    waiting = [device for device, one in members.rows.items() if one.state == AskState.WAITING.value]
    in_wave = [device for device in waiting if members.rows[device].wave == row.wave]
    plans = [*(members.desired[device][1] for device in asked), *(members.base[device] for device in in_wave)]
    _learn(session, row, members, plans)
    reached = _reached(session, row.name)
    changes: list[_Change] = []
    for device, one in asked.items():
        newest, plan = members.desired[device]
        state, reason = reached.get(device, ("", ""))
        if state == DeviceState.COMMITTED.value:
            changes.append(_Change(device, AskState.DONE))
        elif state in _ENDED:
            changes.append(_Change(device, AskState.FAILED, f"{state}: {reason}", give_back=True))
        elif newest > (one.epoch, one.generation):
            if plan is not None and members.holds.get(plan):
                changes.append(_Change(device, AskState.ASKED, follow=newest))
            else:
                changes.append(_Change(device, AskState.SKIPPED, _GIVEN_ANOTHER))
    for device in in_wave:
        plan = members.base[device]
        if plan is None or plan not in members.holds:
            changes.append(_Change(device, AskState.SKIPPED, f"it should not run {row.model} any more"))
    return changes


def _reached(session: Session, rollout: str) -> dict[DeviceId, tuple[str, str]]:
    """(state, reason) of the generations with which devices of a rollout were asked."""
    rows = session.execute(
        select(GenerationRow.device, GenerationRow.state, GenerationRow.reason).join(
            RolloutDeviceRow,
            and_(
                RolloutDeviceRow.device == GenerationRow.device,
                RolloutDeviceRow.epoch == GenerationRow.epoch,
                RolloutDeviceRow.generation == GenerationRow.generation,
                RolloutDeviceRow.rollout == rollout,
                RolloutDeviceRow.state == AskState.ASKED.value,
            ),
        )
    )
    return {DeviceId(device): (state, reason) for device, state, reason in rows}


def _learn(session: Session, row: RolloutRow, members: _Members, plans: Iterable[str | None]) -> None:
    """Note of plans with the rollout's model whether they have its artifact; others are left out."""
    for name, wire in _wires(session, {plan for plan in plans if plan is not None}).items():
        artifact = _artifacts(wire).get(row.model)
        if artifact is not None:
            members.holds[name] = artifact == row.artifact


def _apply(
    session: Session, row: RolloutRow, members: _Members, changes: Sequence[_Change]
) -> tuple[tuple[DeviceId, Desired], ...]:
    at_us = now_us(session)
    updates = []
    for change in changes:
        before = members.rows[change.device]
        follow = change.follow or (before.epoch, before.generation)
        updates.append((row.name, change.device, change.state.value, bounded(change.reason), *follow, at_us))
    run_on_rows(session.connection(), _CHANGED, updates)
    return _give_back(session, row, [change.device for change in changes if change.give_back], members)


def _give_back(
    session: Session, row: RolloutRow, devices: Sequence[DeviceId], members: _Members
) -> tuple[tuple[DeviceId, Desired], ...]:
    """Push the old plans to devices of which a plan with the rollout's artifact is desired."""
    _learn(session, row, members, [members.desired[device][1] for device in devices])
    pushes = [
        Push(device=device, plan=old, decided_by=DECIDED_BY)
        for device in devices
        for old in [members.rows[device].old_plan]
        if old is not None and members.holds.get(members.desired[device][1] or "", False)
    ]
    results = push_all(session, pushes)
    return tuple(
        (one.device, result)
        for one, result in zip(pushes, results, strict=True)
        if isinstance(result, Desired)  # a revoked device is given nothing any more
    )


def _require_no_other_change(
    session: Session, row: RolloutRow, devices: Sequence[DeviceId], members: _Members
) -> None:
    """Refuse to give back an old plan that would take back another model's version as well."""
    now = {device: members.desired[device][1] for device in devices}
    before = {device: members.rows[device].old_plan for device in devices}
    wires = _wires(session, {plan for plan in (*now.values(), *before.values()) if plan is not None})

    def others(plan: str | None) -> dict[str, Digest]:
        models = _artifacts(wires[plan]) if plan in wires else {}
        return {name: artifact for name, artifact in models.items() if name != row.model}

    for device in devices:
        old, present = others(before[device]), others(now[device])
        changed = sorted(name for name in old.keys() & present.keys() if old[name] != present[name])
        if changed:
            raise InputError(
                f"{device} has another version of {changed[0]!r} by now, which its old plan would undo",
                remedy=f"bring the old version of {row.model!r} back with a rollout of its own",
            )


def _enter(session: Session, row: RolloutRow, state: RolloutState, reason: str) -> None:
    row.state, row.reason, row.changed_at_us = state.value, bounded(reason), now_us(session)
    row.ended_at_us = None if state in LIVE else row.changed_at_us
    add_event(session, None, "rollout", bounded(f"{row.name} {state.value}: {reason}".rstrip(": ")))


def ask_devices(
    session: Session, name: str, asks: Sequence[tuple[DueDevice, str]]
) -> tuple[tuple[DeviceId, Desired], ...]:
    """Push plans to devices of a rollout's wave, those that nothing happened to since `rollout_turn`.

    Each ask comes with the name of the plan that has the version. A device whose plan is that one has the
    version already.
    """
    row = session.get(RolloutRow, name)
    if row is None or row.state != RolloutState.RUNNING.value:
        return ()
    members = _members(session, row)
    wanted = [
        (ask, plan)
        for ask, plan in asks
        if (one := members.rows.get(ask.device)) is not None
        and (one.state, one.wave) == (AskState.WAITING.value, row.wave)
        and (members.desired[ask.device][0], members.base[ask.device]) == (ask.above, ask.plan)
    ]
    pushes = [
        Push(device=ask.device, plan=plan, decided_by=DECIDED_BY) for ask, plan in wanted if plan != ask.plan
    ]
    results = dict(zip((one.device for one in pushes), push_all(session, pushes), strict=True))
    at_us = now_us(session)
    updates = []
    for ask, plan in wanted:
        result = results.get(ask.device)
        state, reason, number = AskState.ASKED, "", (0, 0)
        if result is None:
            state, reason = AskState.DONE, "it had the version already"
        elif isinstance(result, InputError):
            state, reason = AskState.FAILED, bounded(str(result))
        else:
            number = (result.epoch, result.generation)
        updates.append((name, ask.device, state.value, reason, *number, at_us, ask.plan, plan))
    run_on_rows(session.connection(), _ASKED, updates)
    return tuple((device, result) for device, result in results.items() if isinstance(result, Desired))


def fail_devices(session: Session, name: str, devices: Sequence[DeviceId], reason: str) -> None:
    """Note that devices that wait cannot be asked: nothing can be planned for them with the version."""
    for some in _some(devices):
        session.execute(
            update(RolloutDeviceRow)
            .where(
                RolloutDeviceRow.rollout == name,
                RolloutDeviceRow.device.in_(some),
                RolloutDeviceRow.state == AskState.WAITING.value,
            )
            .values(state=AskState.FAILED.value, reason=bounded(reason), changed_at_us=now_us(session)),
            execution_options={"synchronize_session": False},
        )


# -- what operators order ------------------------------------------------------------------------------------


def pause_rollout(session: Session, name: str) -> RolloutInfo:
    """DueDevice no further device until `resume_rollout`; a repeat changes nothing.

    Raises:
        InputError: there is no such rollout, or it has ended.
    """
    row = _live(session, name)
    if row.state == RolloutState.RUNNING.value:
        _enter(session, row, RolloutState.PAUSED, "by operator")
    session.flush()
    return rollout_info(session, name)


def resume_rollout(session: Session, name: str) -> RolloutInfo:
    """Go on; a wave that is decided is left although it did not reach all its devices.

    Raises:
        InputError: there is no such rollout, or it has ended.
    """
    row = _live(session, name)
    if row.state == RolloutState.PAUSED.value:
        if not undecided_devices(session, name):
            row.confirmed = row.wave + 1
        _enter(session, row, RolloutState.RUNNING, "")
    session.flush()
    return rollout_info(session, name)


def _live(session: Session, name: str) -> RolloutRow:
    row = known_rollout(session, name)
    if row.state not in _LIVE:
        raise InputError(
            f"rollout {name!r} has ended: {row.state}", remedy="begin another with `stageloom rollout create`"
        )
    return row


def abort_rollout(
    session: Session, name: str, *, rollback: bool
) -> tuple[RolloutInfo, tuple[tuple[DeviceId, Desired], ...]]:
    """End a rollout, a stopped one too; returns it, and what is desired of devices now.

    Devices that are undecided get their old plan back, with `rollback` also those that keep the version. One
    that was given a plan without it since has nothing to go back from: it counts as skipped.

    Raises:
        InputError: there is no such rollout, it was aborted or is complete, or a device to roll back is in
            another rollout by now, or has other versions of other models.
    """
    row = known_rollout(session, name)
    if row.state not in REVERSIBLE:
        raise InputError(
            f"rollout {name!r} has ended: {row.state}",
            remedy="bring another version with `stageloom rollout create`",
        )
    members = _members(session, row)
    asked = [device for device, one in members.rows.items() if one.state == AskState.ASKED.value]
    # One that had the version before has nothing to go back to.
    done = [
        device
        for device, one in members.rows.items()
        if rollback and one.state == AskState.DONE.value and one.old_plan != one.new_plan
    ]
    _learn(session, row, members, [members.desired[device][1] for device in done])
    held = {device: members.holds.get(members.desired[device][1] or "", False) for device in done}
    done = [device for device in done if held[device]]
    _require_free(session, done, beside=name)
    _require_no_other_change(session, row, done, members)
    reason = "the rollout was aborted"
    changes = [_Change(device, AskState.WITHDRAWN, reason, give_back=True) for device in asked]
    changes += [_Change(device, AskState.RETURNED, reason, give_back=True) for device in done]
    changes += [_Change(device, AskState.SKIPPED, _GIVEN_ANOTHER) for device, has in held.items() if not has]
    given = _apply(session, row, members, changes)
    _enter(session, row, RolloutState.ABORTED, "by operator, rolled back" if rollback else "by operator")
    session.flush()
    return rollout_info(session, name), given


def delete_old_rollouts(session: Session, before_us: int, chunk: int) -> int:
    """Delete up to `chunk` devices of rollouts that ended before, then these; returns how many rows."""
    old = (
        select(RolloutRow.name)
        .where(RolloutRow.ended_at_us.is_not(None), RolloutRow.ended_at_us < before_us)
        .order_by(RolloutRow.ended_at_us)
        .limit(1)
    )
    name = session.scalar(old)
    if name is None:
        return 0
    devices = list(
        session.scalars(select(RolloutDeviceRow.device).where(RolloutDeviceRow.rollout == name).limit(chunk))
    )
    session.execute(
        delete(RolloutDeviceRow).where(RolloutDeviceRow.rollout == name, RolloutDeviceRow.device.in_(devices))
    )
    if len(devices) < chunk:
        session.execute(delete(RolloutRow).where(RolloutRow.name == name))
    return len(devices) or 1
