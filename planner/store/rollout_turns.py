"""A rollout's turn: what its devices decided, what follows from it, and the devices to ask next.

Each function is one part of a transaction; what a rollout does next is for
`stageloom.planner.rollout.machine` to say.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

from sqlalchemy import Select, and_, exists, func, select, update
from sqlalchemy.orm import Session, aliased

from stageloom.planner.rollout.machine import LIVE, Rollout, RolloutDevice, RolloutStep, next_step
from stageloom.planner.schema.rollout import AskState, RolloutState
from stageloom.planner.store.database import now_us
from stageloom.planner.store.desired import Push, push_all
from stageloom.planner.store.generations import ENDS, REFUSED
from stageloom.planner.store.replans import IS_PENDING
from stageloom.planner.store.rows import add_event, run_on_rows
from stageloom.planner.store.tables import (
    DesiredRow,
    GenerationRow,
    PlanRow,
    ReplanRow,
    ReportedRow,
    RolloutDeviceRow,
    RolloutRow,
)
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Desired, DeviceState
from stageloom.shared.plan import decode_plan
from stageloom.shared.text import bounded

DECIDED_BY: Final = "rollout"
LIVE_STATES: Final = [state.value for state in LIVE]
GIVEN_ANOTHER: Final = "it was given another plan meanwhile"

_ENDED: Final = {state.value for state in ENDS}
_KEPT: Final = aliased(GenerationRow)
_ROWS: Final = 256  # devices a statement

_SAID: Final = select(func.min(PlanRow.name)).where(PlanRow.digest == ReportedRow.active).scalar_subquery()
"""The plan that a device says it runs."""

_KEPT_LAST: Final = (
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


class MemberChange(NamedTuple):
    """A device's new state, and the generation that decides; `give_back`: it gets its old plan back."""

    device: DeviceId
    state: AskState
    reason: str = ""
    follow: tuple[int, int] | None = None
    give_back: bool = False


@dataclass(slots=True)
class RolloutMembers:
    """The devices of a rollout as rows, and what is desired of those that matter now.

    `base`: the plan that gets the version, which is the desired one unless the device does not keep that:
    then it is what the device `runs` instead, where that is known.
    """

    rows: dict[DeviceId, Any]
    desired: dict[DeviceId, tuple[tuple[int, int], str | None]]
    base: dict[DeviceId, str | None]
    runs: Collection[DeviceId]
    holds: dict[str, bool] = field(default_factory=dict)  # by plan: whether it has the rollout's artifact


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
    if row is None or row.state not in LIVE_STATES:
        return RolloutTurn()
    members = members_of(session, row)
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
        changes[device] = MemberChange(device, AskState.UNREACHED, reason, give_back=was_asked)
    for device in step.withdrawn:
        changes[device] = MemberChange(device, AskState.WITHDRAWN, "the rollout stopped", give_back=True)
    due = bool(changes) or (step.state.value, step.wave) != (row.state, row.wave)
    given: tuple[tuple[DeviceId, Desired], ...] = ()
    if write and due:
        given = apply_changes(session, row, members, list(changes.values()))
        if step.state.value != row.state:
            enter_state(session, row, step.state, step.reason)
        row.wave, row.changed_at_us = step.wave, now_us(session)
        session.flush()
    learn_plans(session, row, members, [members.base[device] for device in step.ask])
    asks = tuple(
        DueDevice(device, plan, members.desired[device][0])
        for device in step.ask
        for plan in [members.base[device]]
        if plan is not None and plan in members.holds  # the others are left out at the next turn
    )
    return RolloutTurn(row.model, Digest(row.artifact), asks, given, due)


def members_of(session: Session, row: RolloutRow) -> RolloutMembers:
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
    base, runs = {device: plan for device, (_, plan) in desired.items()}, _plans_that_run(session, row)
    return RolloutMembers(rows, desired, base | runs, runs.keys())


