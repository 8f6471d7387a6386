"""Alarms, the re-plans they begin, and how those end; every function is one part of a transaction.

A re-plan is `PENDING` from its alarm to its outcome. The device ends it: by the state of the generation that
it pushed (`stageloom.planner.store.generations.set_states`) and by the rows about its trial, which arrive in
any order and more than once. An alarm waits for what is decided from it, so that is read in few statements of
few columns: each statement takes the interpreter's lock twice, and other threads hold it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from msgspec.structs import asdict
from sqlalchemy import and_, bindparam, insert, literal, or_, select, update
from sqlalchemy.orm import Session, aliased

from stageloom.planner.costs.records import Calibration
from stageloom.planner.dispatch.ports import StoredRow
from stageloom.planner.replan.policy import ReplanSettings
from stageloom.planner.schema.outputs import OutputsInfo
from stageloom.planner.schema.replan import ReplanInfo, TrialInfo
from stageloom.planner.schema.webhook import WebhookEvent
from stageloom.planner.store.costs import calibration_from, environment_changed
from stageloom.planner.store.database import now_us
from stageloom.planner.store.desired import Push, may_plan, newest_desired, push
from stageloom.planner.store.generations import ENDS
from stageloom.planner.store.plans import keep_plan
from stageloom.planner.store.regimes import keep_regime, known_structures, rolled_back_structures
from stageloom.planner.store.rows import known_device, message_of
from stageloom.planner.store.tables import (
    AlarmRow,
    CalibrationRow,
    DesiredRow,
    DeviceRow,
    GenerationRow,
    PlanRow,
    ReplanRow,
    ReplanSettingRow,
    TrialRow,
)
from stageloom.planner.store.tried_replans import PENDING
from stageloom.planner.store.webhooks import tell_webhooks
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.control import Activation, Alarm, Desired, DeviceState
from stageloom.shared.messages.telemetry import PlanActivated, TrialEnded
from stageloom.shared.plan import Plan, decode_plan
from stageloom.shared.policy.trigger import Cause

_LINE: Final = 512  # characters of a text that a message holds

_IS_PENDING: Final = ReplanRow.outcome == literal(PENDING, literal_execute=True)
"""A part of statements' text: of a parameter a database sees only at a run whether a partial index serves."""

_KNOWN: Final = (
    select(
        DeviceRow.device_class,
        ReplanSettingRow.enabled,
        AlarmRow.at_us,
        ReplanRow.replan,
    )
    .outerjoin(ReplanSettingRow, ReplanSettingRow.device == DeviceRow.name)
    .outerjoin(
        AlarmRow,
        and_(
            AlarmRow.device == DeviceRow.name,
            AlarmRow.boot == bindparam("in_boot"),
            AlarmRow.number == bindparam("is_number"),
        ),
    )
    .outerjoin(ReplanRow, and_(ReplanRow.device == DeviceRow.name, _IS_PENDING))
    .where(DeviceRow.name == bindparam("of"))
    .order_by(ReplanRow.replan.desc())
    .limit(1)
)

_ALARM: Final = insert(AlarmRow)

_BEGIN: Final = insert(ReplanRow)

_ANOTHER: Final = (
    update(DeviceRow)
    .where(DeviceRow.name == bindparam("who"))
    .values(device_class=bindparam("now_is"), version=DeviceRow.version + 1)
)

_PUSHED: Final = update(ReplanRow).where(ReplanRow.replan == bindparam("pushed_by"))

_EARLIER: Final = update(ReplanRow).where(
    ReplanRow.device == bindparam("whose"),
    ReplanRow.replan < bindparam("than"),
    _IS_PENDING,
)

_ANOTHERS: Final = (
    select(GenerationRow.position)
    .join(
        DesiredRow,
        and_(
            DesiredRow.device == GenerationRow.device,
            DesiredRow.epoch == GenerationRow.epoch,
            DesiredRow.generation == GenerationRow.generation,
        ),
    )
    .where(
        GenerationRow.device == bindparam("whose"),
        GenerationRow.decided_by != "replan",
        GenerationRow.state.in_(
            [state.value for state in (DeviceState.STAGED, DeviceState.TRIAL, DeviceState.PROBATION)]
        ),
        # A re-plan's trial goes on under a generation that asks for a measurement or brings a policy.
        ~select(ReplanRow.replan)
        .where(
            ReplanRow.device == GenerationRow.device,
            ReplanRow.epoch == GenerationRow.epoch,
            ReplanRow.generation == GenerationRow.generation,
            _IS_PENDING,
        )
        .exists(),
    )
    .limit(1)
)

