"""Carries out admin requests: store first, then tell the devices' side. Knows no socket."""

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from stageloom.planner.admin.search import Searches, record, scheduler_key, search_job, unsure_of
from stageloom.planner.cluster.interface import SearchPool
from stageloom.planner.dispatch.admin import Answer
from stageloom.planner.replan.predict import EvaluationVerdict, evaluation_of, predict
from stageloom.planner.store.desired import Push, push_fleet, push_wanted
from stageloom.planner.store.devices import (
    add_token,
    device_info,
    device_infos,
    planner_epoch,
    release_device,
    revoke_device,
)
from stageloom.planner.store.events import unreadable_records
from stageloom.planner.store.generations import generation_history
from stageloom.planner.store.link import fleet_members
from stageloom.planner.store.models import model_infos
from stageloom.planner.store.plans import add_plan, plan_info
from stageloom.planner.store.policies import attach_policy
from stageloom.planner.store.profiles import request_profile, request_stage_profile
from stageloom.planner.store.replans import replan_settings, set_replan_settings
from stageloom.planner.store.store import Store
from stageloom.planner.store.telemetry import newest_telemetry, telemetry_balance
from stageloom.planner.store.trusted_time import notices, trust_clock
from stageloom.planner.telemetry import RATE_KINDS, model_rates
from stageloom.shared.clock import Clock
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import InputError
from stageloom.shared.failpoint import failpoint
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import admin
from stageloom.shared.messages.control import MAX_PROFILED, Desired
from stageloom.shared.search.registry import scheduler as find_scheduler
from stageloom.shared.text import bounded
from stageloom.shared.token import JoinToken, format_token
from stageloom.shared.version import __version__

if TYPE_CHECKING:
    from stageloom.planner.tournament.runner import TournamentRunner

T = TypeVar("T")
WATCH_WINDOW_S = 5.0
SECRET_BYTES = 16
_LINE = 512  # characters of a notice


class FleetLink(Protocol):
    """The devices' side of a running planner. Methods may be called from any thread and return at once."""

    def online(self) -> frozenset[DeviceId]:
        """Devices with a live session."""
        ...

    def desired_changed(self, device: DeviceId, desired: Desired) -> None:
        """The store holds a newer desired value for a device."""
        ...

    def revoked(self, device: DeviceId) -> None:
        """The store holds a device as revoked."""
        ...

    def released(self, device: DeviceId) -> None:
        """The store holds a device's quarantine as ended."""
        ...

    def backlog_rows(self) -> int:
        """Telemetry rows taken in and not yet committed."""
        ...

    def token(self, secret: bytes) -> JoinToken:
        """A join token with this secret: where devices reach this planner, and how they know it."""
        ...


