"""Delivers waiting messages beside the planner's own work, from a thread.

Messages wait in the store, in the transaction of what they tell of, so a restart loses none. A webhook has
one message under way at a time, in order. One that does not answer is asked again later and later; each such
try holds up the others by the sender's limit at most.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from stageloom.planner.store.store import Store
from stageloom.planner.store.webhooks import WaitingMessage, message_arrived, message_failed, waiting_messages
from stageloom.planner.webhooks.sender import NotDelivered, send
from stageloom.planner.webhooks.signature import signed_headers
from stageloom.shared.clock import Clock
from stageloom.shared.errors import StageloomError

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 2.0
"""Between two looks for messages, while none waits."""

_AT_A_TIME: Final = 4  # webhooks that are sent to at the same moment

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
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def close(self) -> None:
        """Stop; a message under way is finished, which takes the sender's limit at most."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        with ThreadPoolExecutor(_AT_A_TIME, "webhook") as threads:
            while not self._stop.is_set():
                try:
                    sent = self.deliver(threads)
                except StageloomError as error:
                    logger.warning("webhooks wait: %s", error)
                    sent = 0
                except Exception:
                    logger.exception("delivering webhooks failed, and goes on")
                    sent = 0
                if not sent:
                    self._stop.wait(self._interval_s)

    def deliver(self, threads: ThreadPoolExecutor) -> int:
        """Try the oldest message of every webhook that is due; returns how many arrived.

        Raises:
            StorageError: what waits cannot be read, or what became of it not be kept.
        """
        due: Sequence[WaitingMessage] = self._store.read(waiting_messages, self._clock.wall_us())
        return sum(threads.map(self._try, due))

    def _try(self, message: WaitingMessage) -> bool:
        now_us = self._clock.wall_us()
        headers = signed_headers(message.secret, message.message, now_us // 1_000_000, message.body)
        try:
            self._send(message.url, headers, message.body, private=message.private)
        except NotDelivered as error:
            self._store.write(
                message_failed, message, str(error), gone=error.gone, at_us=self._clock.wall_us()
            )
            return False
        self._store.write(message_arrived, message)
        return True
