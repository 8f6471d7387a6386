"""`stageloom access`, `audit` and `job`: who may use the API, what they did, what runs for them."""

from pathlib import Path
from typing import Annotated

import typer

from stageloom.planner.api import routes
from stageloom.planner.api.client import new_file
from stageloom.planner.cli.connection import call, every, first
from stageloom.planner.cli.options import MOST_ROWS, checked
from stageloom.planner.cli.output import emit, emit_table, progress, show, when
from stageloom.planner.schema import access as schema
from stageloom.planner.schema import job as jobs

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Tokens for the planner's API.")
audit = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="See what clients of the API changed.")
job = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="See and end what runs in the planner.")


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who gets it; the audit log names it.")],
    role: Annotated[
        schema.Role,
        typer.Option(
            help="viewer reads, operator plans and measures, admin decides who may join and use the API."
        ),
    ] = schema.Role.VIEWER,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", help="Write it there, readable to you alone. Default: stdout."
        ),
    ] = None,
) -> None:
    """Make a token for a client elsewhere, and show it once. It goes with `--planner URL --token-file FILE`.

    The planner serves other machines when it runs with --api HOST:PORT. Where it has made its own
    certificate, the token names it, and the client accepts no other.

    \b
    stageloom access create ci --role operator --output ci.token
    stageloom device list --planner https://planner:7424 --token-file ci.token
    """
    request = checked(schema.AccessCreateRequest(name=name, role=role))
    if output is not None:
        with new_file(output) as write:  # first: a token that nobody has could only be revoked
            reply = call(routes.ACCESS_CREATE, request)
            write(f"{reply.token}\n".encode())
        show({"name": reply.name, "role": reply.role, "file": str(output)}, lambda: None)
        progress(f"the token of {name} ({role.value}) is in {output}")
        return
    reply = call(routes.ACCESS_CREATE, request)
    show(reply, lambda: emit(reply.token))
    progress(f"the token of {name} ({role.value}); it is not shown again")


@app.command("list")
def list_tokens() -> None:
    """List the tokens.

    \b
    stageloom access list
    """
    infos = every(routes.ACCESS_LIST, schema.AccessListRequest())
    columns = ["name", "role", "created (UTC)", "revoked (UTC)"]
    rows = [
        (info.name, info.role.value, when(info.created_at_us), when(info.revoked_at_us)) for info in infos
    ]
    empty = "there is no access token; make one with `stageloom access create`"
    show(infos, lambda: emit_table(columns, rows, empty=empty))


@app.command()
def revoke(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Refuse a token from its next request on.

    \b
    stageloom access revoke ci
    """
    call(routes.ACCESS_REVOKE, checked(schema.AccessRevokeRequest(name=name)))
    show({"name": name, "revoked": True}, lambda: None)
    progress(f"the token of {name} is refused from now on")


@audit.command("list")
def list_audit(
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST_ROWS, help="Newest entries to show.")
    ] = 50,
) -> None:
    """List what clients changed, newest first. What was refused to who asked is there, too.

    \b
    stageloom audit list
    stageloom audit list --json | jq '.[] | select(.status >= 400)'
    """
    entries = first(routes.AUDIT_LIST, schema.AuditListRequest(), limit)
    columns = ["at (UTC)", "who", "role", "from", "operation", "of", "status"]
    rows = [
        (when(entry.at_us), entry.who, entry.role, entry.source, entry.operation, entry.target, entry.status)
        for entry in entries
    ]
    show(entries, lambda: emit_table(columns, rows, empty="nobody changed anything yet"))


@job.command("list")
def list_jobs() -> None:
    """List searches, measurements and trainings, newest first. Those since the planner started.

    \b
    stageloom job list
    """
    infos = every(routes.JOB_LIST, jobs.JobListRequest())
    columns = ["job", "operation", "state", "who", "began (UTC)", "progress"]
    rows = [
        (info.job, info.operation, info.state.value, info.who, when(info.began_at_us), info.progress.text)
        for info in infos
    ]
    show(infos, lambda: emit_table(columns, rows, empty="no job ran since the planner started"))


@job.command("show")
def show_job(name: Annotated[str, typer.Argument(metavar="JOB")]) -> None:
    """Show one job, with its result once there is one.

    \b
    stageloom job show 3f2a9c01d4e5b6a7 --json
    """
    info = call(routes.JOB_SHOW, checked(jobs.JobShowRequest(job=name)))
    why = f": {info.problem.detail}" if info.problem is not None else ""
    line = f"{info.operation} of {info.who}, {info.state.value}{why} {info.progress.text}".rstrip()
    show(info, lambda: emit(line))


@job.command()
def cancel(name: Annotated[str, typer.Argument(metavar="JOB")]) -> None:
    """End a job. A tournament and a training end with their best so far.

    \b
    stageloom job cancel 3f2a9c01d4e5b6a7
    """
    info = call(routes.JOB_CANCEL, checked(jobs.JobCancelRequest(job=name)))
    show(info, lambda: None)
    progress(f"job {name} is told to end")
