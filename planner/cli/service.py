"""Commands about the planner itself: run it, ask it, install it as a service, back it up, migrate it."""

import gc
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from msgspec import structs

from stageloom.planner.api import routes
from stageloom.planner.cli.connection import call, connected
from stageloom.planner.cli.options import checked
from stageloom.planner.cli.output import (
    books_line,
    emit,
    emit_json,
    emit_table,
    pair,
    presence,
    progress,
    show,
    tell_troubles,
)
from stageloom.planner.cli.settings import EPILOG, settings
from stageloom.planner.schema import service as schema
from stageloom.planner.schema.device import DeviceInfo
from stageloom.shared.errors import InputError, UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import DeviceState
from stageloom.shared.text import counted
from stageloom.shared.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Install the planner as a service, back it up, see its settings.",
)
config = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="See the planner's settings.")


def add_to(root: typer.Typer) -> None:
    """Put the daily ones of these commands at the top level, and the options before a command."""
    for command in (up, version):
        root.command()(command)
    for command in (status, watch):
        root.command(epilog=EPILOG)(command)
    root.callback()(_options)


def up(
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            metavar="DIR",
            help="The planner's data. Default: $STAGELOOM_HOME, else var/planner.",
        ),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="Four ports from PORT on; 0 takes free ones.")
    ] = None,
    api: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]", help="Serve the API to other machines, with TLS and access tokens."
        ),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST", help="The host that join tokens name.")
    ] = None,
    database_url: Annotated[str | None, typer.Option(metavar="URL", help="Default: SQLite.")] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Search in this Ray cluster, not in one of its own."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML with a table [planner].")
    ] = None,
) -> None:
    """Run the planner in the foreground until Ctrl-C or SIGTERM.

    With --json, one line on stdout says when it is ready and where it listens.

    \b
    stageloom up --listen 0.0.0.0:7420 --data-dir /var/lib/stageloom
    """
    from stageloom.planner.config import load_config
    from stageloom.planner.service import run_planner

    gc.enable()  # `main` has held it off while modules were imported

    given = {
        "data_dir": data_dir,
        "listen": listen,
        "advertise": advertise,
        "api": api,
        "database_url": database_url,
        "ray_address": ray_address,
    }
    run_planner(
        load_config(file=file, overrides=given),
        ready=emit_json if settings.json else None,
        progress=progress,
    )


def status() -> None:
    """Ask the running planner how it is. Exit code 4 if there is none.

    \b
    stageloom status
    stageloom status --json | jq .online
    """
    reply = call(routes.STATUS, schema.StatusRequest(), timeout_s=5.0)
    show(reply, lambda: _tell_status(reply))


def _tell_status(reply: schema.StatusReply) -> None:
    emit(
        f"planner {reply.planner_version} up for {reply.uptime_s:.0f} s, epoch {reply.epoch}: "
        f"{reply.online} of {reply.devices} devices online, {reply.telemetry_backlog} telemetry rows waiting"
    )
    emit(books_line(reply.telemetry))
    if reply.quarantined or reply.unreadable:
        emit(
            f"{counted(reply.quarantined, 'device')} quarantined, {counted(reply.unreadable, 'record')} "
            "unreadable; see `stageloom device list`"
        )
    for notice in reply.notices:
        emit(f"notice: {notice}")


@app.command("trust-clock")
def trust_clock(
    yes: Annotated[bool, typer.Option("--yes", help="Let telemetry in the future lose its times.")] = False,
) -> None:
    """Say that the planner's clock is right. What is too old by it may then be deleted, step by step.

    The planner holds back where its clock is days ahead of all that it knows, and goes by the later time
    where it is days behind; `stageloom status` says so. What was filed in the future is then of now: of
    telemetry only with --yes, as a clock that is behind by mistake could not give it its times back.

    \b
    stageloom planner trust-clock
    """
    call(routes.CLOCK_TRUST, schema.ClockTrustRequest(confirmed=yes))
    show({"trusted": True}, lambda: None)
    progress("the clock is trusted")


def watch(
    device: Annotated[str | None, typer.Argument(metavar="DEVICE")] = None,
    interval: Annotated[
        float, typer.Option(metavar="S", min=0.1, max=86_400.0, help="Seconds between two looks.")
    ] = 1.0,
    count: Annotated[
        int, typer.Option(metavar="N", min=0, help="Looks; 0: until Ctrl-C, a table in a pipe once.")
    ] = 0,
) -> None:
    """Follow devices live. Shows their state, and each model's throughput, latency and queue.

    In a terminal, those that are away, kept out or whose plan has failed come first, and what does not fit
    is left out.

    With --json one look; to follow, read the server-sent events at /v1/watch/events.

    \b
    stageloom watch
    stageloom watch shop-7 --json
    """
    request = checked(schema.WatchRequest(device=DeviceId(device) if device is not None else None))
    with connected() as caller:

        def look() -> schema.WatchReply:
            return caller.call(routes.WATCH, request)

        if settings.json:
            emit_json(look())
        elif sys.stdout.isatty():
            _live(look, count, interval)
        else:
            for _ in _looks(count or 1, interval):
                reply = look()
                emit_table(_COLUMNS, _rows(reply), empty="no device is enrolled")
                tell_troubles(reply.devices)
                if reply.cut:
                    progress(_CUT)