_NAMED: Final = aliased(GenerationRow)
_NEWEST: Final = aliased(GenerationRow)

_STANDING: Final = (
    select(_NAMED.digest, ReplanRow.control)
    .select_from(ReplanRow)
    .join(
        _NAMED,
        _NAMED.position
        == select(GenerationRow.position)
        .where(GenerationRow.device == ReplanRow.device, GenerationRow.digest.is_not(None))
        .order_by(GenerationRow.epoch.desc(), GenerationRow.generation.desc())
        .limit(1)
        .correlate(ReplanRow)
        .scalar_subquery(),
    )
    .join(DesiredRow, DesiredRow.device == ReplanRow.device)
    .join(
        _NEWEST,
        and_(
            _NEWEST.device == DesiredRow.device,
            _NEWEST.epoch == DesiredRow.epoch,
            _NEWEST.generation == DesiredRow.generation,
        ),
    )
    .where(
        ReplanRow.replan == bindparam("number"),
        _NAMED.decided_by != "replan",
        _NAMED.decided_at_us > ReplanRow.begun_at_us,
        _NAMED.digest.is_distinct_from(ReplanRow.control),
        _NEWEST.state.not_in([state.value for state in ENDS if state is not DeviceState.COMMITTED]),
        or_(ReplanRow.cause != Cause.REGIME.value, _NEWEST.state != DeviceState.COMMITTED.value),
    )
)
"""Another plan than the one that ran, which somebody else decided since a re-plan began. Its state is that of
the newest generation, which may only ask for a measurement of it."""

_ON_TRIAL: Final = aliased(ReplanRow)

_AWAITED: Final = select(literal(1)).where(
    or_(
        _STANDING.where(ReplanRow.cause == Cause.REGIME.value).exists(),
        select(_ON_TRIAL.replan)
        .join(ReplanRow, and_(ReplanRow.device == _ON_TRIAL.device, ReplanRow.replan > _ON_TRIAL.replan))
        .where(
            ReplanRow.replan == bindparam("number"),
            ReplanRow.cause.in_([Cause.DRIFT.value, Cause.POWER_MODE.value]),
            _ON_TRIAL.outcome == literal(PENDING, literal_execute=True),
            _ON_TRIAL.generation > 0,
        )
        .exists(),
    )
)

_BEGUN_BY: Final = select(ReplanRow.replan).where(
    ReplanRow.device == bindparam("of"),
    ReplanRow.boot == bindparam("in_boot"),
    ReplanRow.number == bindparam("is_number"),
    _IS_PENDING,
    ReplanRow.generation == 0,
    ReplanRow.begun_at_us >= bindparam("since_us"),
)

_UNDECIDED: Final = select(ReplanRow.replan).where(
    ReplanRow.replan == bindparam("number"), _IS_PENDING, ReplanRow.generation == 0
)

OVERTAKEN: Final = "other arrivals came to stay before a plan was found for those that it began with"
TOLD_ONCE: Final = {
    Cause.REGIME.value: OVERTAKEN,
    Cause.DRIFT.value: "the device drifted before a plan was found; its costs are renewed first",
    Cause.POWER_MODE.value: "the power mode changed before a plan was found; other costs hold in it",
}
"""Causes that a device tells once, and why they end a re-plan that has pushed nothing: arrivals, or the
device, are others than it began with."""

OVERDUE_US: Final = 900_000_000
_OVERDUE: Final = f"no outcome within {OVERDUE_US // 1_000_000} s"
"""A pending re-plan this old no longer holds up the next: the device was away, or its rows were lost."""


def replan_settings(session: Session, device: DeviceId) -> ReplanSettings:
    """How a device is re-planned.

    Raises:
        InputError: there is no such device.
    """
    known_device(session, device)
    row = session.get(ReplanSettingRow, device)
    return _settings(row) if row is not None else ReplanSettings()


