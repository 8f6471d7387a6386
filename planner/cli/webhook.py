"""`stageloom webhook ...`: addresses that hear of alarms and verdicts."""

from typing import Annotated
from urllib.parse import urlsplit

import typer

from stageloom.planner.api import routes
from stageloom.planner.cli.connection import call, every
from stageloom.planner.cli.options import checked
from stageloom.planner.cli.output import emit, emit_table, progress, show
from stageloom.planner.schema import webhook as schema
from stageloom.shared.errors import InputError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Tell others of alarms and verdicts.")


@app.command()
def add(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where messages are posted to; https.")],
    events: Annotated[
        str, typer.Option(metavar="NAMES", help="Of alarm and verdict, joined by a comma.")
    ] = "alarm,verdict",
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Default: the URL's host.")] = None,
    private: Annotated[
        bool, typer.Option("--allow-private", help="It may be in a local network, and plain http.")
    ] = False,
) -> None:
    """Send messages to a URL, and show the secret that signs them once.

    \b
    stageloom webhook add https://ops.example/stageloom --events alarm,verdict
    stageloom webhook add http://10.0.0.7:8080/hook --allow-private --name pager
    """
    known = {event.value: event for event in schema.WebhookEvent}
    wrong = [word for word in events.split(",") if word not in known]
    if wrong:
        raise InputError(f"there is no event {wrong[0]!r}", remedy=f"choose among {', '.join(known)}")
    request = schema.WebhookAddRequest(
        webhook=name or _host(url),
        url=url,
        events=tuple(known[word] for word in events.split(",")),
        private=private,
    )
    reply = call(routes.WEBHOOK_ADD, checked(request, {"webhook": "--name"}))
    show(reply, lambda: emit(reply.secret))
    progress(f"webhook {reply.webhook}; the secret signs its messages and is not shown again")


def _host(url: str) -> str:
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    if not host:
        raise InputError(f"{url[:80]!r} is no URL with a host", remedy="write https://HOST/PATH")
    return host.replace(":", "-").strip("-")


@app.command("list")
def list_webhooks() -> None:
    """List the webhooks. How many messages wait, arrived and were dropped, and what went wrong last.

    \b
    stageloom webhook list
    """
    infos = every(routes.WEBHOOK_LIST, schema.WebhookListRequest())
    columns = ["webhook", "url", "events", "waiting", "arrived", "dropped", "problem"]
    rows = [
        (
            info.webhook,
            info.url,
            ",".join(event.value for event in info.events),
            info.waiting,
            info.arrived,
            info.dropped,
            info.problem,
        )
        for info in infos
    ]
    empty = "there is no webhook; add one with `stageloom webhook add`"
    show(infos, lambda: emit_table(columns, rows, empty=empty))


@app.command()
def remove(name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Forget a webhook, and what waits for it.

    \b
    stageloom webhook remove ops.example
    """
    call(routes.WEBHOOK_REMOVE, checked(schema.WebhookRemoveRequest(webhook=name)))
    show({"webhook": name, "removed": True}, lambda: None)
    progress(f"webhook {name} is gone")
