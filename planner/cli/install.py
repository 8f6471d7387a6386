"""Commands that make this machine run the planner under systemd: `install`, `uninstall`."""

from pathlib import Path
from typing import Annotated

import typer

from stageloom.planner.cli.output import emit, progress

_NAME = "stageloom-planner"


def add_to(app: typer.Typer) -> None:
    """Put these commands at the top level."""
    for command in (install, uninstall):
        app.command()(command)


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
    sudo /opt/stageloom/bin/stageloom install --listen 0.0.0.0:7420 --advertise planner.example
    """
    from stageloom.planner.config import load_config
    from stageloom.shared.systemd import install as systemd
    from stageloom.shared.systemd.unit import command_line

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
    )
    if dry_run:
        emit(systemd.unit_text(service).rstrip("\n"))
        return
    systemd.install(service, progress)
    status = command_line([systemd.installed_program("stageloom"), "status", "--data-dir", str(data_dir)])
    progress(f"next: sudo systemctl enable --now {_NAME}")
    progress(f"then: sudo -u {user} {status}")


def uninstall() -> None:
    """Stop the service and remove its unit. Needs root; data directory and account stay.

    \b
    sudo stageloom uninstall
    """
    from stageloom.shared.systemd.install import uninstall as uninstall_unit

    if uninstall_unit(_NAME, progress):
        progress("data and account stay; remove them with `rm -r` and `userdel` if nothing of them is needed")