def _settings(row: Any) -> ReplanSettings:
    """What a row with the columns of `ReplanSettingRow` says; the defaults where they are empty."""
    if row.enabled is None:
        return ReplanSettings()
    return msgspec.convert({name: getattr(row, name) for name in ReplanSettings.__slots__}, ReplanSettings)


def set_replan_settings(session: Session, device: DeviceId, wanted: ReplanSettings) -> None:
    """Keep how a device is re-planned.

    Raises:
        InputError: there is no such device.
    """
    known_device(session, device)
    session.merge(ReplanSettingRow(device=device, **msgspec.to_builtins(wanted)))


def change_replan_settings(session: Session, device: DeviceId, changes: Mapping[str, Any]) -> ReplanSettings:
    """Change some of them in one transaction; returns all. Raises as `set_replan_settings`."""
    settings = replace(replan_settings(session, device), **changes)
    if changes:
        set_replan_settings(session, device, settings)
    return settings


def record_alarm(session: Session, device: DeviceId, alarm: Alarm) -> int | None:
    """Keep an alarm; returns the re-plan it begins, None where it begins none (see `DispatchStore`).

    A repeat returns the re-plan that the alarm began while that has pushed nothing: the answer to the commit
    may have been lost, and nobody else knows of it then.

    Arrivals that came to stay overtake a re-plan for those before them, which ends if it has pushed nothing.
    So do a drift and another power mode: the device tells either once, only a drift's own re-plan renews
    costs, and a search under way plans by those of the mode before. What is on trial goes on, and for these
    two its end is awaited (`awaits_trial`): the device tells them after it, but its report may be on the way.
    """
    at_us = now_us(session)
    connection = session.connection()
    known = connection.execute(
        _KNOWN, {"of": device, "in_boot": alarm.boot, "is_number": alarm.number}
    ).first()
    device_class, enabled, stored_us, pending = known or ("", None, None, None)
    if stored_us is not None:
        if pending is None:
            return None
        begun_by = {"of": device, "in_boot": alarm.boot, "is_number": alarm.number}
        return connection.scalar(_BEGUN_BY, {**begun_by, "since_us": at_us - OVERDUE_US})
    another = alarm.environment not in ("", device_class)
    if another:
        device_class = alarm.environment
        connection.execute(_ANOTHER, {"who": device, "now_is": device_class})
    if another or alarm.cause == Cause.POWER_MODE.value:  # of a mode its hello has told before the alarm
        environment_changed(session, device, device_class, alarm.at_us)
    connection.execute(
        _ALARM,
        {
            "device": device,
            "boot": alarm.boot,
            "number": alarm.number,
            "at_us": alarm.at_us,
            "received_at_us": at_us,
            "body": msgspec.msgpack.encode(alarm),
        },
    )
    tell_webhooks(session, WebhookEvent.ALARM, device, _told(alarm, _ALARM_FIELDS))
    running = None if pending is None else _running(session, device, at_us)
    overtakes = TOLD_ONCE.get(alarm.cause)
    if running is not None and overtakes is None:
        running.later_alarms += 1
        return None
    if not (ReplanSettings().enabled if enabled is None else enabled):
        return None
    if running is not None and overtakes is not None and not running.generation:
        running.trigger_to_decision_ms = max(at_us - running.begun_at_us, 0) / 1e3
        _end(running, "no_gain", overtakes)
    begun = connection.execute(
        _BEGIN,
        {
            "device": device,
            "boot": alarm.boot,
            "number": alarm.number,
            "cause": alarm.cause,
            "value": alarm.value,
            "threshold": alarm.threshold,
            "at_us": alarm.at_us,
            "control": alarm.plan,
            "begun_at_us": at_us,
            "environment": device_class,
            "how": "",
            "epoch": 0,
            "generation": 0,
            "outcome": PENDING,
            "pairs": 0,
            "later_alarms": 0,
            "reason": "",
            "remark": "",
            "figure": "",
        },
    )
    assert begun.inserted_primary_key is not None
    return int(begun.inserted_primary_key[0])


