"""The planner itself, devices as they run, who may use the API, jobs."""

import secrets
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from stageloom.planner.api import routes
from stageloom.planner.api.access import LOCAL, SECRET_BYTES, bearer_digest, split_token, token_text
from stageloom.planner.api.certificate import expiry_notices
from stageloom.planner.api.context import ApiCall, ApiContext, RunningPlanner, handles
from stageloom.planner.api.handlers.devices import now
from stageloom.planner.api.handlers.plans import position
from stageloom.planner.config import SETTINGS, PlannerConfig
from stageloom.planner.schema import access, job, service
from stageloom.planner.schema.base import PAGE_MAX, Done, Page
from stageloom.planner.schema.job import JobInfo, JobState
from stageloom.planner.schema.replan import RegimeInfo, RegimeListRequest, ReplanInfo, ReplanListRequest
from stageloom.planner.store.access import (
    access_infos,
    add_access,
    audit_entries,
    held_tokens,
    revoke_access,
)
from stageloom.planner.store.backup import backup
from stageloom.planner.store.devices import device_info, device_infos, planner_epoch
from stageloom.planner.store.events import unreadable_records
from stageloom.planner.store.link import fleet_members
from stageloom.planner.store.regime_view import regime_infos
from stageloom.planner.store.replans import replan_infos
from stageloom.planner.store.telemetry import newest_telemetry, telemetry_balance
from stageloom.planner.store.trusted_time import notices, trust_clock
from stageloom.planner.store.used_database import without_password
from stageloom.planner.telemetry import RATE_KINDS, model_rates
from stageloom.shared.errors import InputError
from stageloom.shared.ids import DeviceId
from stageloom.shared.version import __version__

KEY_FILES: Final = ("planner.keys", "api.pem")  # what devices and access tokens know the planner by
WATCH_WINDOW_S: Final = 5.0
_HOLDING: Final = threading.Lock()
_LINE: Final = 512  # characters of a notice
_LOOK_S: Final = 0.1  # between two looks at a job that somebody follows


@handles(routes.STATUS)
def status(api: ApiContext, request: service.StatusRequest, call: ApiCall) -> service.StatusReply:
    members, fleet = api.store.read(fleet_members), api.live.fleet
    return service.StatusReply(
        planner_version=__version__,
        epoch=api.store.read(planner_epoch),
        devices=len(members),
        online=len(fleet.online()),
        telemetry_backlog=fleet.backlog_rows(),
        telemetry=_books(api, None),
        uptime_s=api.clock.monotonic_s() - api.live.started_s,
        quarantined=sum(bool(one.quarantine) and not one.revoked for one in members),
        unreadable=api.store.read(unreadable_records),
        notices=tuple(
            notice[:_LINE]
            for notice in [*_store_notices(api), *api.store.read(notices), *_certificate_notices(api)]
        ),
    )


def _store_notices(api: ApiContext) -> list[str]:
    """About a database that takes nothing now, such as one on a full disk."""
    _, batches = api.live.fleet.telemetry_failures()
    text = f"the last batches of telemetry ({batches}) could not be stored: see the planner's log"
    return [text] if batches else []


def _certificate_notices(api: ApiContext) -> list[str]:
    """About a certificate that was given to the planner; its own does not expire."""
    config = api.config
    if not config.api or not config.api_certificate:
        return []
    return expiry_notices(Path(config.api_certificate), api.clock.wall_us())


def _books(api: ApiContext, device: DeviceId | None) -> service.TelemetryBooks:
    return service.TelemetryBooks(**api.reader.read(telemetry_balance, device)._asdict())


@handles(routes.CLOCK_TRUST)
def clock_trust(api: ApiContext, request: service.ClockTrustRequest, call: ApiCall) -> Done:
    api.store.write(trust_clock, confirmed=request.confirmed)
    return Done()


@handles(routes.WATCH)
def watch(api: ApiContext, request: service.WatchRequest, call: ApiCall) -> service.WatchReply:
    return _watched(api, request.device)


@handles(routes.WATCH_EVENTS)
def watch_events(
    api: ApiContext, request: service.WatchEventsRequest, call: ApiCall
) -> Iterator[tuple[str, service.WatchReply] | float]:
    def looks() -> Iterator[tuple[str, service.WatchReply] | float]:
        look = first
        while True:
            yield "look", look
            yield request.interval_s
            look = _watched(api, request.device)

    first = _watched(api, request.device)
    return looks()


def _watched(api: ApiContext, device: DeviceId | None) -> service.WatchReply:
    if device is None:
        infos = now(api, api.store.read(device_infos, limit=PAGE_MAX + 1))
    else:
        infos = now(api, [api.store.read(device_info, device)])
    window_us = round(WATCH_WINDOW_S * 1e6)
    unread: dict[DeviceId, str] = {}
    rates: list[service.ModelRate] = []
    for info in infos[:PAGE_MAX]:
        if info.online:
            rows, unread[info.device] = api.store.read(newest_telemetry, info.device, RATE_KINDS, window_us)
            rates += model_rates(info.device, rows)
    return service.WatchReply(
        at_us=api.clock.wall_us(),
        devices=tuple(
            msgspec.structs.replace(info, unshown=info.unshown or unread.get(info.device, ""))
            for info in infos[:PAGE_MAX]
        ),
        rates=tuple(rates[: service.MAX_RATES]),
        telemetry=_books(api, device),
        cut=len(infos) > PAGE_MAX or len(rates) > service.MAX_RATES,
    )


