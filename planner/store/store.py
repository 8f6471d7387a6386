"""The store of one planner: what dispatch, the operator's commands and the re-planner write.

Every write goes through the one writer thread and returns when it is committed. Methods may be called from
any thread. What may be read, with or without a running planner, is `stageloom.planner.store.reading`.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from stageloom.planner.costs.drift import Renewal
from stageloom.planner.costs.records import Calibration, FoundSchedule
from stageloom.planner.dispatch.ports import (
    ArtifactFile,
    EnrolAttempt,
    FleetMember,
    LocalPlanRefused,
    ReportRecord,
    TelemetryWrite,
)
from stageloom.planner.replan.policy import ReplanNote, ReplanSettings
from stageloom.planner.replan.predict import PlanEvaluation
from stageloom.planner.store import (
    checkpoints,
    clock_trust,
    considered,
    costs,
    desired,
    devices,
    grants,
    mending,
    plans,
    refusals,
    renewals,
    replans,
    retention,
    schema,
    stages,
    telemetry,
    unreadable,
)
from stageloom.planner.store.database import is_of_the_record, why
from stageloom.planner.store.desired import Push
from stageloom.planner.store.devices import enrolled_after
from stageloom.planner.store.isolation import isolated
from stageloom.planner.store.reading import ReadStore
from stageloom.planner.store.retention import Retention
from stageloom.planner.store.tables import DeviceRow, QuarantineRow, ReportedRow
from stageloom.planner.store.writer import Writer
from stageloom.planner.telemetry.trusted_time import notice
from stageloom.shared.artifact import open_artifact
from stageloom.shared.bound import bind
from stageloom.shared.clock import Clock, SystemClock
from stageloom.shared.errors import InputError, PlanError
from stageloom.shared.failpoint import failpoint
from stageloom.shared.ids import DeviceId, Digest
from stageloom.shared.messages.admin import MAX_PUSHED, ModelInfo, PlanInfo
from stageloom.shared.messages.control import Activation, Alarm, Autonomy, Desired, LocalPlan
from stageloom.shared.messages.telemetry import RowKind
from stageloom.shared.plan import ExecutorOptions, Plan, decode_plan


class Store(ReadStore):
    """The planner's own store; implements `stageloom.planner.dispatch.ports.DispatchStore`."""

    def __init__(self, data_dir: Path, database_url: str = "", clock: Clock | None = None) -> None:
        """Migrate, then open for writing.

        Raises:
            StorageError: the schema is newer than this version, or the database cannot be written.
        """
        super().__init__(data_dir, database_url)
        self._clock = clock or SystemClock()
        try:
            schema.migrate(self.database)
        except BaseException:
            self.database.close()
            raise
        self.blobs.sweep()
        self.writer = Writer(self.database)
        now_us = self._clock.wall_us()
        self.writer.run(lambda session: mending.mend(session, now_us))

    def close(self) -> None:
        """Commit what was submitted, then close."""
        self.writer.close()
        super().close()

    # -- what dispatch needs --------------------------------------------------------------------------------

    def epoch(self) -> int:
        """The planner's current epoch, 1 in a new database."""
        now_us = self._clock.wall_us()
        with self.database.read() as session:
            return devices.planner_row(session, now_us).epoch

    def fleet(self) -> list[FleetMember]:
        """Every enrolled device, revoked ones included."""
        with self.database.read() as session:
            rows = session.execute(
                select(DeviceRow, ReportedRow, QuarantineRow.reason)
                .outerjoin(ReportedRow, ReportedRow.device == DeviceRow.name)
                .outerjoin(QuarantineRow, QuarantineRow.device == DeviceRow.name)
                .order_by(DeviceRow.enrolled_at_us, DeviceRow.name)
            ).all()
            wanted = desired.desired_of(session, [DeviceId(row.name) for row, _, _ in rows])
            return [
                FleetMember(
                    device=DeviceId(row.name),
                    public_key=row.public_key,
                    revoked=row.revoked,
                    desired=wanted.get(DeviceId(row.name)),
                    boot=reported.boot if reported else 0,
                    report=devices.report_of(reported) if reported else None,
                    device_class=row.device_class,
                    quarantine=quarantine or "",
                )
                for row, reported, quarantine in rows
            ]

    def enrol(self, attempt: EnrolAttempt) -> DeviceId:
        """Use up a token and add the key; see `stageloom.planner.store.devices.enrol`.

        Raises:
            EnrolRefused: the secret or the name is not acceptable.
        """
        now_us = self._clock.wall_us()
        return self.writer.run(lambda session: devices.enrol(session, attempt, now_us))

    def reissue(self, device: DeviceId, *, above_epoch: int, above_generation: int) -> Desired:
        """Desire the same above a generation that this database does not know.

        Raises:
            InputError: there is no such device, or it is revoked.
        """
        now_us = self._clock.wall_us()

        def work(session: Session) -> Desired:
            devices.raise_epoch(session, above_epoch, now_us)
            one = Push(device=device, plan=None, decided_by="restored", above_generation=above_generation)
            return desired.push(session, one, now_us)

        return self.writer.run(work)

    def record_reports(self, records: Sequence[ReportRecord]) -> None:
        """Store the newest reports, and the state of their generations, in one transaction.

        One that cannot be stored is counted as unreadable.
        """
        now_us = self._clock.wall_us()
        isolated(
            lambda some: self.writer.run(lambda session: devices.store_reports(session, some, now_us)),
            records,
            lambda record, error: self._unreadable(record.device, "report", error),
        )

    def append_telemetry(self, writes: Sequence[TelemetryWrite]) -> None:
        """Store rows and ledgers, durable when this returns: in one transaction, unless a row is to blame.

        A row that cannot be stored for what it says is stored as its bytes, as unreadable.
        """
        isolated(self._append, writes, lambda write, _: self._append_by_row(write))

    def _append(self, writes: Sequence[TelemetryWrite]) -> None:
        now_us = self._clock.wall_us()
        self.writer.run(lambda session: telemetry.append(session, writes, now_us), bulk=True)

    def _append_by_row(self, write: TelemetryWrite) -> None:
        """Store what can be stored of a write that cannot be as a whole; its rows in order."""
        rows = [TelemetryWrite(write.device, (row,), ()) for row in write.rows]
        isolated(self._append, rows, self._append_unread)
        ledgers = TelemetryWrite(write.device, (), write.ledgers)
        blame = partial(self._unreadable, write.device, "telemetry ledger")
        isolated(self._append, [ledgers], lambda _, error: blame(error))

    def _append_unread(self, write: TelemetryWrite, error: Exception) -> None:
        (row,) = write.rows
        unread = replace(row, kind=RowKind.UNREADABLE, data=None, reason=why(error))
        blame = partial(self._unreadable, write.device, "telemetry row")
        isolated(self._append, [replace(write, rows=(unread,))], lambda _, again: blame(again))

    def _unreadable(self, device: DeviceId, kind: str, error: Exception) -> None:
        """Count a record of which nothing is stored."""
        record, now_us = unreadable.Unreadable(device, kind, why(error)), self._clock.wall_us()
        self.writer.run(lambda session: unreadable.note(session, [record], now_us))

    def record_alarm(self, device: DeviceId, alarm: Alarm) -> int | None:
        """Keep an alarm; returns the re-plan that it begins, or None; see `DispatchStore`.

        One that cannot be stored is counted as unreadable.
        """
        now_us = self._clock.wall_us()
        try:
            return self.writer.run(lambda session: replans.record_alarm(session, device, alarm, now_us))
        except Exception as error:
            if not is_of_the_record(error):
                raise
            self._unreadable(device, "alarm", error)
            return None

    def quarantine(self, device: DeviceId, reason: str) -> Future[None]:
        """Refuse a device, over restarts too, until `release`; returns at once.

        Raises (from the future):
            InputError: there is no such device.
        """
        now_us = self._clock.wall_us()
        return self.writer.submit(lambda session: devices.quarantine(session, device, reason, now_us))

    def adopt_local(self, device: DeviceId, local: LocalPlan) -> Desired | None:
        """Desire a plan that the device made, unless a newer value stands; see `DispatchStore`.

        Raises:
            LocalPlanRefused: it is no legal plan, or not one that the device may make; an event says so.
        """
        now_us = self._clock.wall_us()
        try:
            plan = decode_plan(local.plan, local.plan_digest)
            with self.database.read() as session:
                if not grants.permits(session, device, local, plan):
                    return None
            # Beside the writer's thread: it takes a while, and whatever changes what is permitted takes a
            # generation, which `adopt` compares again.
            bind(plan, {model.artifact: self.graph(model.artifact) for model in plan.models})
            return self.writer.run(lambda session: desired.adopt(session, device, local, plan, now_us))
        except (PlanError, InputError) as error:
            why = str(error)[:512]
            self.writer.run(
                lambda session: refusals.note(session, device, refusals.LOCAL_PLAN_REFUSED, why, now_us)
            )
            raise LocalPlanRefused(why) from error

    def note_excess(self, device: DeviceId, text: str) -> None:
        """Keep for operators that a device did more than its quotas allow."""
        now_us = self._clock.wall_us()
        self.writer.run(lambda session: devices.add_event(session, now_us, device, "quota", text))

    def artifact(self, digest: Digest) -> ArtifactFile | None:
        """The artifact's file, or None if the store has none of this digest."""
        path = self.blobs.path(digest)
        try:
            return ArtifactFile(path, path.stat().st_size)
        except OSError:
            return self._policy_file(digest)

    def _policy_file(self, digest: Digest) -> ArtifactFile | None:
        """A policy's, made of its row in the database when a device first asks."""
        with self.database.read() as session:
            body = checkpoints.body_of(session, digest)
        if body is None:
            return None
        return ArtifactFile(self.blobs.path(digest), self.blobs.put_bytes(body, digest))

    # -- what operators ask for -----------------------------------------------------------------------------

    def add_token(self, secret_digest: Digest, device: DeviceId | None, lifetime_s: float) -> int:
        """Remember a one-time secret; returns when it expires, in microseconds since 1970.

        Raises:
            InputError: the name is in use.
        """
        now_us = self._clock.wall_us()
        expires_at_us = now_us + round(lifetime_s * 1e6)
        self.writer.run(
            lambda session: devices.add_token(session, secret_digest, device, expires_at_us, now_us)
        )
        return expires_at_us

    def revoke(self, device: DeviceId) -> None:
        """Take a device's key away; a repeat changes nothing.

        Raises:
            InputError: there is no such device.
        """
        now_us = self._clock.wall_us()
        self.writer.run(lambda session: devices.revoke(session, device, now_us))

    def release(self, device: DeviceId) -> None:
        """End a device's quarantine; a repeat changes nothing.

        Raises:
            InputError: there is no such device.
        """
        now_us = self._clock.wall_us()
        self.writer.run(lambda session: devices.release(session, device, now_us))

    def add_model(self, name: str, source: Path, digest: Digest) -> ModelInfo:
        """Copy an artifact file in and name it.

        Raises:
            InputError: the name belongs to another artifact.
            DecodeError: the file is no artifact, or not the one of this digest.
            StorageError: the disk is full.
        """
        artifact = open_artifact(source, digest)
        size_bytes = self.blobs.put_file(source, digest)
        now_us = self._clock.wall_us()
        info = self.writer.run(
            lambda session: plans.add_model(session, name, digest, artifact.graph, size_bytes, now_us)
        )
        self._graphs[digest] = artifact.graph
        return info

    def remove_model(self, name: str) -> None:
        """Forget a model, and its artifact's file where nothing needs it any more.

        Raises:
            InputError: there is no such model, or a device should run it.
        """
        orphan = self.writer.run(lambda session: plans.remove_model(session, name))
        if orphan is not None:
            self._graphs.pop(orphan, None)
            self.blobs.remove(orphan)

    def add_plan(self, name: str, plan: Plan, scheduler: str) -> PlanInfo:
        """Keep a plan under a name; a repeat with the same plan changes nothing.

        Raises:
            InputError: the name belongs to another plan.
        """
        now_us = self._clock.wall_us()
        return self.writer.run(lambda session: plans.add_plan(session, name, plan, scheduler, now_us))

    def keep_schedules(self, device_class: str, scheduler: str, found: Iterable[FoundSchedule]) -> None:
        """Share schedules that were found with all devices of a class."""
        now_us, rows = self._clock.wall_us(), tuple(found)
        self.writer.run(lambda session: costs.keep_schedules(session, device_class, scheduler, rows, now_us))

    def keep_considered(
        self,
        found: Iterable[PlanEvaluation],
        *,
        device_class: str,
        device: DeviceId | None = None,
        replan: int | None = None,
    ) -> None:
        """Keep what one search or re-plan looked at, for `stageloom plan explain`."""
        now_us, rows = self._clock.wall_us(), tuple(found)
        self.writer.run(
            lambda session: considered.keep(
                session, rows, replan=replan, device=device, device_class=device_class, now_us=now_us
            )
        )

    def push(
        self,
        device: DeviceId,
        plan: str,
        *,
        decided_by: str,
        autonomy: Autonomy | None = None,
        activation: Activation = Activation.TRIAL,
    ) -> Desired:
        """Make a plan the device's next generation; returns what is desired now.

        Raises:
            InputError: there is no such device or plan, or the device is revoked.
        """
        one = Push(device=device, plan=plan, decided_by=decided_by, autonomy=autonomy, activation=activation)
        return self.push_soon(one).result()

    def attach_policy(self, device: DeviceId, policy: str) -> Desired:
        """Have a device plan alone with a policy from its next generation on; empty: with none.

        From then on re-plans leave that alone (`ReplanSettings.attach`).

        Raises:
            InputError: there is no such device or policy, or the device is revoked.
        """
        now_us = self._clock.wall_us()

        def work(session: Session) -> Desired:
            row = session.get(DeviceRow, device)
            found = checkpoints.named(session, policy, row.device_class if row else "") if policy else ""
            now = desired.push(
                session, Push(device=device, plan=None, decided_by="operator", policy=found), now_us
            )
            replans.set_settings(session, device, replace(replans.settings(session, device), attach=False))
            return now

        return self.writer.run(work)

    def push_soon(self, one: Push) -> Future[Desired]:
        """Push for callers that have better things to do than to wait; see `Writer.submit`.

        Pushes that wait for the same commit share their statements.

        Raises (from the future):
            InputError: as `push`.
        """
        return self.writer.submit_one(self._pushes, one)

    def push_fleet(
        self,
        devices: Sequence[DeviceId],
        plan: str,
        *,
        decided_by: str,
        after: str = "",
        autonomy: Autonomy | None = None,
        activation: Activation = Activation.TRIAL,
    ) -> Future[tuple[list[tuple[DeviceId, Desired | InputError]], bool]]:
        """Push a plan to many devices in one transaction; without names to all enrolled ones after `after`.

        The future's result: each device's new desired value or why it was refused, and whether there are
        more devices to go on with.

        Raises (from the future):
            InputError: there is no such plan, or it names a model that was removed.
        """

        def work(session: Session) -> tuple[list[tuple[DeviceId, Desired | InputError]], bool]:
            plans.plan_info(session, plan)
            names, more = list(dict.fromkeys(devices)), False
            if not names:
                names = enrolled_after(session, after, MAX_PUSHED + 1)
                names, more = names[:MAX_PUSHED], len(names) > MAX_PUSHED
            wanted = [
                Push(device=name, plan=plan, decided_by=decided_by, autonomy=autonomy, activation=activation)
                for name in names
            ]
            return list(zip(names, self._pushes(session, wanted), strict=True)), more

        return self.writer.submit(work)

    def _pushes(self, session: Session, pushes: Sequence[Push]) -> Sequence[Desired | InputError]:
        results = desired.push_all(session, pushes, self._clock.wall_us())
        failpoint("planner.desired.before")
        return results

    def request_profile(
        self, device: DeviceId, names: list[str], *, batch: int = 1, budget_s: float = 20.0
    ) -> tuple[list[int], Desired]:
        """Ask a device to measure models; returns the requests' numbers and what is desired now.

        Raises:
            InputError: there is no such device or model, or the device is revoked.
        """
        now_us = self._clock.wall_us()
        return self.writer.run(
            lambda session: costs.request_profile(
                session, device, names, batch=batch, budget_s=budget_s, now_us=now_us
            )
        )

    def request_stages(
        self, device: DeviceId, plan: str, *, combined_blocks: Sequence[int] = (), budget_s: float = 10.0
    ) -> tuple[int, Desired]:
        """Ask a device to measure a plan's stages; returns the request's number and what is desired now.

        Of all its combined blocks, or of those named.

        Raises:
            InputError: there is no such device or plan, or the device is revoked.
        """
        now_us = self._clock.wall_us()
        return self.writer.run(
            lambda session: stages.request_stages(
                session,
                device,
                plan,
                combined_blocks=combined_blocks,
                budget_s=budget_s,
                now_us=now_us,
            )
        )

    # -- what the re-planner needs --------------------------------------------------------------------------

    def set_replan_settings(self, device: DeviceId, wanted: ReplanSettings) -> None:
        """Keep how a device is re-planned.

        Raises:
            InputError: there is no such device.
        """

        def work(session: Session) -> None:
            devices.known_device(session, device)
            replans.set_settings(session, device, wanted)

        self.writer.run(work)

    def unfinished_replans(self) -> list[tuple[DeviceId, int]]:
        """Re-plans that a stopped planner left before they pushed anything."""
        with self.database.read() as session:
            return replans.unfinished(session)

    def renew_costs(
        self,
        device: DeviceId,
        found: Renewal | None,
        executor: ExecutorOptions,
        *,
        ratio: float,
        steps_since_us: int,
    ) -> Calibration:
        """Give a device costs of its own, made from those that held; None: its class's, where it is back.

        `steps_since_us`: the newest of the steps that showed it, by the device's clock.

        Raises:
            InputError: there is no such device.
        """
        now_us = self._clock.wall_us()
        return self.writer.run(
            lambda session: renewals.renew(
                session,
                device,
                found,
                executor,
                ratio=ratio,
                steps_since_us=steps_since_us,
                now_us=now_us,
            )
        )

    def push_replan(
        self,
        device: DeviceId,
        replan: int,
        plan: Plan,
        *,
        scheduler: str,
        above: tuple[int, int],
        note: ReplanNote,
    ) -> Desired | None:
        """Keep and push a re-plan's plan, if `above` is still the newest desired (epoch, generation).

        Returns what is desired now, or None where somebody decided something newer meanwhile.

        Raises:
            InputError: the device is revoked, or a model of the plan was removed.
        """
        now_us = self._clock.wall_us()

        def work(session: Session) -> Desired | None:
            if desired.newest(session, device) != above or not replans.undecided(session, replan):
                return None
            name = plans.named(session, plan, scheduler, now_us)
            wanted = note.policy is not None and replans.settings(session, device).attach
            policy = note.policy if wanted and desired.may_plan(session, device) else None
            one = Push(device=device, plan=name, decided_by="replan", policy=policy)
            now = desired.push(session, one, now_us)
            replans.pushed(
                session,
                replan,
                plan=name,
                digest=plan.digest,
                note=note,
                generation=(now.epoch, now.generation),
            )
            return now

        return self.writer.run(work)

    def end_replan(self, replan: int, reason: str, remark: str = "") -> None:
        """A re-plan found nothing to push: no gain."""
        now_us = self._clock.wall_us()
        self.writer.run(lambda session: replans.found_nothing(session, replan, reason, remark, now_us))

    def tidy(self, keep: Retention) -> Iterator[int]:
        """Roll up and delete old telemetry in small steps; see `stageloom.planner.store.retention.tidy`.

        Ages are counted from the trusted time: `advance_clock` first.
        """
        wall_us = self._clock.wall_us()
        with self.database.read() as session:
            now_us = clock_trust.read(session, wall_us).now_us(wall_us)
        return retention.tidy(self.database, self.writer, keep, now_us)

    def advance_clock(self, elapsed_s: float) -> float:
        """Let the trusted time follow the clock; returns how far ahead of what is believed the clock is.

        `elapsed_s`: real time since the last call in this process, 0 for the first one.
        """
        wall_us = self._clock.wall_us()

        def work(session: Session) -> float:
            before = clock_trust.read(session, wall_us)
            clock_trust.keep(session, before.advance(wall_us, elapsed_s))
            return before.ahead_s(wall_us)

        return self.writer.run(work)

    def trust_clock(self) -> None:
        """An operator says that the clock is right."""
        wall_us = self._clock.wall_us()

        def work(session: Session) -> None:
            clock_trust.keep(session, clock_trust.read(session, wall_us)._replace(confirmed_us=wall_us))
            devices.add_event(session, wall_us, None, "clock_trusted", "by operator")

        self.writer.run(work)

    def notices(self) -> list[str]:
        """What an operator should know of, a line each: a clock that is not believed, what was refused."""
        wall_us = self._clock.wall_us()
        with self.database.read() as session:
            ahead_s = clock_trust.read(session, wall_us).ahead_s(wall_us)
            refused = refusals.recent(session, wall_us)
        return [notice(ahead_s), *refused] if ahead_s else refused

    def heard(self, names: Collection[DeviceId]) -> None:
        """Note that devices were heard of now; those that this database does not know are left out."""
        now_us = self._clock.wall_us()
        self.writer.run(lambda session: devices.heard(session, names, now_us))

    def presence(self, device: DeviceId, online: bool) -> None:
        """Note that a device came or went; returns at once."""
        self.writer.submit_one(devices.presence, (device, online, self._clock.wall_us()))
