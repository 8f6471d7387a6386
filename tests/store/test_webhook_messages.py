"""Webhooks in the store: messages wait in order, are tried later, and are bounded; on both databases."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest

from stageloom.planner.schema.webhook import WebhookEvent, WebhookInfo
from stageloom.planner.store import webhooks
from stageloom.planner.store.store import Store
from stageloom.planner.store.tables import WebhookMessageRow
from stageloom.planner.store.webhooks import (
    GIVE_UP_US,
    MOST_WEBHOOKS,
    add_webhook,
    message_arrived,
    message_failed,
    remove_webhook,
    retry_us,
    tell_webhooks,
    waiting_messages,
    webhook_infos,
)
from stageloom.planner.webhooks.sender import NotDelivered
from stageloom.planner.webhooks.service import WebhookService
from stageloom.planner.webhooks.signature import secret_text
from stageloom.shared.clock import ManualClock
from stageloom.shared.errors import InputError, NotFoundError

SECRET = secret_text(bytes(range(32)))
ALARM, VERDICT = WebhookEvent


def hook(store: Store, name: str, url: str = "https://example.com/", *events: WebhookEvent) -> None:
    store.write(add_webhook, name, url, events or (ALARM,), SECRET, private=True)


def tell(store: Store, **data: Any) -> None:
    store.write(tell_webhooks, ALARM, "nano", data)


def delivered(service: WebhookService, pool: ThreadPoolExecutor) -> int:
    return sum(ends.result() for ends in service.deliver(pool))


def info(store: Store, name: str = "ops") -> WebhookInfo:
    return next(one for one in store.read(webhook_infos) if one.webhook == name)


def test_messages_wait_in_order_for_those_that_listen_and_what_failed_is_tried_later(
    store: Store, clock: ManualClock
) -> None:
    hook(store, "ops")
    hook(store, "verdicts", "https://example.org/", VERDICT)
    tell(store, number=1)
    tell(store, number=2)
    (first,) = store.read(waiting_messages, clock.wall_us())
    assert (first.webhook, json.loads(first.body)["data"]) == ("ops", {"device": "nano", "number": 1})
    tries = 0
    for failures in range(1, 12):
        store.write(message_failed, first, "refused", gone=False, at_us=clock.wall_us())
        assert store.read(waiting_messages, clock.wall_us() + retry_us(failures) - 1) == []
        clock.advance(retry_us(failures) / 1e6)
        (again,) = store.read(waiting_messages, clock.wall_us())
        assert again == first, "the same message, under the same identifier"
        tries += 1
    assert [retry_us(one) // 1_000_000 for one in (1, 2, 3, 7, 8, 99)] == [5, 15, 45, 3600, 3600, 3600]
    assert (info(store).failures, info(store).waiting, info(store).problem) == (11, 2, "refused")
    store.write(message_failed, first, "refused", gone=False, at_us=clock.wall_us())
    assert store.read(waiting_messages, clock.wall_us() - 365 * GIVE_UP_US) == [first], "a clock set back"


@pytest.mark.parametrize("ends", ["arrived", "failed", "gone"])
def test_what_becomes_of_a_message_says_nothing_of_a_webhook_that_was_added_anew_under_the_name(
    store: Store, clock: ManualClock, ends: str
) -> None:
    """SQLite gives the number of a message that is gone to the next one."""
    hook(store, "ops")
    tell(store, number=1)
    (sent,) = store.read(waiting_messages, clock.wall_us())
    store.write(remove_webhook, "ops")
    hook(store, "ops")
    tell(store, number=2)
    if ends == "arrived":
        store.write(message_arrived, sent)
    else:
        store.write(message_failed, sent, "410", gone=ends == "gone", at_us=clock.wall_us())
    (waits,) = store.read(waiting_messages, clock.wall_us())
    assert json.loads(waits.body)["data"]["number"] == 2
    assert (info(store).arrived, info(store).failures, info(store).events) == (0, 0, (ALARM,))


@pytest.mark.promise("webhooks-signed-and-kept")
def test_what_nobody_takes_is_bounded_in_number_and_age(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "MOST_WAITING", 20)
    hook(store, "ops")

    def flood(session: Any) -> None:
        for number in range(27):
            tell_webhooks(session, ALARM, "nano", {"number": number})

    store.write(flood)
    assert (info(store).waiting, info(store).dropped) == (20, 7)
    (first,) = store.read(waiting_messages, clock.wall_us())
    assert json.loads(first.body)["data"]["number"] == 0, "it may be under way"
    clock.advance(GIVE_UP_US / 1e6 + 1)
    tell(store, number="late")
    store.write(message_failed, first, "refused", gone=False, at_us=clock.wall_us())
    assert (info(store).waiting, info(store).dropped) == (1, 27), "all but the late one"
    tell(store, number="new")
    clock.advance(3600)
    (waits,) = store.read(waiting_messages, clock.wall_us())
    store.write(message_failed, waits, "answered 410", gone=True, at_us=clock.wall_us())
    tell(store, number="nobody hears")
    assert info(store).events == () and info(store).waiting == 0


def test_one_devices_storm_drops_its_own_oldest_messages_and_none_of_another(
    store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "MOST_WAITING", 20)
    hook(store, "ops")

    def waiting(session: Any) -> list[tuple[str, int]]:
        rows = session.query(WebhookMessageRow).order_by(WebhookMessageRow.number)
        return [(row.device, json.loads(row.body)["data"]["number"]) for row in rows]

    def told(session: Any, device: str, numbers: range) -> None:
        for number in numbers:
            tell_webhooks(session, ALARM, device, {"number": number})

    store.write(told, "storm", range(50))
    store.write(told, "quiet", range(3))
    store.write(told, "storm", range(50, 90))
    kept = store.read(waiting)
    assert [number for device, number in kept if device == "quiet"] == [0, 1, 2]
    assert [number for device, number in kept if device == "storm"] == [0, *range(74, 90)]
    for device in ("second", "third", "fourth"):
        store.write(told, device, range(90))
    shares = Counter(device for device, _ in store.read(waiting))
    assert shares["quiet"] == 3 and min(shares.values()) >= 3 and sum(shares.values()) == 20
    assert info(store).dropped == 50 + 3 + 40 + 3 * 90 - 20


def test_there_are_so_many_webhooks_and_each_name_once(store: Store) -> None:
    for number in range(MOST_WEBHOOKS):
        hook(store, f"hook{number}")
    with pytest.raises(InputError, match=f"there are {MOST_WEBHOOKS} webhooks"):
        hook(store, "one-more")
    with pytest.raises(InputError, match="already"):
        hook(store, "hook0")
    tell(store, number=1)
    store.write(remove_webhook, "hook0")
    assert len(store.read(waiting_messages, 0)) == MOST_WEBHOOKS - 1
    with pytest.raises(NotFoundError):
        store.write(remove_webhook, "hook0")


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.mark.promise("webhooks-signed-and-kept")
def test_a_dead_receiver_holds_up_no_other_and_a_restart_loses_nothing(
    store: Store, clock: ManualClock
) -> None:
    hook(store, "dead", "https://dead.example/")
    hook(store, "ops", "https://ops.example/")
    for number in range(3):
        tell(store, number=number)
    arrived: list[tuple[str, int]] = []

    def played(url: str, headers: dict[str, str], body: bytes, *, private: bool) -> None:
        if "dead" in url:
            raise NotDelivered("no connection: refused")
        arrived.append((headers["webhook-id"], json.loads(body)["data"]["number"]))

    with threads() as pool:
        assert [delivered(WebhookService(store, clock, played), pool) for _ in range(4)] == [1, 1, 1, 0]
    assert [number for _, number in arrived] == [0, 1, 2] and len({message for message, _ in arrived}) == 3
    assert (info(store, "dead").waiting, info(store, "dead").failures) == (3, 1)
    clock.advance(5)
    later = WebhookService(store, clock, lambda url, headers, body, *, private: None)  # after a restart
    with threads() as pool:
        assert [delivered(later, pool) for _ in range(4)] == [1, 1, 1, 0]
    assert (info(store, "dead").waiting, info(store, "dead").failures, info(store, "dead").problem) == (
        0,
        0,
        "",
    )


def test_nothing_waits_for_a_receiver_that_takes_its_time(store: Store, clock: ManualClock) -> None:
    """As many slow ones as may be, but one; the last gets all its messages meanwhile, without a pause."""
    slow = [f"slow{number}" for number in range(MOST_WEBHOOKS - 1)]
    for name in slow:
        hook(store, name, f"https://{name}.example/")
    hook(store, "ops", "https://ops.example/")
    for number in range(3):
        tell(store, number=number)
    answer, third = threading.Event(), threading.Event()
    taken: list[tuple[str, int]] = []

    def played(url: str, headers: dict[str, str], body: bytes, *, private: bool) -> None:
        number = json.loads(body)["data"]["number"]
        taken.append((url, number))
        if "slow" in url:
            answer.wait(60)
        elif number == 2:
            third.set()

    with closing(WebhookService(store, clock, played, interval_s=3600)) as service:
        service.start()
        assert third.wait(30)
        told = Counter(url for url, _ in taken)
        assert [number for url, number in taken if "ops" in url] == [0, 1, 2]
        assert all(told[f"https://{name}.example/"] <= 1 for name in slow), "one at a time to each"
        answer.set()


def test_whatever_goes_wrong_with_a_message_is_told_and_tried_later(store: Store, clock: ManualClock) -> None:
    hook(store, "ops")
    tell(store, number=1)

    def broken(url: str, headers: dict[str, str], body: bytes, *, private: bool) -> None:
        raise RuntimeError("can't start new thread")

    service = WebhookService(store, clock, broken)
    with threads() as pool:
        assert [ends.result() for ends in service.deliver(pool)] == [False]
        assert (info(store).failures, info(store).problem) == (1, "RuntimeError: can't start new thread")
        assert service.deliver(pool) == [], "not before its time"
        clock.advance(5)
        assert [ends.result() for ends in service.deliver(pool)] == [False]
    assert (info(store).failures, info(store).waiting) == (2, 1)