@app.command()
def migrate(
    database_url: Annotated[
        str,
        typer.Option(
            "--database-url", metavar="URL", help="Default: what the planner of the data directory uses."
        ),
    ] = "",
) -> None:
    """Bring the database to this version's tables. `up` does it, too; no planner may run meanwhile.

    \b
    stageloom planner backup before.tar && stageloom planner migrate
    """
    from stageloom.planner.store.used_database import kept_url, require_own

    folder = settings.folder
    if database_url:
        require_own(folder, database_url)
    before, after = _migrated(folder, database_url or kept_url(folder))
    show({"before": before, "after": after}, lambda: None)
    progress(f"schema {before or 'none'} -> {after}" if before != after else f"schema {after} is current")


def _migrated(folder: Path, url: str) -> tuple[str | None, str]:
    """(schema before, after), under all locks that a planner takes: it must not run on other tables than it
    knows."""
    from stageloom.planner.lock import lock_data_dir, lock_sqlite
    from stageloom.planner.store.database import Database, sqlite_url
    from stageloom.planner.store.schema import migrate as migrate_database
    from stageloom.planner.store.used_database import DATABASE_FILE, sqlite_file

    with ExitStack() as held:
        held.enter_context(lock_data_dir(folder))
        if (file := sqlite_file(folder, url)) is not None:
            held.enter_context(lock_sqlite(file, folder))
        database = Database(url or sqlite_url(folder / DATABASE_FILE))
        held.callback(database.close)
        if not held.enter_context(database.claim()):
            raise InputError("a planner already runs on this database", remedy="stop that one")
        return migrate_database(database)


@config.command("show")
def show_config() -> None:
    """Show the settings in force, and what each is for. `*` marks those that somebody set.

    A setting is given as an option of `stageloom up`, as STAGELOOM_PLANNER_NAME in the environment, or in a
    TOML file with a table [planner]; each goes before the next.

    \b
    stageloom config show
    stageloom config show --json | jq -r '.settings[] | select(.default | not) | .name'
    """
    reply = call(routes.SETTINGS, schema.SettingsRequest())
    rows = [
        (setting.name, "" if setting.default else "*", setting.value, setting.unit, setting.about)
        for setting in reply.settings
    ]
    columns = ["setting", "set", "value", "unit", "what it is for"]
    show(reply, lambda: emit_table(columns, rows, empty="there is no setting"))


def version() -> None:
    """Print the version.

    \b
    stageloom version
    """
    show({"version": __version__}, lambda: emit(__version__))


def _version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before a command; the help text is the app's."""


_CUT = "these are not all devices and models; name a device, or see `stageloom device list`"
_COLUMNS = ["device", "online", "state", "generation", "model", "tasks/s", "p50 ms", "p99 ms", "queued"]


def _rows(reply: schema.WatchReply) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for info in reply.devices:
        state = info.report.state.value if info.report.state else None
        head = (info.device, presence(info), state, _reported(info))
        rates = [rate for rate in reply.rates if rate.device == info.device]
        rows += [
            # Without a task there is no latency: a false 0 would look like a very good one.
            (*head, r.model, r.throughput_per_s, r.latency_p50_ms or None, r.latency_p99_ms or None, r.queued)
            for r in rates
        ] or [(*head, None, None, None, None, None)]
    return rows


def _reported(info: DeviceInfo) -> str:
    return pair(info.report.epoch, info.report.generation)


def _looks(count: int, interval_s: float) -> Iterator[int]:
    index = 0
    while True:
        yield index
        index += 1
        if index == count:
            return
        time.sleep(interval_s)


def _live(look: Callable[[], schema.WatchReply], count: int, interval_s: float) -> None:
    from rich.live import Live
    from rich.text import Text

    shown: Any = None
    with Live(auto_refresh=False) as live:
        for _ in _looks(count, interval_s):
            try:
                shown = _screen(look(), live.console.height)
            except UnavailableError as error:
                if shown is None:
                    raise
                shown = Text(f"asking again: {error}")  # a planner that is started anew is found again
            live.update(shown, refresh=True)