_ALARM_FIELDS: Final = ("boot", "number", "at_us", "cause", "value", "threshold", "plan")
_VERDICT_FIELDS: Final = (
    *("epoch", "generation", "origin", "how", "verdict", "figure", "candidate", "control", "ratio"),
    *("ratio_low", "ratio_high", "pairs", "began_us", "decided_us", "reason"),
)
"""What webhooks are told, by the names that the messages have; see docs/webhooks.md."""


def _told(message: msgspec.Struct, fields: tuple[str, ...]) -> dict[str, object]:
    return {field: getattr(message, field) for field in fields}


def _running(session: Session, device: DeviceId, at_us: int) -> ReplanRow | None:
    """The device's re-plan under way. One that a newer desired value overtook, or that is overdue, ends."""
    row = session.scalar(
        select(ReplanRow)
        .where(ReplanRow.device == device, _IS_PENDING)
        .order_by(ReplanRow.replan.desc())
        .limit(1)
    )
    if row is None:
        return None
    desired = session.get(DesiredRow, device)
    newest = (desired.epoch, desired.generation) if desired is not None else (0, 0)
    if row.generation and newest > (row.epoch, row.generation):
        _end(row, "no_gain", f"overtaken by generation {newest[0]}.{newest[1]}")
        return None
    if at_us - row.begun_at_us > OVERDUE_US:
        _end(row, "no_gain", _OVERDUE)
        return None
    return row


def end_overdue(session: Session) -> None:
    """End re-plans that have pushed nothing for so long that their load is gone: a planner was away."""
    rows = session.scalars(
        select(ReplanRow).where(
            _IS_PENDING,
            ReplanRow.generation == 0,
            ReplanRow.begun_at_us < now_us(session) - OVERDUE_US,
        )
    )
    for row in rows:
        _end(row, "no_gain", _OVERDUE)


def unfinished_replans(session: Session) -> list[tuple[DeviceId, int]]:
    """Re-plans that have pushed nothing yet, oldest first: those that a stopped planner left behind."""
    wanted = select(ReplanRow.replan, ReplanRow.device).where(_IS_PENDING, ReplanRow.generation == 0)
    # Sorted here: SQLite would read the whole table to have them in order.
    found = sorted((replan, device) for replan, device in session.execute(wanted))
    return [(DeviceId(device), replan) for replan, device in found]


def is_trying(session: Session, device: DeviceId, replan: int, structure: Digest) -> bool:
    """Whether a plan of this structure, which an earlier re-plan pushed, is still being tried."""
    found = select(ReplanRow.replan).where(
        ReplanRow.device == device,
        ReplanRow.replan < replan,
        _IS_PENDING,
        ReplanRow.structure == structure,
    )
    return session.connection().execute(found.limit(1)).first() is not None


def tries_anothers(session: Session, device: DeviceId) -> bool:
    """Whether the device tries or guards what somebody else than a re-plan pushed."""
    found = session.connection().execute(_ANOTHERS, {"whose": device}).first()
    return found is not None


def awaits_trial(session: Session, device: DeviceId, replan: int) -> bool:
    """Whether a re-plan leaves its device alone until that has tried what somebody else pushed.

    Where arrivals moved, what was pushed since counts before the device says that it tries it. After a drift
    and in another power mode what an earlier re-plan pushed counts, too.
    """
    if tries_anothers(session, device):
        return True
    return session.connection().execute(_AWAITED, {"number": replan}).first() is not None


def _is_overruled(session: Session, replan: int, plan: Plan) -> bool:
    """Whether a plan that somebody else decided since a re-plan began stands against the one it found.

    One that the device refused does not. Arrivals that moved are told once: for them a plan stands until its
    trial has ended. Launch intervals alone are no other plan, unless they are all that was found.
    """
    row = session.connection().execute(_STANDING, {"number": replan}).first()
    if row is None:
        return False
    known = known_structures(session, [digest for digest in row if digest is not None])
    ran = known.get(row.control)
    return ran is None or known.get(row.digest) != ran or plan.structure == ran


def _undecided(session: Session, replan: int) -> bool:
    """Whether a re-plan is under way and has pushed nothing yet."""
    return session.connection().execute(_UNDECIDED, {"number": replan}).first() is not None


