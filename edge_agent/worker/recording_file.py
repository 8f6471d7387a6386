"""The file of a recording, written by a thread of its own: the engine never waits for a caller's file."""

import os
import queue
import threading
from typing import Final

MAX_BYTES: Final = 256 << 20
"""Of the file."""

MAX_WAITING_BYTES: Final = 16 << 20
"""Handed over and not written yet; what comes on top is refused."""


class RecordingFile:
    """Takes data until `finish`; `ended` says when nothing more will be written, `error` why not all was.

    `put`, `finish` and `abandon` are the engine's main thread's and never wait.
    """

    def __init__(self, descriptor: int) -> None:
        """Begin to write; `descriptor` stays the caller's."""
        self.error = ""
        self._descriptor = os.dup(descriptor)
        self._handed_bytes = 0
        self._written_bytes = 0  # the thread's
        self._abandoned = False
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> bool:
        """Hand data over; False, and nothing of it is written, if the file is full or too slow."""
        full = self._handed_bytes > MAX_BYTES
        if full or self._handed_bytes - self._written_bytes > MAX_WAITING_BYTES:
            return False
        self._handed_bytes += len(data)
        self._queue.put(data)
        return True

    def finish(self, data: bytes) -> None:
        """Hand over the last data, however full the file is."""
        self._queue.put(data)
        self._queue.put(None)

    def abandon(self) -> None:
        """Write nothing more beyond what the thread is writing now."""
        self._abandoned = True
        self._queue.put(None)

    @property
    def ended(self) -> bool:
        """Whether the thread is done with the file and has closed it."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while (data := self._queue.get()) is not None and not self._abandoned:
                self._write(data)
        except OSError as error:
            self.error = f"the recording cannot be written: {error.strerror}"
        finally:
            os.close(self._descriptor)

    def _write(self, data: bytes) -> None:
        while data and not self._abandoned:
            written = os.write(self._descriptor, data)
            self._written_bytes += written
            data = data[written:]