class AdminHandler:
    """Answers each request with its own reply; errors raised on purpose become `Failed` at the socket."""

    def __init__(self, store: Store, fleet: FleetLink, clock: Clock, pool: SearchPool) -> None:
        self._store = store
        self._fleet = fleet
        self._clock = clock
        self._searches = Searches(pool)
        self._pool = pool
        self._tournaments_lock = threading.Lock()
        self._tournaments: TournamentRunner | None = None
        self._started_s = clock.monotonic_s()
        self._handlers: dict[type, Callable[[Any], Answer]] = {
            admin.DeviceTokenRequest: self._token,
            admin.DeviceListRequest: self._device_list,
            admin.DeviceShowRequest: self._device_show,
            admin.DeviceRevokeRequest: self._revoke,
            admin.DeviceReleaseRequest: self._release,
            admin.DeviceProfileRequest: self._profile,
            admin.StageProfileCreate: self._stage_profile,
            admin.DeviceReplanRequest: self._replan_settings,
            admin.ModelAddRequest: self._model_add,
            admin.ModelListRequest: self._model_list,
            admin.ModelRemoveRequest: self._model_remove,
            admin.PlanCreateRequest: self._plan_create,
            admin.PlanCancelRequest: self._plan_cancel,
            admin.PlanProgressRequest: self._plan_progress,
            admin.PlanShowRequest: self._plan_show,
            admin.PlanPushRequest: self._plan_push,
            admin.FleetPushRequest: self._fleet_push,
            admin.PolicyAttachRequest: self._policy_attach,
            admin.PlanHistoryRequest: self._history,
            admin.WatchRequest: self._watch,
            admin.StatusRequest: self._status,
            admin.ClockTrustRequest: self._trust_clock,
        }

    def handle(self, request: admin.AdminRequest) -> Answer:
        """The reply, or the future of one that only the store delays; called from several threads at once.

        Raises (or the future does):
            StageloomError: the request did not take effect, and why.
        """
        return self._handlers[type(request)](request)

    # -- devices --------------------------------------------------------------------------------------------

    def _token(self, request: admin.DeviceTokenRequest) -> admin.AdminReply:
        secret = secrets.token_bytes(SECRET_BYTES)
        expires_at_us = self._store.write(
            add_token, digest_bytes([secret]), request.device, request.lifetime_s
        )
        token = format_token(self._fleet.token(secret))
        return admin.DeviceTokenReply(token=token, expires_at_us=expires_at_us)

    def _online(self, infos: list[admin.DeviceInfo]) -> tuple[admin.DeviceInfo, ...]:
        """A live session means heard of just now; the store learns of that only when a report changes."""
        online, now_us = self._fleet.online(), self._clock.wall_us()
        return tuple(
            msgspec.structs.replace(info, online=True, last_seen_us=max(info.last_seen_us, now_us))
            if info.device in online
            else info
            for info in infos
        )

    def _device_list(self, request: admin.DeviceListRequest) -> admin.AdminReply:
        found = self._store.read(device_infos, after=request.after, limit=request.limit + 1)
        return admin.DeviceListReply(
            devices=self._online(found[: request.limit]), more=len(found) > request.limit
        )

    def _device_show(self, request: admin.DeviceShowRequest) -> admin.AdminReply:
        (device,) = self._online([self._store.read(device_info, request.device)])
        entries, _ = self._store.read(generation_history, request.device)
        return admin.DeviceShowReply(device=device, history=tuple(entries))

    def _revoke(self, request: admin.DeviceRevokeRequest) -> admin.AdminReply:
        self._store.write(revoke_device, request.device)
        self._fleet.revoked(request.device)
        return admin.Done()

    def _release(self, request: admin.DeviceReleaseRequest) -> admin.AdminReply:
        self._store.write(release_device, request.device)
        self._fleet.released(request.device)
        return admin.Done()

    def _profile(self, request: admin.DeviceProfileRequest) -> admin.AdminReply:
        requests, desired = self._store.write(
            request_profile,
            request.device,
            list(request.models),
            batch=request.batch,
            budget_s=request.budget_s,
        )
        self._fleet.desired_changed(request.device, desired)
        return admin.DeviceProfileReply(
            requests=tuple(requests), epoch=desired.epoch, generation=desired.generation
        )

    def _stage_profile(self, request: admin.StageProfileCreate) -> admin.AdminReply:
        blocks: tuple[int, ...] = ()
        if request.unsure_only:
            blocks = unsure_of(self._store, request.device, request.plan, self._clock.wall_us())
            if not blocks:
                return admin.DeviceProfileReply(requests=(), epoch=0, generation=0)
        number, desired = self._store.write(
            request_stage_profile,
            request.device,
            request.plan,
            combined_blocks=blocks if len(blocks) <= MAX_PROFILED else (),
            budget_s=request.budget_s,
        )
        self._fleet.desired_changed(request.device, desired)
        return admin.DeviceProfileReply(
            requests=(number,), epoch=desired.epoch, generation=desired.generation
        )

    def _replan_settings(self, request: admin.DeviceReplanRequest) -> admin.AdminReply:
        settings = self._store.read(replan_settings, request.device)
        given = {name: getattr(request, name) for name in settings.fields()}
        changes = {name: value for name, value in given.items() if value is not None}
        if changes:
            if request.scheduler is not None:
                find_scheduler(request.scheduler)
            settings = replace(settings, **changes)
            self._store.write(set_replan_settings, request.device, settings)
        return admin.DeviceReplanReply(**settings.fields())

    # -- models and plans -----------------------------------------------------------------------------------

    def _model_add(self, request: admin.ModelAddRequest) -> admin.AdminReply:
        return admin.ModelReply(
            model=self._store.add_model(request.model, Path(request.path), request.digest)
        )

    def _model_list(self, request: admin.ModelListRequest) -> admin.AdminReply:
        found = self._store.read(model_infos, after=request.after, limit=request.limit + 1)
        return admin.ModelListReply(models=tuple(found[: request.limit]), more=len(found) > request.limit)

    def _model_remove(self, request: admin.ModelRemoveRequest) -> admin.AdminReply:
        self._store.remove_model(request.model)
        return admin.Done()

    def _plan_create(self, request: admin.PlanCreateRequest) -> admin.AdminReply:
        if request.contest:
            from stageloom.planner.admin import tournament

            return tournament.create(self._store, self._tournament_runner(), self._clock, request)
        began_s = self._clock.monotonic_s()
        job = search_job(self._store, request)
        plan = self._searches.run(job, request.ticket)
        search_s = self._clock.monotonic_s() - began_s
        info = self._store.write(add_plan, request.plan or plan.digest[:12], plan, request.scheduler)
        if request.optimistic:  # for what it asks to be measured, not for what it finds
            return admin.PlanReply(plan=info, search_s=search_s)
        graphs = {model.artifact: self._store.graph(model.artifact) for model in plan.models}
        row = evaluation_of(
            plan,
            EvaluationVerdict.FOUND,
            scheduler=scheduler_key(request),
            how="operator",
            prediction=predict(plan, graphs, job.costs, ()),
            search_s=search_s,
        )
        record(self._store, request.device, scheduler_key(request), plan, graphs, [row])
        return admin.PlanReply(plan=info, search_s=search_s)

    def _tournament_runner(self) -> "TournamentRunner":
        """Made when first needed: it imports the twin and numpy, which most planners never use."""
        from stageloom.planner.tournament.runner import TournamentRunner

        with self._tournaments_lock:
            if self._tournaments is None:
                self._tournaments = TournamentRunner(self._pool, self._clock)
            return self._tournaments

    def _plan_cancel(self, request: admin.PlanCancelRequest) -> admin.AdminReply:
        if not self._tournament_runner().stop(request.ticket):
            self._searches.cancel(request.ticket)
        return admin.Done()

    def _plan_progress(self, request: admin.PlanProgressRequest) -> admin.AdminReply:
        return self._tournament_runner().progress(request.ticket)

    def _plan_show(self, request: admin.PlanShowRequest) -> admin.AdminReply:
        return admin.PlanReply(plan=self._store.read(plan_info, request.plan))

    def _plan_push(self, request: admin.PlanPushRequest) -> Future[admin.AdminReply]:
        pushed = self._store.submit_together(
            push_wanted,
            Push(
                device=request.device,
                plan=request.plan,
                decided_by="operator",
                autonomy=request.autonomy,
                activation=request.activation,
            ),
        )
        return _then(pushed, lambda desired: self._pushed(request.device, desired))

    def _policy_attach(self, request: admin.PolicyAttachRequest) -> admin.AdminReply:
        return self._pushed(request.device, self._store.write(attach_policy, request.device, request.policy))

    def _fleet_push(self, request: admin.FleetPushRequest) -> Future[admin.AdminReply]:
        done = self._store.submit(
            push_fleet,
            request.devices,
            request.plan,
            decided_by="operator",
            after=request.after,
            autonomy=request.autonomy,
            activation=request.activation,
        )
        return _then(
            done,
            lambda pushed: admin.FleetPushReply(
                pushed=tuple(self._one_of_many(device, result) for device, result in pushed[0]),
                more=pushed[1],
            ),
        )

    def _one_of_many(self, device: DeviceId, result: Desired | InputError) -> admin.Pushed:
        if isinstance(result, InputError):
            return admin.Pushed(device=device, cause=bounded(str(result)))
        reply = self._pushed(device, result)
        return admin.Pushed(
            device=device, epoch=reply.epoch, generation=reply.generation, autonomy=reply.autonomy
        )

    def _pushed(self, device: DeviceId, desired: Desired) -> admin.PlanPushReply:
        failpoint("planner.desired.after")
        self._fleet.desired_changed(device, desired)
        return admin.PlanPushReply(
            epoch=desired.epoch, generation=desired.generation, autonomy=desired.autonomy
        )

    def _history(self, request: admin.PlanHistoryRequest) -> admin.AdminReply:
        entries, following = self._store.read(
            generation_history, request.device, before=request.before, limit=request.limit
        )
        return admin.PlanHistoryReply(entries=tuple(entries), next_before=following)

    # -- the whole ------------------------------------------------------------------------------------------

    def _watch(self, request: admin.WatchRequest) -> admin.AdminReply:
        if request.device is None:
            infos = self._online(self._store.read(device_infos, limit=256))
        else:
            infos = self._online([self._store.read(device_info, request.device)])
        window_us = round(WATCH_WINDOW_S * 1e6)
        unread: dict[DeviceId, str] = {}
        rates: list[admin.ModelRate] = []
        for info in infos:
            if info.online:
                rows, unread[info.device] = self._store.read(
                    newest_telemetry, info.device, RATE_KINDS, window_us
                )
                rates += model_rates(info.device, rows)
        return admin.WatchReply(
            at_us=self._clock.wall_us(),
            devices=tuple(
                msgspec.structs.replace(info, unshown=info.unshown or unread.get(info.device, ""))
                for info in infos
            ),
            rates=tuple(rates[:1024]),
            telemetry=self._books(request.device),
        )

    def _status(self, request: admin.StatusRequest) -> admin.AdminReply:
        members = self._store.read(fleet_members)
        return admin.StatusReply(
            planner_version=__version__,
            epoch=self._store.read(planner_epoch),
            devices=len(members),
            online=len(self._fleet.online()),
            telemetry_backlog=self._fleet.backlog_rows(),
            telemetry=self._books(None),
            uptime_s=self._clock.monotonic_s() - self._started_s,
            quarantined=sum(bool(member.quarantine) for member in members),
            unreadable=self._store.read(unreadable_records),
            notices=tuple(one[:_LINE] for one in self._store.read(notices)),
        )

    def _trust_clock(self, request: admin.ClockTrustRequest) -> admin.AdminReply:
        self._store.write(trust_clock)
        return admin.Done()

    def _books(self, device: DeviceId | None) -> admin.TelemetryBooks:
        return admin.TelemetryBooks(**self._store.read(telemetry_balance, device)._asdict())


def _then(first: Future[T], do: Callable[[T], admin.AdminReply]) -> Future[admin.AdminReply]:
    """The future of `do` on what `first` results in; its error if it fails."""
    second: Future[admin.AdminReply] = Future()

    def go_on(done: Future[T]) -> None:
        try:
            second.set_result(do(done.result()))
        except Exception as error:
            second.set_exception(error)

    first.add_done_callback(go_on)
    return second