def push_replan(
    session: Session,
    device: DeviceId,
    replan: int,
    plan: Plan,
    *,
    scheduler: str,
    above: tuple[int, int],
    how: str,
    predicted: float | None,
    remark: str = "",
    fitting: Digest | None = None,
    activation: Activation = Activation.TRIAL,
) -> Desired | None:
    """Keep and push a re-plan's plan, if `above` is still the newest desired (epoch, generation).

    Kept beside the plan: `how` it was proposed, its `predicted` cost over the incumbent's, and a `remark` on
    what else went into the decision. `fitting` is the trained policy that fits the plan.

    Returns what is desired now, or None where somebody decided something newer: since `above` was read, or
    another plan since the re-plan began. That is so as well where other versions of its models are desired of
    the device and it has not refused them.

    Raises:
        InputError: the device is revoked, or a model of the plan was removed.
    """
    if newest_desired(session, device) != above or not _undecided(session, replan):
        return None
    if _brings_others(session, device, above, plan) or _is_overruled(session, replan, plan):
        return None
    name = keep_plan(session, plan, scheduler)
    attached = fitting is not None and replan_settings(session, device).attach
    policy = fitting if attached and may_plan(session, device) else None
    desired = push(
        session,
        Push(device=device, plan=name, decided_by="replan", activation=activation, policy=policy),
    )
    now = f"{desired.epoch}.{desired.generation}"
    session.connection().execute(
        _EARLIER,
        {"whose": device, "than": replan, "outcome": "no_gain", "reason": f"overtaken by generation {now}"},
    )
    session.connection().execute(
        _PUSHED,
        {
            "pushed_by": replan,
            "plan": name,
            "digest": plan.digest,
            "structure": plan.structure,
            "how": how,
            "predicted": predicted,
            "remark": remark[:_LINE],
            "epoch": desired.epoch,
            "generation": desired.generation,
        },
    )
    session.flush()
    session.expire_all()  # a work of the same group may have read the row before
    return desired


def _brings_others(session: Session, device: DeviceId, above: tuple[int, int], plan: Plan) -> bool:
    """Whether what is desired of a device, and not refused by it, has other artifacts than a plan."""
    found = session.execute(
        select(PlanRow.wire, GenerationRow.state)
        .join(DesiredRow, DesiredRow.plan == PlanRow.name)
        .outerjoin(
            GenerationRow,
            and_(
                GenerationRow.device == device,
                GenerationRow.epoch == above[0],
                GenerationRow.generation == above[1],
            ),
        )
        .where(DesiredRow.device == device)
    ).first()
    if found is None or found.state in _REFUSED:
        return False
    wanted = {one.name: one.artifact for one in decode_plan(found.wire).models}
    return wanted != {one.name: one.artifact for one in plan.models}


def _end(row: ReplanRow, outcome: str, reason: str) -> None:
    """Give a re-plan its outcome; the first one stands."""
    if row.outcome == PENDING:
        row.outcome, row.reason = outcome, reason[:_LINE]


def end_replan(session: Session, replan: int, reason: str, remark: str = "") -> None:
    """End a re-plan that found no plan: no gain. Its decision is timed by the planner, which made it.

    One that has pushed a plan goes on, whatever failed since: its device says how it ends.
    """
    row = session.get(ReplanRow, replan)
    if row is not None and row.outcome == PENDING and not row.generation:
        row.trigger_to_decision_ms = max(now_us(session) - row.begun_at_us, 0) / 1e3
        row.remark = remark[:_LINE]
        _end(row, "no_gain", reason)


def _of_generation(session: Session, device: DeviceId, epoch: int, generation: int) -> ReplanRow | None:
    """The re-plan that pushed a generation."""
    if not generation:
        return None
    return session.scalar(
        select(ReplanRow).where(
            ReplanRow.device == device, ReplanRow.epoch == epoch, ReplanRow.generation == generation
        )
    )


def store_trial_row(session: Session, device: DeviceId, row: StoredRow) -> None:
    """Note a row about a trial or an activation; a repeat changes nothing."""
    if isinstance(row.data, TrialEnded):
        _trial_ended(session, device, row, row.data)
    elif isinstance(row.data, PlanActivated):
        replan = _of_generation(session, device, row.data.epoch, row.data.generation)
        if replan is not None and replan.digest == row.data.plan and replan.trigger_to_active_ms is None:
            replan.trigger_to_active_ms = max(row.at_us - replan.at_us, 0) / 1e3