def _plans_that_run(session: Session, row: RolloutRow) -> dict[DeviceId, str]:
    """Of devices that are to be asked soon, what they run instead of a desired plan that they did not keep.

    Such a plan was refused, or a re-plan has it tried and it may be yet: with another version of a model it
    would run without a trial. What runs is what the device says, else what it kept last.
    """
    is_tried = exists().where(
        ReplanRow.device == DesiredRow.device,
        ReplanRow.epoch == DesiredRow.epoch,
        ReplanRow.generation == DesiredRow.generation,
        IS_PENDING,
    )
    rows = session.execute(
        _with_newest(row, func.coalesce(_SAID, _KEPT_LAST)).where(
            RolloutDeviceRow.state == AskState.WAITING.value,
            RolloutDeviceRow.wave <= row.wave + 1,
            GenerationRow.state.in_(REFUSED) | is_tried,
        )
    )
    return {DeviceId(device): plan for device, plan in rows if plan is not None}


def _with_newest(row: RolloutRow, *columns: Any) -> Select[Any]:
    """Devices of a rollout with these columns: of what is desired of them, how far it is, what they say."""
    newest = (
        (GenerationRow.device == DesiredRow.device)
        & (GenerationRow.epoch == DesiredRow.epoch)
        & (GenerationRow.generation == DesiredRow.generation)
    )
    return (
        select(RolloutDeviceRow.device, *columns)
        .join(DesiredRow, DesiredRow.device == RolloutDeviceRow.device)
        .join(GenerationRow, newest)
        .outerjoin(ReportedRow, ReportedRow.device == RolloutDeviceRow.device)
        .where(RolloutDeviceRow.rollout == row.name)
    )


def _rollout(row: RolloutRow, members: RolloutMembers, states: Mapping[DeviceId, AskState]) -> Rollout:
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


def _verdicts(session: Session, row: RolloutRow, members: RolloutMembers) -> list[MemberChange]:
    """What devices that were asked have decided, or what became of the asking."""
    asked = {device: one for device, one in members.rows.items() if one.state == AskState.ASKED.value}
    waiting = [device for device, one in members.rows.items() if one.state == AskState.WAITING.value]
    in_wave = [device for device in waiting if members.rows[device].wave == row.wave]
    plans = [*(members.desired[device][1] for device in asked), *(members.base[device] for device in in_wave)]
    learn_plans(session, row, members, plans)
    reached = _reached(session, row.name)
    changes: list[MemberChange] = []
    for device, one in asked.items():
        newest, plan = members.desired[device]
        state, reason = reached.get(device, ("", ""))
        if state == DeviceState.COMMITTED.value:
            changes.append(MemberChange(device, AskState.DONE))
        elif state in _ENDED:
            changes.append(MemberChange(device, AskState.FAILED, f"{state}: {reason}", give_back=True))
        elif newest > (one.epoch, one.generation):
            if plan is not None and members.holds.get(plan):
                changes.append(MemberChange(device, AskState.ASKED, follow=newest))
            else:
                changes.append(MemberChange(device, AskState.SKIPPED, GIVEN_ANOTHER))
    for device in in_wave:
        plan = members.base[device]
        if plan is None or plan not in members.holds:
            changes.append(MemberChange(device, AskState.SKIPPED, f"it should not run {row.model} any more"))
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


def learn_plans(
    session: Session, row: RolloutRow, members: RolloutMembers, plans: Iterable[str | None]
) -> None:
    """Note of plans with the rollout's model whether they have its artifact; others are left out."""
    for name, wire in plan_wires(session, {plan for plan in plans if plan is not None}).items():
        artifact = plan_artifacts(wire).get(row.model)
        if artifact is not None:
            members.holds[name] = artifact == row.artifact


def apply_changes(
    session: Session, row: RolloutRow, members: RolloutMembers, changes: Sequence[MemberChange]
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
    session: Session, row: RolloutRow, devices: Sequence[DeviceId], members: RolloutMembers
) -> tuple[tuple[DeviceId, Desired], ...]:
    """Push the old plans to devices of which a plan with the rollout's artifact is desired.

    One whose old plan is the new one has nothing to go back to.
    """
    learn_plans(session, row, members, [members.desired[device][1] for device in devices])
    pushes = [
        Push(device=device, plan=old, decided_by=DECIDED_BY, even_revoked=True)
        for device in devices
        for old in [members.rows[device].old_plan]
        if old != members.rows[device].new_plan and members.holds.get(members.desired[device][1] or "", False)
    ]
    results = push_all(session, pushes)
    return tuple(
        (one.device, result)
        for one, result in zip(pushes, results, strict=True)
        if isinstance(result, Desired)  # all but a device that has no generation left
    )


