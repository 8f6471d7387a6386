"""Rollouts as the store holds them: made, shown, paused, resumed, aborted. Each function is one part of a
transaction; what a rollout does by itself is in `stageloom.planner.store.rollout_turns`.
"""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import delete, func, select, tuple_
from sqlalchemy.orm import Session

from stageloom.planner.labels import label_text, parse_selection
from stageloom.planner.rollout.machine import UNDECIDED
from stageloom.planner.rollout.waves import parse_waves, wave_ends
from stageloom.planner.schema.rollout import (
    AskState,
    RolloutCreateRequest,
    RolloutDeviceInfo,
    RolloutInfo,
    RolloutState,
)
from stageloom.planner.store.database import now_us
from stageloom.planner.store.labels import selected_devices
from stageloom.planner.store.models import named_models
from stageloom.planner.store.rollout_needs import REVERSIBLE
from stageloom.planner.store.rollout_turns import (
    GIVEN_ANOTHER,
    LIVE_STATES,
    MemberChange,
    RolloutMembers,
    apply_changes,
    enter_state,
    in_chunks,
    learn_plans,
    members_of,
    plan_artifacts,
    plan_wires,
)
from stageloom.planner.store.rows import add_event, message_of
from stageloom.planner.store.tables import DesiredRow, RolloutDeviceRow, RolloutRow
from stageloom.shared.errors import InputError, NotFoundError
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Desired

MOST_LIVE: Final = 64
"""Rollouts that run or are paused at the same time."""


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
    live = session.scalar(
        select(func.count()).select_from(RolloutRow).where(RolloutRow.state.in_(LIVE_STATES))
    )
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
    for some in in_chunks(devices):
        rows = session.execute(
            select(DesiredRow.device, DesiredRow.plan).where(
                DesiredRow.device.in_(some), DesiredRow.plan.is_not(None)
            )
        )
        plans |= {device: plan for device, plan in rows if plan is not None}
    with_model = {
        name
        for name, wire in plan_wires(session, set(plans.values())).items()
        if model in plan_artifacts(wire)
    }
    return [device for device in devices if plans.get(device) in with_model]


def _require_free(session: Session, devices: Sequence[DeviceId], *, beside: str | None) -> None:
    """Raises:
    InputError: a device is in a rollout that has not ended, other than `beside`.
    """
    for some in in_chunks(devices):
        taken = session.execute(
            select(RolloutDeviceRow.device, RolloutDeviceRow.rollout)
            .join(RolloutRow, RolloutRow.name == RolloutDeviceRow.rollout)
            .where(
                RolloutDeviceRow.device.in_(some),
                RolloutRow.state.in_(LIVE_STATES),
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
            .where(RolloutRow.state.in_(LIVE_STATES))
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


# -- what operators order ------------------------------------------------------------------------------------


def pause_rollout(session: Session, name: str) -> RolloutInfo:
    """Ask no further device until `resume_rollout`; a repeat changes nothing.

    Raises:
        InputError: there is no such rollout, or it has ended.
    """
    row = _live(session, name)
    if row.state == RolloutState.RUNNING.value:
        enter_state(session, row, RolloutState.PAUSED, "by operator")
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
        enter_state(session, row, RolloutState.RUNNING, "")
    session.flush()
    return rollout_info(session, name)


def _live(session: Session, name: str) -> RolloutRow:
    row = known_rollout(session, name)
    if row.state not in LIVE_STATES:
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
    members = members_of(session, row)
    asked = [device for device, one in members.rows.items() if one.state == AskState.ASKED.value]
    # One that had the version before has nothing to go back to.
    done = [
        device
        for device, one in members.rows.items()
        if rollback and one.state == AskState.DONE.value and one.old_plan != one.new_plan
    ]
    learn_plans(session, row, members, [members.desired[device][1] for device in done])
    held = {device: members.holds.get(members.desired[device][1] or "", False) for device in done}
    done = [device for device in done if held[device]]
    _require_free(session, done, beside=name)
    _require_no_other_change(session, row, done, members)
    reason = "the rollout was aborted"
    changes = [MemberChange(device, AskState.WITHDRAWN, reason, give_back=True) for device in asked]
    changes += [MemberChange(device, AskState.RETURNED, reason, give_back=True) for device in done]
    changes += [
        MemberChange(device, AskState.SKIPPED, GIVEN_ANOTHER) for device, has in held.items() if not has
    ]
    given = apply_changes(session, row, members, changes)
    enter_state(session, row, RolloutState.ABORTED, "by operator, rolled back" if rollback else "by operator")
    session.flush()
    return rollout_info(session, name), given


def _require_no_other_change(
    session: Session, row: RolloutRow, devices: Sequence[DeviceId], members: RolloutMembers
) -> None:
    """Refuse to give back an old plan that would take back another model's version as well."""
    now = {device: members.desired[device][1] for device in devices}
    before = {device: members.rows[device].old_plan for device in devices}
    wires = plan_wires(session, {plan for plan in (*now.values(), *before.values()) if plan is not None})

    def others(plan: str | None) -> dict[str, Digest]:
        models = plan_artifacts(wires[plan]) if plan in wires else {}
        return {name: artifact for name, artifact in models.items() if name != row.model}

    for device in devices:
        old, present = others(before[device]), others(now[device])
        changed = sorted(name for name in old.keys() & present.keys() if old[name] != present[name])
        if changed:
            raise InputError(
                f"{device} has another version of {changed[0]!r} by now, which its old plan would undo",
                remedy=f"bring the old version of {row.model!r} back with a rollout of its own",
            )


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