@handles(routes.BACKUP)
def make_backup(api: ApiContext, request: service.BackupRequest, call: ApiCall) -> Path:
    with tempfile.TemporaryDirectory(prefix=".backup-", dir=api.config.data_dir) as folder:
        path = Path(folder, "planner.tar")
        backup(api.config.data_dir, api.config.database_url, path, KEY_FILES)
        return path.rename(Path(folder).with_suffix(".tar"))


@handles(routes.SETTINGS)
def settings(api: ApiContext, request: service.SettingsRequest, call: ApiCall) -> service.SettingsReply:
    plain = PlannerConfig(data_dir=api.config.data_dir)
    return service.SettingsReply(
        settings=tuple(
            service.SettingInfo(
                name=name,
                value=_shown(name, getattr(api.config, name)),
                unit=about.unit,
                about=about.reason,
                default=getattr(api.config, name) == getattr(plain, name) and name != "data_dir",
            )
            for name, about in SETTINGS.items()
        )
    )


def _shown(name: str, value: object) -> str:
    """A setting as text; a database's password stays where it is."""
    text = str(value)
    return (without_password(text) if name == "database_url" and text else text)[:_LINE]


@handles(routes.REPLAN_LIST)
def replan_list(api: ApiContext, request: ReplanListRequest, call: ApiCall) -> Page[ReplanInfo]:
    before = position(request.after)
    infos = api.reader.read(replan_infos, request.device, before=before, limit=request.limit + 1)
    shown = tuple(infos[: request.limit])
    return Page(items=shown, next=str(shown[-1].replan) if len(infos) > request.limit else "")


@handles(routes.REGIME_LIST)
def regime_list(api: ApiContext, request: RegimeListRequest, call: ApiCall) -> Page[RegimeInfo]:
    return Page(items=tuple(api.reader.read(regime_infos, request.device)))


# -- who may use the API ----------------------------------------------------------------------------------


@handles(routes.ACCESS_LIST)
def access_list(api: ApiContext, request: access.AccessListRequest, call: ApiCall) -> Page[access.AccessInfo]:
    infos = api.reader.read(access_infos, after=request.after, limit=request.limit + 1)
    shown = tuple(infos[: request.limit])
    return Page(items=shown, next=shown[-1].name if len(infos) > request.limit else "")


@handles(routes.ACCESS_CREATE)
def access_create(
    api: ApiContext, request: access.AccessCreateRequest, call: ApiCall
) -> access.AccessCreateReply:
    if request.name == LOCAL:
        raise InputError(f"{LOCAL!r} is who asks where the planner runs", remedy="choose another name")
    text = token_text(secrets.token_bytes(SECRET_BYTES), api.live.certificate)
    api.store.write(add_access, request.name, request.role, bearer_digest(split_token(text)[0]))
    hold_tokens(api.live)
    return access.AccessCreateReply(name=request.name, role=request.role, token=text)


@handles(routes.ACCESS_REVOKE)
def access_revoke(api: ApiContext, request: access.AccessRevokeRequest, call: ApiCall) -> Done:
    api.store.write(revoke_access, request.name)
    hold_tokens(api.live)
    return Done()


def hold_tokens(planner: RunningPlanner) -> None:
    """From now on the tokens of the store hold."""
    with _HOLDING:  # read before and held after another's, a list would have a revoked token hold again
        planner.tokens.hold(planner.store.read(held_tokens))


@handles(routes.AUDIT_LIST)
def audit_list(api: ApiContext, request: access.AuditListRequest, call: ApiCall) -> Page[access.AuditEntry]:
    entries, following = api.reader.read(audit_entries, before=position(request.after), limit=request.limit)
    return Page(items=tuple(entries), next=str(following) if following else "")


# -- jobs -------------------------------------------------------------------------------------------------


@handles(routes.JOB_LIST)
def job_list(api: ApiContext, request: job.JobListRequest, call: ApiCall) -> Page[JobInfo]:
    return Page(items=tuple(msgspec.structs.replace(info, result=None) for info in api.jobs.infos()))


@handles(routes.JOB_SHOW)
def job_show(api: ApiContext, request: job.JobShowRequest, call: ApiCall) -> JobInfo:
    return api.jobs.get(request.job).info


@handles(routes.JOB_CANCEL)
def job_cancel(api: ApiContext, request: job.JobCancelRequest, call: ApiCall) -> JobInfo:
    wanted = api.jobs.get(request.job)
    if wanted.info.state is JobState.RUNNING:
        wanted.cancel()
    return wanted.info


@handles(routes.JOB_EVENTS)
def job_events(
    api: ApiContext, request: job.JobEventsRequest, call: ApiCall
) -> Iterator[tuple[str, JobInfo] | float]:
    followed = api.jobs.get(request.job)

    def events() -> Iterator[tuple[str, JobInfo] | float]:
        version = -1
        while True:
            if followed.version == version:
                yield _LOOK_S
                continue
            version, info = followed.version, followed.info
            yield ("progress" if info.state is JobState.RUNNING else "end"), info
            if info.state is not JobState.RUNNING:
                return

    return events()