def enter_state(session: Session, row: RolloutRow, state: RolloutState, reason: str) -> None:
    row.state, row.reason, row.changed_at_us = state.value, bounded(reason), now_us(session)
    row.ended_at_us = None if state in LIVE else row.changed_at_us
    add_event(session, None, "rollout", bounded(f"{row.name} {state.value}: {reason}".rstrip(": ")))


def ask_devices(
    session: Session, name: str, asks: Sequence[tuple[DueDevice, str]]
) -> tuple[tuple[DeviceId, Desired], ...]:
    """Push plans to devices of a rollout's wave, those that nothing happened to since `rollout_turn`.

    Each ask comes with the name of the plan that has the version. A device whose plan is that one is pushed
    nothing: it has the version, or is at it, or has refused it.
    """
    row = session.get(RolloutRow, name)
    if row is None or row.state != RolloutState.RUNNING.value:
        return ()
    members = members_of(session, row)
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
    had = [ask.device for ask, plan in wanted if plan == ask.plan and ask.device not in members.runs]
    not_kept = _not_kept(session, row, had)
    at_us = now_us(session)
    updates = []
    for ask, plan in wanted:
        result = results.get(ask.device)
        state, reason, number, old = AskState.ASKED, "", ask.above, ask.plan
        if result is None:
            had_it = (AskState.DONE, "it had the version already", old)
            state, reason, old = not_kept.get(ask.device, had_it)
        elif isinstance(result, InputError):
            state, reason = AskState.FAILED, str(result)
        else:
            number = (result.epoch, result.generation)
        updates.append((name, ask.device, state.value, bounded(reason), *number, at_us, old, plan))
    run_on_rows(session.connection(), _ASKED, updates)
    return tuple((device, result) for device, result in results.items() if isinstance(result, Desired))


def _not_kept(
    session: Session, row: RolloutRow, devices: Sequence[DeviceId]
) -> dict[DeviceId, tuple[AskState, str, str]]:
    """Of devices of which the version is desired, those that did not keep that plan (yet): what they are
    then, why, and the plan before."""
    # Under probation a device says that it runs the plan that it may yet refuse.
    before = func.coalesce(func.nullif(_SAID, DesiredRow.plan), _KEPT_LAST, DesiredRow.plan)
    wanted = _with_newest(row, GenerationRow.state, GenerationRow.reason, before)
    wanted = wanted.where(GenerationRow.state != DeviceState.COMMITTED.value)
    found: dict[DeviceId, tuple[AskState, str, str]] = {}
    for some in in_chunks(devices):
        for device, state, reason, old in session.execute(wanted.where(RolloutDeviceRow.device.in_(some))):
            refused = (AskState.FAILED, f"{state}: {reason}", old)
            found[DeviceId(device)] = refused if state in REFUSED else (AskState.ASKED, "", old)
    return found


def fail_devices(session: Session, name: str, devices: Sequence[DeviceId], reason: str) -> None:
    """Note that devices that wait cannot be asked: nothing can be planned for them with the version."""
    for some in in_chunks(devices):
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


def plan_wires(session: Session, names: Collection[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for some in in_chunks(sorted(names)):
        rows = session.execute(select(PlanRow.name, PlanRow.wire).where(PlanRow.name.in_(some)))
        found |= {name: wire for name, wire in rows}
    return found


@lru_cache(maxsize=2048)
def plan_artifacts(wire: bytes) -> Mapping[str, Digest]:
    """A plan's artifacts by the names of its models. A turn a second looks at the plans of all devices."""
    return {one.name: one.artifact for one in decode_plan(wire).models}


def in_chunks(items: Sequence[Any]) -> Iterable[list[Any]]:
    return (list(items[at : at + _ROWS]) for at in range(0, len(items), _ROWS))