def _screen(reply: schema.WatchReply, height: int) -> Any:
    """A table of at most so many lines, titles and all; devices that somebody should look at come first."""
    from stageloom.planner.cli.output import rich_table

    devices = tuple(sorted(reply.devices, key=lambda info: not _troubled(info)))
    rows = _rows(structs.replace(reply, devices=devices))
    titles = [books_line(reply.telemetry), *([_CUT] if reply.cut else [])]
    room = max(height - len(titles) - _HEAD_LINES, 1)
    if len(rows) > room:
        room = max(room - 1, 1)
        titles.append(f"{len(rows) - room} more lines do not fit: name a device, or use a pipe")
    return rich_table(_COLUMNS, rows[:room], "\n".join(titles))


_HEAD_LINES: Final = 3  # of columns, a line under them, and the prompt's that follows


def _troubled(info: DeviceInfo) -> bool:
    """It is away or kept out, but not revoked; its plan has failed; or not all of it can be read."""
    if info.revoked:
        return False
    failed = info.report.state in (DeviceState.REJECTED, DeviceState.ROLLED_BACK)
    return not info.online or bool(info.quarantine or info.unshown) or failed


_NAME = "stageloom-planner"


@app.command()
def install(
    data_dir: Annotated[Path, typer.Option("--data-dir", metavar="DIR", help="The planner's data.")] = Path(
        "/var/lib/stageloom"
    ),
    listen: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="Four ports from PORT on. Default: loopback.")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST", help="The host that join tokens name.")
    ] = None,
    user: Annotated[
        str, typer.Option(metavar="NAME", help="Account that it runs as; made if missing.")
    ] = "stageloom-planner",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the unit and change nothing.")] = False,
) -> None:
    """Install the planner as a systemd service of this machine. Needs root.

    Writes /etc/systemd/system/stageloom-planner.service; running it again brings the unit up to date. Other
    settings go into /etc/stageloom/planner.env, as STAGELOOM_PLANNER_NAME=value.

    \b
    sudo /opt/stageloom/bin/stageloom planner install --listen 0.0.0.0:7420 --advertise planner.example
    """
    from stageloom.planner.config import load_config
    from stageloom.shared.systemd import install as systemd
    from stageloom.shared.systemd.unit import quoted

    given = {"listen": listen, "advertise": advertise}
    load_config(environment={}, overrides={"data_dir": data_dir, **given})  # a wrong one is refused here
    options = [word for name, value in given.items() if value is not None for word in (f"--{name}", value)]
    service = systemd.Service(
        name=_NAME,
        package="stageloom.planner",
        program="stageloom",
        arguments=("up", "--data-dir", str(data_dir), *options),
        home=data_dir,
        user=user,
        # What is compiled is kept there; homes of people are out of a service's reach.
        settings={"Environment": (quoted(f"XDG_CACHE_HOME={data_dir}/.cache"),)},
    )
    if dry_run:
        unit = systemd.unit_text(service)
        show({"service": _NAME, "unit": unit}, lambda: emit(unit))
        return
    systemd.install(service, progress)
    program = systemd.installed_program("stageloom")
    progress(f"next: sudo systemctl enable --now {_NAME}")
    progress("then: " + shlex.join(["sudo", "-u", user, program, "status", "--data-dir", str(data_dir)]))
    show({"service": _NAME, "installed": True}, lambda: None)


@app.command()
def uninstall() -> None:
    """Stop the service and remove its unit. Needs root; data directory and account stay.

    \b
    sudo stageloom planner uninstall
    """
    from stageloom.shared.systemd.install import uninstall as uninstall_unit

    removed = uninstall_unit(_NAME, progress)
    show({"service": _NAME, "removed": removed}, lambda: None)
    if removed:
        progress("data and account stay; remove them with `rm -r` and `userdel` if nothing of them is needed")


@app.command()
def backup(file: Annotated[Path, typer.Argument(metavar="FILE", help="A tar file to make.")]) -> None:
    """Copy database, artifacts and keys into one tar file. It is of one moment; the planner may run.

    It holds the planner's secret key: keep it as safe as the data directory. To restore, unpack it into an
    empty directory and start a planner there. For a database on a server use pg_dump. Where no planner runs,
    an older version's database is copied as it is, before its migration.

    \b
    stageloom planner backup /backup/stageloom-$(date +%F).tar
    mkdir new && tar -xf FILE -C new && stageloom up --data-dir new
    """
    with connected(live=False, or_older=True) as caller:
        size_bytes = caller.download(routes.BACKUP, schema.BackupRequest(), file)
    show({"file": str(file), "size_bytes": size_bytes}, lambda: None)
    progress(f"{file}: {size_bytes / 1e6:.1f} MB")