def _trial_ended(session: Session, device: DeviceId, row: StoredRow, ended: TrialEnded) -> None:
    environment = ended.environment
    if not environment:  # of an agent that does not tell it: the class of now, which may be another by then
        owner = session.get(DeviceRow, device)
        environment = owner.device_class if owner is not None else ""
    outputs = asdict(ended.outputs) if ended.outputs is not None else None
    if session.get(TrialRow, (device, row.boot, row.sequence)) is None:
        told = {**_told(ended, _VERDICT_FIELDS), "outputs": outputs}
        tell_webhooks(session, WebhookEvent.VERDICT, device, told)
    session.merge(
        TrialRow(
            device=device,
            boot=row.boot,
            sequence=row.sequence,
            **{
                **asdict(ended),
                "environment": environment,
                "origin": ended.origin.value,
                "outputs": outputs,
            },
        )
    )
    replan = _of_generation(session, device, ended.epoch, ended.generation)
    if replan is not None and replan.digest == ended.candidate:
        replan.how = ended.how
        replan.ratio, replan.ratio_low, replan.ratio_high = ended.ratio, ended.ratio_low, ended.ratio_high
        replan.pairs, replan.figure = ended.pairs, ended.figure
        replan.trigger_to_decision_ms = max(ended.decided_us - replan.at_us, 0) / 1e3
        replan.environment = ended.environment or replan.environment  # what is found out holds for that
        keep_regime(session, replan, row, ended)


def trial_infos(session: Session, device: DeviceId, *, limit: int = 1000) -> list[TrialInfo]:
    """The device's trials, newest first.

    Raises:
        InputError: there is no such device.
    """
    known_device(session, device)
    rows = session.scalars(
        select(TrialRow).where(TrialRow.device == device).order_by(TrialRow.decided_us.desc()).limit(limit)
    )
    return [_trial_info(row) for row in rows]


def _trial_info(row: TrialRow) -> TrialInfo:
    outputs = None if row.outputs is None else msgspec.convert(row.outputs, OutputsInfo)
    return message_of(TrialInfo, row, outputs=outputs)


def replan_infos(
    session: Session, device: DeviceId | None = None, *, before: int = 0, limit: int = 1000
) -> list[ReplanInfo]:
    """Re-plans of one device or of all, newest first; with `before` those of a lower number.

    Raises:
        InputError: there is no such device.
    """
    if device is not None:
        known_device(session, device)
    wanted = select(ReplanRow).order_by(ReplanRow.replan.desc()).limit(limit)
    if device is not None:
        wanted = wanted.where(ReplanRow.device == device)
    if before:
        wanted = wanted.where(ReplanRow.replan < before)
    return [
        message_of(ReplanInfo, row, alarm=row.number, plan=row.plan or "") for row in session.scalars(wanted)
    ]


def trials_of(session: Session, plans: Iterable[Digest], environment: str) -> list[TrialInfo]:
    """Trials of these plans on any device of a class, newest first."""
    wanted = list(plans)
    rows = session.scalars(
        select(TrialRow)
        .where(
            TrialRow.environment == environment,
            or_(TrialRow.candidate.in_(wanted), TrialRow.control.in_(wanted)),
        )
        .order_by(TrialRow.decided_us.desc())
    )
    return [message_of(TrialInfo, row) for row in rows]


_REFUSED: Final = tuple(state.value for state in ENDS if state is not DeviceState.COMMITTED)

_TRIALS: Final = 1000

_COMPARED: Final = ("trial", "proven")

_DECODER: Final = msgspec.msgpack.Decoder(Alarm)

