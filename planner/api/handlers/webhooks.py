"""Webhooks: added, listed, removed."""

import secrets

from stageloom.planner.api import routes
from stageloom.planner.api.context import ApiCall, ApiContext, handles
from stageloom.planner.schema import webhook as schema
from stageloom.planner.schema.base import Done, Page
from stageloom.planner.store.webhooks import add_webhook, remove_webhook, webhook_infos
from stageloom.planner.webhooks.address import checked_url
from stageloom.planner.webhooks.signature import SECRET_BYTES, secret_text


@handles(routes.WEBHOOK_ADD)
def webhook_add(api: ApiContext, request: schema.WebhookAddRequest, call: ApiCall) -> schema.WebhookAddReply:
    checked_url(request.url, private=request.private)
    secret = secret_text(secrets.token_bytes(SECRET_BYTES))
    events = tuple(dict.fromkeys(request.events))
    api.store.write(add_webhook, request.webhook, request.url, events, secret, private=request.private)
    return schema.WebhookAddReply(webhook=request.webhook, secret=secret)


@handles(routes.WEBHOOK_LIST)
def webhook_list(
    api: ApiContext, request: schema.WebhookListRequest, call: ApiCall
) -> Page[schema.WebhookInfo]:
    return Page(items=tuple(api.reader.read(webhook_infos)))


@handles(routes.WEBHOOK_REMOVE)
def webhook_remove(api: ApiContext, request: schema.WebhookRemoveRequest, call: ApiCall) -> Done:
    api.store.write(remove_webhook, request.webhook)
    return Done()
