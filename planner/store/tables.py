"""The tables, declared once; `migrations/` brings a database to them and a test compares the two.

Times are microseconds since 1970 (`_us`). A table that several writers may read, change and write back has a
`version` column: a write that lost the race fails instead of undoing the other one.
"""

import json
from typing import Any

from sqlalchemy import (
    BigInteger,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from stageloom.shared.ids import DeviceId, Digest

_AUTO = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself only for INTEGER
_DIGEST = String(64)
_NAME = String(64)


class JsonText(TypeDecorator[Any]):
    """A value as JSON in a column of text."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str:
        return json.dumps(value, sort_keys=True)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class Table(DeclarativeBase):
    """Base of all tables."""

    type_annotation_map = {int: BigInteger, str: Text, bytes: LargeBinary}  # noqa: RUF012


class PlannerRow(Table):
    """One row, id 1: this planner database. `epoch` rises when generations may have been lost."""

    __tablename__ = "planner"
    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    epoch: Mapped[int]
    created_at_us: Mapped[int]
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


class ClockTrustRow(Table):
    """One row, id 1: how far the clock is believed, `stageloom.planner.store.trusted_time.ClockTrust`."""

    __tablename__ = "clock_trust"
    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    trusted_us: Mapped[int]
    confirmed_us: Mapped[int]


class DeviceRow(Table):
    """An enrolled device; its CURVE key is its identity. A revoked one keeps its row and its history."""

    __tablename__ = "devices"
    name: Mapped[str] = mapped_column(_NAME, primary_key=True)
    public_key: Mapped[str] = mapped_column(String(40), unique=True)
    revoked: Mapped[bool]
    device_class: Mapped[str]
    agent_version: Mapped[str]
    enrolled_at_us: Mapped[int]
    last_seen_us: Mapped[int]
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


class DeviceLabelRow(Table):
    """A label of a device, which selections name."""

    __tablename__ = "device_labels"
    device: Mapped[str] = mapped_column(_NAME, ForeignKey("devices.name"), primary_key=True)
    name: Mapped[str] = mapped_column(_NAME, primary_key=True)
    value: Mapped[str] = mapped_column(_NAME)
    __table_args__ = (Index("device_labels_by_value", "name", "value"),)


class QuarantineRow(Table):
    """A device that is refused until an operator releases it, and why."""

    __tablename__ = "quarantines"
    device: Mapped[str] = mapped_column(_NAME, ForeignKey("devices.name"), primary_key=True)
    reason: Mapped[str]
    at_us: Mapped[int]


class JoinTokenRow(Table):
    """A one-time secret, kept only as its digest."""

    __tablename__ = "join_tokens"
    secret_digest: Mapped[str] = mapped_column(_DIGEST, primary_key=True)
    device: Mapped[str | None] = mapped_column(_NAME)
    created_at_us: Mapped[int]
    expires_at_us: Mapped[int]
    used_at_us: Mapped[int | None]
    used_by_key: Mapped[str | None] = mapped_column(String(40))
    enrolled_as: Mapped[str | None] = mapped_column(_NAME)
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


class ArtifactRow(Table):
    """An imported model's blob; the file lies in the content-addressed directory."""

    __tablename__ = "artifacts"
    digest: Mapped[str] = mapped_column(_DIGEST, primary_key=True)
    size_bytes: Mapped[int]
    operators: Mapped[int]
    base_cuts: Mapped[int]
    opaque: Mapped[int]
    added_at_us: Mapped[int]


class ModelRow(Table):
    """A name of a model. It stays when all versions are removed, so that no number is given twice."""

    __tablename__ = "models"
    name: Mapped[str] = mapped_column(_NAME, primary_key=True)
    versions_made: Mapped[int]


class ModelVersionRow(Table):
    """An artifact as version `number` of a model, counted from 1."""

    __tablename__ = "model_versions"
    model: Mapped[str] = mapped_column(_NAME, ForeignKey("models.name"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str] = mapped_column(_DIGEST, ForeignKey("artifacts.digest"), index=True)
    added_at_us: Mapped[int]
    __table_args__ = (UniqueConstraint("model", "digest"),)


class PlanRow(Table):
    """A plan under a name. The wire form is kept as it was digested."""

    __tablename__ = "plans"
    name: Mapped[str] = mapped_column(_NAME, primary_key=True)
    digest: Mapped[str] = mapped_column(_DIGEST, index=True)
    wire: Mapped[bytes]
    scheduler: Mapped[str]
    created_at_us: Mapped[int]


class DesiredRow(Table):
    """What one device should do: the newest generation."""

    __tablename__ = "desired"
    device: Mapped[str] = mapped_column(_NAME, ForeignKey("devices.name"), primary_key=True)
    epoch: Mapped[int]
    generation: Mapped[int]
    plan: Mapped[str | None] = mapped_column(_NAME, ForeignKey("plans.name"))
    autonomy: Mapped[str]
    activation: Mapped[str]  # of the plan, as it was pushed last
    policy: Mapped[str | None] = mapped_column(_DIGEST)  # the checkpoint that the device may plan with alone
    compare_outputs: Mapped[float | None]  # within what new versions of models are to agree with old ones
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


class GenerationRow(Table):
    """The history: each generation of each device, who decided it and how it ended."""

    __tablename__ = "generations"
    position: Mapped[int] = mapped_column(_AUTO, primary_key=True)  # rises over all devices
    device: Mapped[str] = mapped_column(_NAME, ForeignKey("devices.name"))
    epoch: Mapped[int]
    generation: Mapped[int]
    plan: Mapped[str | None] = mapped_column(_NAME)
    digest: Mapped[str | None] = mapped_column(_DIGEST)
    decided_by: Mapped[str]
    decided_at_us: Mapped[int]
    state: Mapped[str]
    reason: Mapped[str]
    state_at_us: Mapped[int]
    __table_args__ = (UniqueConstraint("device", "epoch", "generation"),)


class ReportedRow(Table):
    """What one device last said it is doing."""

    __tablename__ = "reported"
    device: Mapped[str] = mapped_column(_NAME, ForeignKey("devices.name"), primary_key=True)
    revision: Mapped[int]
    boot: Mapped[int]
    epoch: Mapped[int]
    generation: Mapped[int]
    seen: Mapped[str | None] = mapped_column(_DIGEST)
    active: Mapped[str | None] = mapped_column(_DIGEST)
    origin: Mapped[str | None]
    local_counter: Mapped[int]
    state: Mapped[str | None]
    reason: Mapped[str]
    at_us: Mapped[int]


class ProfileRow(Table):
    """A profile that was asked for; `answered_at_us` is empty until the device's last row is stored."""

    __tablename__ = "profiles"
    request: Mapped[int] = mapped_column(_AUTO, primary_key=True)
    device: Mapped[str] = mapped_column(_NAME, ForeignKey("devices.name"), index=True)
    model: Mapped[str] = mapped_column(_NAME)
    artifact: Mapped[str] = mapped_column(_DIGEST, ForeignKey("artifacts.digest"))
    batch: Mapped[int]
    budget_s: Mapped[float]
    requested_at_us: Mapped[int]
    answered_at_us: Mapped[int | None]
    environment: Mapped[str]
    reason: Mapped[str]
    executor: Mapped[str] = mapped_column(String(128))  # empty, 0: those that the agent is set to
    intra_op_threads: Mapped[int]
    parts: Mapped[int]  # extents per axis of parts of operators that were asked for, too; 0: none


class PartCostRow(Table):
    """A part of an operator that may be split, measured, shared by all devices of a class.

    Of operators of a model that are alike only the first one has rows.
    """

    __tablename__ = "part_costs"
    device_class: Mapped[str] = mapped_column(String(128), primary_key=True)
    executor: Mapped[str] = mapped_column(String(128), primary_key=True)
    artifact: Mapped[str] = mapped_column(_DIGEST, primary_key=True)
    operator: Mapped[int] = mapped_column(primary_key=True)
    axis: Mapped[str] = mapped_column(String(8), primary_key=True)
    extent: Mapped[int] = mapped_column(primary_key=True)
    median_us: Mapped[float]
    spread_us: Mapped[float]
    runs: Mapped[int]
    measured_on: Mapped[str] = mapped_column(_NAME)
    measured_at_us: Mapped[int]


class HandoverCostRow(Table):
    """What devices of a class take to hand over between two resources of an executor, and to join halves."""

    __tablename__ = "handover_costs"
    device_class: Mapped[str] = mapped_column(String(128), primary_key=True)
    executor: Mapped[str] = mapped_column(String(128), primary_key=True)
    handover_us: Mapped[float]
    copy_bytes_per_s: Mapped[float]
    measured_on: Mapped[str] = mapped_column(_NAME)
    measured_at_us: Mapped[int]


class OperatorCostRow(Table):
    """A measured operator time, shared by all devices of a class.

    `executor`: its name and options, see `stageloom.planner.store.costs.executor_key`; empty for one that was
    measured by an agent that does not tell its executors.
    """

    __tablename__ = "operator_costs"
    device_class: Mapped[str] = mapped_column(String(128), primary_key=True)
    executor: Mapped[str] = mapped_column(String(128), primary_key=True)
    artifact: Mapped[str] = mapped_column(_DIGEST, primary_key=True)
    batch: Mapped[int] = mapped_column(primary_key=True)
    operator: Mapped[int] = mapped_column(primary_key=True)
    median_us: Mapped[float]
    spread_us: Mapped[float]
    runs: Mapped[int]
    measured_on: Mapped[str] = mapped_column(_NAME)
    measured_at_us: Mapped[int]


class MachineRow(Table):
    """What one device can run plans with, as its agent told it last: `MachineFacts`."""

    __tablename__ = "machines"
    device: Mapped[str] = mapped_column(_NAME, ForeignKey("devices.name"), primary_key=True)
    cores: Mapped[list[int]] = mapped_column(JsonText)
    executors: Mapped[list[list[str]]] = mapped_column(JsonText)  # (name, why it cannot be used), in order
    intra_op_threads: Mapped[int]
    told_at_us: Mapped[int]


class ExecutorTimeRow(Table):
    """What a whole model takes on an executor of one device: `ExecutorTime`, the newest."""

    __tablename__ = "executor_times"
    device: Mapped[str] = mapped_column(_NAME, ForeignKey("devices.name"), primary_key=True)
    artifact: Mapped[str] = mapped_column(_DIGEST, primary_key=True)
    executor: Mapped[str] = mapped_column(String(128), primary_key=True)
    intra_op_threads: Mapped[int] = mapped_column(primary_key=True)
    batch: Mapped[int] = mapped_column(primary_key=True)
    environment: Mapped[str] = mapped_column(String(128))
    time_us: Mapped[float | None]
    runs: Mapped[int]
    reason: Mapped[str]
    measured_at_us: Mapped[int]


class CalibrationRow(Table):
    """Which costs hold for a device in an environment; without a row those of its device class.

    `costs_key`: the device class, or the key of the device's own costs since it drifted from those.
    `steps_since_us`: steps before that, by the device's clock, say nothing of them. `ratio`: what steps took,
    over what they should have, when that was found at `at_us`.
    """

    __tablename__ = "calibrations"
    device: Mapped[str] = mapped_column(_NAME, ForeignKey("devices.name"), primary_key=True)
    environment: Mapped[str] = mapped_column(String(128), primary_key=True)
    costs_key: Mapped[str] = mapped_column(String(128))
    ratio: Mapped[float]
    steps_since_us: Mapped[int]
    at_us: Mapped[int]


class ScheduleRow(Table):
    """TOP's stage_dict: a schedule that was found for a combined block, shared by a device class."""

    __tablename__ = "schedules"
    device_class: Mapped[str] = mapped_column(String(128), primary_key=True)
    batch: Mapped[int] = mapped_column(primary_key=True)
    combined_block: Mapped[str] = mapped_column(_DIGEST, primary_key=True)
    scheduler: Mapped[str] = mapped_column(String(128), primary_key=True)
    stage_string: Mapped[str]
    found_at_us: Mapped[int]


class StageProfileRow(Table):
    """A plan whose stages a device was asked to measure; numbered together with `profiles`.

    `combined_blocks`: those wanted, a list in msgpack; empty: all.
    """

    __tablename__ = "stage_profiles"
    request: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    device: Mapped[str] = mapped_column(_NAME, ForeignKey("devices.name"), index=True)
    plan: Mapped[str] = mapped_column(_NAME, ForeignKey("plans.name"))
    combined_blocks: Mapped[bytes]
    budget_s: Mapped[float]
    requested_at_us: Mapped[int]
    answered_at_us: Mapped[int | None]
    environment: Mapped[str]
    reason: Mapped[str]


class StageCostRow(Table):
    """A measured stage, shared by a device class; `stage` is the stage string of this one stage.

    `stage_digest` stands for it in the key: a stage's text may be too long for an index.
    """

    __tablename__ = "stage_costs"
    device_class: Mapped[str] = mapped_column(String(128), primary_key=True)
    executor: Mapped[str] = mapped_column(String(128), primary_key=True)
    batch: Mapped[int] = mapped_column(primary_key=True)
    combined_block: Mapped[str] = mapped_column(_DIGEST, primary_key=True)
    stage_digest: Mapped[str] = mapped_column(_DIGEST, primary_key=True)
    members: Mapped[bytes]
    stage: Mapped[str]
    median_us: Mapped[float]
    spread_us: Mapped[float]
    runs: Mapped[int]
    measured_on: Mapped[str] = mapped_column(_NAME)
    measured_at_us: Mapped[int]


class AlarmRow(Table):
    """A trigger that fired on a device; (device, boot, number) makes a repeat harmless."""

    __tablename__ = "alarms"
    device: Mapped[str] = mapped_column(_NAME, ForeignKey("devices.name"), primary_key=True)
    boot: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    at_us: Mapped[int]
    received_at_us: Mapped[int]
    body: Mapped[bytes]


class ReplanRow(Table):
    """One re-plan: what triggered it, what was decided, how it ended.

    `at_us` and both `trigger_to_` times are by the device's clock, unless that was set in between.
    `control`: the plan that ran at the alarm; once there is a decision, that which it was weighed against.
    `generation` 0: no plan was pushed. `remark`: what went into the decision beside the plans, such as why a
    trained policy had no say.
    """

    __tablename__ = "replans"
    replan: Mapped[int] = mapped_column(_AUTO, primary_key=True)
    device: Mapped[str] = mapped_column(_NAME, ForeignKey("devices.name"), index=True)
    boot: Mapped[int]
    number: Mapped[int]
    cause: Mapped[str]
    value: Mapped[float]
    threshold: Mapped[float]
    at_us: Mapped[int]
    control: Mapped[str | None] = mapped_column(_DIGEST)
    begun_at_us: Mapped[int]
    plan: Mapped[str | None] = mapped_column(_NAME)
    digest: Mapped[str | None] = mapped_column(_DIGEST)
    structure: Mapped[str | None] = mapped_column(_DIGEST)
    environment: Mapped[str]
    how: Mapped[str]
    predicted: Mapped[float | None]
    epoch: Mapped[int]
    generation: Mapped[int]
    outcome: Mapped[str]
    ratio: Mapped[float | None]
    ratio_low: Mapped[float | None]
    ratio_high: Mapped[float | None]
    pairs: Mapped[int]
    trigger_to_decision_ms: Mapped[float | None]
    trigger_to_active_ms: Mapped[float | None]
    later_alarms: Mapped[int]
    reason: Mapped[str]
    remark: Mapped[str]
    figure: Mapped[str]
    __table_args__ = (
        Index(
            "pending_replans",
            "device",
            "replan",
            sqlite_where=text("outcome = 'pending'"),
            postgresql_where=text("outcome = 'pending'"),
        ),
    )


class TrialRow(Table):
    """How a generation's trial ended, decided by the planner or on the device; see `TrialEnded`."""

    __tablename__ = "trials"
    device: Mapped[str] = mapped_column(_NAME, primary_key=True)
    boot: Mapped[int] = mapped_column(primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True)
    epoch: Mapped[int]
    generation: Mapped[int]
    origin: Mapped[str]
    how: Mapped[str]
    verdict: Mapped[str]
    candidate: Mapped[str] = mapped_column(_DIGEST)
    control: Mapped[str | None] = mapped_column(_DIGEST)
    environment: Mapped[str]
    ratio: Mapped[float | None]
    ratio_low: Mapped[float | None]
    ratio_high: Mapped[float | None]
    pairs: Mapped[int]
    began_us: Mapped[int]
    decided_us: Mapped[int]
    reason: Mapped[str]
    figure: Mapped[str]
    latency_ratio: Mapped[float | None]
    busy_ratio: Mapped[float | None]
    outputs: Mapped[dict[str, Any] | None] = mapped_column(JsonText)  # `OutputsVerdict`
    __table_args__ = (
        Index("trials_by_candidate", "device", "candidate"),
        Index("trials_of_plans", "candidate", "how"),
    )


class RegimeRow(Table):
    """Which plan won a trial under which arrivals, as an alarm told them; keyed as its trial.

    `at_us` is by the planner's clock: as long after it heard of the alarm as the device decided after it
    raised it. `replaced`: the plan that the winner took the place of; none where that ran before. `loads`:
    the models' `stageloom.planner.replan.regimes.RegimeRate`.
    """

    __tablename__ = "regimes"
    device: Mapped[str] = mapped_column(_NAME, primary_key=True)
    boot: Mapped[int] = mapped_column(primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True)
    environment: Mapped[str] = mapped_column(String(128))
    won: Mapped[str] = mapped_column(_DIGEST)
    won_structure: Mapped[str] = mapped_column(_DIGEST)
    lost_structure: Mapped[str] = mapped_column(_DIGEST)
    replaced: Mapped[str | None] = mapped_column(_DIGEST)
    loads: Mapped[bytes]
    at_us: Mapped[int]


class ExpectedRegimeRow(Table):
    """Which plan is expected to be best under arrivals that recur, found before they come and tried nowhere.

    `loads`: as of `RegimeRow`. `chance`: of a gain over the plan it was compared with; None: it is that one.
    """

    __tablename__ = "expected_regimes"
    number: Mapped[int] = mapped_column(_AUTO, primary_key=True)
    device: Mapped[str] = mapped_column(_NAME)
    environment: Mapped[str] = mapped_column(String(128))
    plan: Mapped[str] = mapped_column(_DIGEST)
    chance: Mapped[float | None]
    loads: Mapped[bytes]
    found_at_us: Mapped[int]
    __table_args__ = (Index("expected_by_device", "device", "environment"),)


class ConsideredPlanRow(Table):
    """A plan that a search found or a re-plan looked at, as a `PlanEvaluation`.

    The plan itself is among `plans` only if it was kept. `replan` is empty for an operator's search.
    """

    __tablename__ = "considered_plans"
    number: Mapped[int] = mapped_column(_AUTO, primary_key=True)
    at_us: Mapped[int] = mapped_column(index=True)
    replan: Mapped[int | None]
    device: Mapped[str | None] = mapped_column(_NAME)
    device_class: Mapped[str] = mapped_column(String(128))
    serves: Mapped[str] = mapped_column(_DIGEST)
    digest: Mapped[str] = mapped_column(_DIGEST)
    scheduler: Mapped[str]
    how: Mapped[str] = mapped_column(String(32))
    verdict: Mapped[str] = mapped_column(String(32))
    blocks: Mapped[int]
    members_max: Mapped[int]
    busy: Mapped[float | None]
    predicted: Mapped[float | None]
    measured: Mapped[bool]
    search_s: Mapped[float | None]
    judged_at_s: Mapped[float | None]
    throughput_per_s: Mapped[float | None]
    p99_s: Mapped[float | None]
    p50_s: Mapped[float | None]
    share_in_time: Mapped[float | None]
    chance: Mapped[float | None]
    __table_args__ = (Index("considered_plans_by_models", "serves", "number"),)


class ReplanSettingRow(Table):
    """Whether and how the planner re-plans one device; without a row the defaults hold."""

    __tablename__ = "replan_settings"
    device: Mapped[str] = mapped_column(_NAME, ForeignKey("devices.name"), primary_key=True)
    enabled: Mapped[bool]
    scheduler: Mapped[str]
    members_max: Mapped[int]
    budget_s: Mapped[float]
    proposer: Mapped[str] = mapped_column(String(16))
    attach: Mapped[bool]


class TelemetryRow(Table):
    """One row as the device sent it. `at_us` is the device's time, or the planner's where that cannot be."""

    __tablename__ = "telemetry"
    device: Mapped[str] = mapped_column(_NAME, primary_key=True)
    boot: Mapped[int] = mapped_column(primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    at_us: Mapped[int]
    body: Mapped[bytes]
    __table_args__ = (
        Index("telemetry_by_kind", "device", "kind", "at_us"),
        {"sqlite_with_rowid": False},
    )


class RollupRow(Table):
    """What the telemetry rows of one subject say in `width_s` seconds from `begin_us` on.

    A telemetry row is counted in exactly one place: as itself, in a minute, or in an hour. `body` is
    `stageloom.planner.telemetry.SpanData`, `rows` the number of telemetry rows in it.
    """

    __tablename__ = "telemetry_rollups"
    device: Mapped[str] = mapped_column(_NAME, primary_key=True)
    width_s: Mapped[int] = mapped_column(primary_key=True)
    begin_us: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    subject: Mapped[str] = mapped_column(primary_key=True)
    rows: Mapped[int]
    body: Mapped[bytes]
    __table_args__ = ({"sqlite_with_rowid": False},)


class LedgerRow(Table):
    """What became of the rows of one boot, `stageloom.planner.telemetry.TelemetryAccount`."""

    __tablename__ = "telemetry_ledgers"
    device: Mapped[str] = mapped_column(_NAME, primary_key=True)
    boot: Mapped[int] = mapped_column(primary_key=True)
    produced: Mapped[int]
    dropped: Mapped[int]
    stored: Mapped[int]
    lost: Mapped[int]
    settled: Mapped[int]
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


class UnreadableRow(Table):
    """What a device sent and the database would not take, by kind: how much, and why the newest of it."""

    __tablename__ = "unreadable_records"
    device: Mapped[str] = mapped_column(_NAME, primary_key=True)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    number: Mapped[int]
    reason: Mapped[str]
    at_us: Mapped[int]


class EventRow(Table):
    """Something worth telling a person: enrolments, revocations, refusals, failures."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(_AUTO, primary_key=True)
    at_us: Mapped[int] = mapped_column(index=True)
    device: Mapped[str | None] = mapped_column(_NAME)
    code: Mapped[str]
    text: Mapped[str]
    __table_args__ = (Index("events_by_device", "device", "id"),)


class PredictionRow(Table):
    """What the twin predicted of a plan on a device, for comparison with what was measured later.

    `device` is empty for no device in particular; `figures`: see `stageloom.planner.twin.replay.figures`.
    """

    __tablename__ = "predictions"
    number: Mapped[int] = mapped_column("prediction", _AUTO, primary_key=True)
    device: Mapped[DeviceId | None] = mapped_column(_NAME)
    plan: Mapped[str] = mapped_column(_NAME)
    digest: Mapped[Digest] = mapped_column(_DIGEST)
    twin: Mapped[str]  # where its step times are from
    arrivals: Mapped[str]  # and its load
    seconds: Mapped[float]
    figures: Mapped[dict[str, float]] = mapped_column(JsonText)  # name to number
    made_at_us: Mapped[int]
    __table_args__ = (Index("predictions_by_plan", "device", "digest", "made_at_us"),)


class CheckpointRow(Table):
    """A trained policy, named by the digest of its bytes; no `device_class` means any device."""

    __tablename__ = "checkpoints"
    digest: Mapped[str] = mapped_column(_DIGEST, primary_key=True)
    policy: Mapped[str] = mapped_column(String(32))
    device_class: Mapped[str] = mapped_column(String(128))
    artifacts: Mapped[str]  # JSON: digest to model's name
    settings: Mapped[str]  # JSON
    versions: Mapped[str]  # JSON
    curves: Mapped[str]  # JSON: one object per validation
    ratio: Mapped[float]  # to sequential, the best validation's
    steps: Mapped[int]
    trained_at_us: Mapped[int]
    body: Mapped[bytes]
    verdict: Mapped[str | None]  # JSON: that of its check; none before one
    unchecked: Mapped[bool]  # an operator lets it plan without having passed
    __table_args__ = (Index("checkpoints_by_use", "policy", "device_class", "trained_at_us"),)


class RolloutRow(Table):
    """A version of a model on its way to devices, wave by wave; see `stageloom.planner.rollout.machine`.

    `wave`: the current one, from 0. `confirmed`: the waves that may be left although some of their devices
    were not reached. `ended_at_us`: empty while it is running or paused.
    """

    __tablename__ = "rollouts"
    name: Mapped[str] = mapped_column(_NAME, primary_key=True)
    model: Mapped[str] = mapped_column(_NAME)
    number: Mapped[int]
    artifact: Mapped[str] = mapped_column(_DIGEST)
    labels: Mapped[dict[str, str]] = mapped_column(JsonText)
    waves: Mapped[list[int]] = mapped_column(JsonText)  # devices up to the end of each wave
    max_failed: Mapped[int]
    reach_s: Mapped[float]
    state: Mapped[str] = mapped_column(String(16), index=True)
    wave: Mapped[int]
    confirmed: Mapped[int]
    reason: Mapped[str]
    created_at_us: Mapped[int]
    changed_at_us: Mapped[int]
    ended_at_us: Mapped[int | None]
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


class RolloutDeviceRow(Table):
    """A device of a rollout. Plans are empty, and `generation` is 0, until it is asked."""

    __tablename__ = "rollout_devices"
    rollout: Mapped[str] = mapped_column(_NAME, ForeignKey("rollouts.name"), primary_key=True)
    device: Mapped[str] = mapped_column(_NAME, ForeignKey("devices.name"), primary_key=True)
    wave: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    old_plan: Mapped[str | None] = mapped_column(_NAME)
    new_plan: Mapped[str | None] = mapped_column(_NAME)
    epoch: Mapped[int]
    generation: Mapped[int]
    reason: Mapped[str]
    changed_at_us: Mapped[int]
    __table_args__ = (Index("rollouts_by_device", "device", "state"),)


class AccessTokenRow(Table):
    """A token for the API, kept as its digest; a revoked one keeps its row, which the audit log names."""

    __tablename__ = "access_tokens"
    name: Mapped[str] = mapped_column(_NAME, primary_key=True)
    role: Mapped[str] = mapped_column(String(16))
    digest: Mapped[str] = mapped_column(_DIGEST, unique=True)
    created_at_us: Mapped[int]
    revoked_at_us: Mapped[int]  # 0: it holds


class WebhookRow(Table):
    """An address that hears of events. `failures` in a row; it is not tried before `next_at_us`."""

    __tablename__ = "webhooks"
    name: Mapped[str] = mapped_column(_NAME, primary_key=True)
    url: Mapped[str]
    events: Mapped[list[str]] = mapped_column(JsonText)
    secret: Mapped[str] = mapped_column(String(128))
    private: Mapped[int]  # 1: addresses of local networks are allowed
    created_at_us: Mapped[int]
    next_at_us: Mapped[int]
    failures: Mapped[int]
    arrived: Mapped[int]
    dropped: Mapped[int]
    problem: Mapped[str]


class WebhookMessageRow(Table):
    """A message that has not arrived yet; `message` is its identifier, the same at every try."""

    __tablename__ = "webhook_messages"
    number: Mapped[int] = mapped_column(_AUTO, primary_key=True)
    webhook: Mapped[str] = mapped_column(_NAME, index=True)
    device: Mapped[str] = mapped_column(_NAME)
    message: Mapped[str] = mapped_column(_NAME)
    body: Mapped[bytes]
    at_us: Mapped[int]


class AuditRow(Table):
    """One request to the API that changed something, or was refused to who asked."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(_AUTO, primary_key=True)
    at_us: Mapped[int]
    who: Mapped[str] = mapped_column(String(128))
    role: Mapped[str] = mapped_column(String(16))
    source: Mapped[str] = mapped_column(String(128))
    operation: Mapped[str] = mapped_column(String(64))
    target: Mapped[str] = mapped_column(String(128))
    status: Mapped[int] = mapped_column(Integer)


class AnswerRow(Table):
    """The answer to a request that came with an idempotency key; no `body` where it held a secret."""

    __tablename__ = "api_answers"
    who: Mapped[str] = mapped_column(String(128), primary_key=True)
    key: Mapped[str] = mapped_column(String(128), primary_key=True)
    at_us: Mapped[int] = mapped_column(index=True)
    request_digest: Mapped[str] = mapped_column(_DIGEST)
    status: Mapped[int] = mapped_column(Integer)
    body: Mapped[bytes]
