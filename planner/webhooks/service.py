"""Delivers waiting messages beside the planner's own work, from a thread.

Messages wait in the store, in the transaction of what they tell of, so a restart loses none. A webhook has
one message under way at a time, in order, and a thread to itself: none waits for another's receiver. One that
does not answer is asked again later and later.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from stageloom.planner.store.store import Store
from stageloom.planner.store.webhooks import (
    MOST_WEBHOOKS,
    WaitingMessage,
    message_arrived,
    message_failed,
    waiting_messages,
)
from stageloom.planner.webhooks.sender import NotDelivered, send
from stageloom.planner.webhooks.signature import signed_headers
from stageloom.shared.clock import Clock
from stageloom.shared.errors import StageloomError

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 2.0
"""Between two looks for messages, while none waits."""

Send = Callable[..., None]


class WebhookService:
    """A thread from `start` to `close`; `send` is as `stageloom.planner.webhooks.sender.send`."""

    def __init__(
        self, store: Store, clock: Clock, send: Send = send, *, interval_s: float = INTERVAL_S
    ) -> None:
        self._store = store
        self._clock = clock
        self._send = send
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._look = threading.Event()  # a message arrived, so another of its webhook may wait
        self._under_way: dict[str, Future[bool]] = {}  # by webhook
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def close(self) -> None:
        """Stop; a message under way is finished, which takes the sender's limit at most."""
        self._stop.set()
        self._look.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        with ThreadPoolExecutor(MOST_WEBHOOKS, "webhook") as threads:
            while not self._stop.is_set():
                try:
                    self.deliver(threads)
                except Exception as error:
                    _log(error)
                self._look.wait(self._interval_s)
                self._look.clear()

    def deliver(self, threads: ThreadPoolExecutor) -> list[Future[bool]]:
        """Begin to send the oldest message of every webhook that is due and has none under way; each result
        is whether it arrived, or StorageError where what became of it cannot be kept.

        Raises:
            StorageError: what waits cannot be read.
        """
        # Before the store is read: what ended since then may still stand in what was read.
        self._under_way = {name: ends for name, ends in self._under_way.items() if not ends.done()}
        due: Sequence[WaitingMessage] = self._store.read(waiting_messages, self._clock.wall_us())
        begun = []
        for message in due:
            if message.webhook not in self._under_way:
                self._under_way[message.webhook] = ends = threads.submit(self._try, message)
                ends.add_done_callback(self._ended)
                begun.append(ends)
        return begun

    def _ended(self, ends: Future[bool]) -> None:
        error = ends.exception()
        if error is not None:
            _log(error)
        elif ends.result():
            self._look.set()

    def _try(self, message: WaitingMessage) -> bool:
        now_us = self._clock.wall_us()
        try:
            headers = signed_headers(message.secret, message.message, now_us // 1_000_000, message.body)
            self._send(message.url, headers, message.body, private=message.private)
        except Exception as error:
            told = isinstance(error, NotDelivered)
            if not told:
                logger.warning("a message to the webhook %s failed", message.webhook, exc_info=error)
            self._store.write(
                message_failed,
                message,
                str(error) if told else f"{type(error).__name__}: {error}",
                gone=isinstance(error, NotDelivered) and error.gone,
                at_us=self._clock.wall_us(),
            )
            return False
        self._store.write(message_arrived, message)
        return True


def _log(error: BaseException) -> None:
    if isinstance(error, StageloomError):
        logger.warning("webhooks wait: %s", error)
    else:
        logger.error("delivering webhooks failed, and goes on", exc_info=error)