_BEGUN: Final = (
    select(
        AlarmRow.body,
        DeviceRow.device_class,
        DesiredRow.epoch,
        DesiredRow.generation,
        PlanRow.digest,
        ReplanSettingRow.enabled,
        ReplanSettingRow.scheduler,
        ReplanSettingRow.members_max,
        ReplanSettingRow.budget_s,
        ReplanSettingRow.proposer,
        ReplanSettingRow.attach,
        CalibrationRow.costs_key,
        CalibrationRow.steps_since_us,
        CalibrationRow.ratio,
        CalibrationRow.at_us,
    )
    .select_from(ReplanRow)
    .join(
        AlarmRow,
        and_(
            AlarmRow.device == ReplanRow.device,
            AlarmRow.boot == ReplanRow.boot,
            AlarmRow.number == ReplanRow.number,
        ),
    )
    .join(DeviceRow, DeviceRow.name == ReplanRow.device)
    .outerjoin(DesiredRow, DesiredRow.device == ReplanRow.device)
    .outerjoin(PlanRow, PlanRow.name == DesiredRow.plan)
    .outerjoin(ReplanSettingRow, ReplanSettingRow.device == ReplanRow.device)
    .outerjoin(
        CalibrationRow,
        and_(CalibrationRow.device == DeviceRow.name, CalibrationRow.environment == DeviceRow.device_class),
    )
    .where(ReplanRow.replan == bindparam("number"))
)

_VERDICTS: Final = (
    select(
        TrialRow.candidate,
        TrialRow.verdict,
        TrialRow.how,
        TrialRow.epoch,
        TrialRow.generation,
        GenerationRow.state,
    )
    .outerjoin(
        GenerationRow,
        and_(
            GenerationRow.device == TrialRow.device,
            GenerationRow.epoch == TrialRow.epoch,
            GenerationRow.generation == TrialRow.generation,
            GenerationRow.digest == TrialRow.candidate,
        ),
    )
    .where(TrialRow.device == bindparam("of"), TrialRow.environment == bindparam("there"))
    .order_by(TrialRow.decided_us.desc())
    .limit(_TRIALS)
)

_WIRES: Final = select(PlanRow.digest, PlanRow.wire).where(
    PlanRow.digest.in_(bindparam("wanted", expanding=True))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What an alarm found: `desired` is the newest (epoch, generation) at the moment of the snapshot."""

    alarm: Alarm
    device_class: str
    calibration: Calibration
    desired: tuple[int, int]
    desired_plan: Digest | None
    settings: ReplanSettings


def begun_replan(session: Session, replan: int) -> Begun | None:
    """A re-plan's alarm and device; None: there is no such re-plan."""
    row = session.connection().execute(_BEGUN, {"number": replan}).first()
    if row is None:
        return None
    return Begun(
        alarm=_DECODER.decode(row.body),
        device_class=row.device_class,
        calibration=calibration_from(row.device_class, row),
        desired=(row.epoch or 0, row.generation or 0),
        desired_plan=Digest(row.digest) if row.digest else None,
        settings=_settings(row),
    )


def committed_plans(session: Session, device: DeviceId, environment: str) -> list[Digest]:
    """Plans whose newest trial on this device in this environment committed, newest first.

    A plan that was ordered, was the first or passed a guard was compared with nothing: that is no trial. If
    it failed there, that counts. So does that it was rolled back after its trial, be it long after it was
    committed, or a plan that a re-plan pushed since which differs in launch intervals alone.
    """
    rows = session.connection().execute(_VERDICTS, {"of": device, "there": environment})
    newest: dict[Digest, tuple[int, int] | None] = {}
    for row in rows:
        committed = row.verdict == "commit" and row.state != DeviceState.ROLLED_BACK.value
        if not committed or row.how in _COMPARED:
            newest.setdefault(Digest(row.candidate), (row.epoch, row.generation) if committed else None)
    proven = {plan: at for plan, at in newest.items() if at is not None}
    rolled_back = rolled_back_structures(session, device, environment) if proven else {}
    if not rolled_back:
        return list(proven)
    structures = known_structures(session, proven)
    return [
        plan
        for plan, at in proven.items()
        if plan not in structures or at > rolled_back.get(structures[plan], (0, -1))
    ]


def plan_wires(session: Session, digests: Collection[Digest]) -> dict[Digest, bytes]:
    """The wire forms of those plans that are known here."""
    rows = session.connection().execute(_WIRES, {"wanted": list(digests)})
    return {Digest(digest): wire for digest, wire in rows}
