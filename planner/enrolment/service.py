"""Runs the listener's process and answers what it asks, on one thread."""

import contextlib
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from stageloom.planner.enrolment.channel import PACKET_BYTES, Answer, decode_ask, encode
from stageloom.shared.backoff import backoff_s
from stageloom.shared.clock import Clock

log = logging.getLogger(__name__)

_FIRST_AGAIN_S: Final = 0.2
_STEADY_S: Final = 60.0  # a process that lived so long is started again without delay to speak of
_END_S: Final = 5.0


class EnrolmentService:
    """Enrolment from `start` to `close`. A listener that ends is started again, with growing delays.

    The planner keeps the listening socket, so strangers that come meanwhile wait in its backlog.
    """

    def __init__(
        self,
        listening: socket.socket,
        certificate: Path,
        answer: Callable[[str, bytes], bytes],
        *,
        clock: Clock,
        rng: Random,
    ) -> None:
        """`answer` maps (peer, request frame) to a reply frame; `listening` is closed by `close`."""
        self._listening = listening
        self._certificate = certificate
        self._answer = answer
        self._clock = clock
        self._rng = rng
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="enrolment", daemon=True)

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self._listening.getsockname()[1])

    @property
    def pid(self) -> int | None:
        """The listener's process, while there is one."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """End the listener and stop; a request that is being answered is finished first."""
        self._stopping.set()
        with self._lock:
            if self._channel is not None:
                with contextlib.suppress(OSError):
                    self._channel.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()

    def _run(self) -> None:
        delays_s = backoff_s(self._rng, first_s=_FIRST_AGAIN_S)
        while not self._stopping.is_set():
            began_s = self._clock.monotonic_s()
            try:
                how = f"exit code {self._live()}"
            except Exception as error:
                how = str(error)
                log.debug("the listener's life ends by an error", exc_info=error)
            if self._stopping.is_set():
                return
            if self._clock.monotonic_s() - began_s >= _STEADY_S:
                delays_s = backoff_s(self._rng, first_s=_FIRST_AGAIN_S)
            delay_s = next(delays_s)
            log.warning("the process that enrols devices ended (%s); again in %.1f s", how, delay_s)
            self._stopping.wait(delay_s)

    def _live(self) -> int:
        """One life of the listener; returns its exit code."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                process = self._spawn(theirs)
            try:
                with self._lock:
                    self._process, self._channel = process, ours
                if not self._stopping.is_set():
                    self._serve(ours)
            finally:
                with self._lock:
                    self._process = self._channel = None
                ours.close()  # which tells the listener to end
                _end(process)
        return process.returncode

    def _spawn(self, channel: socket.socket) -> "subprocess.Popen[bytes]":
        files = (self._listening.fileno(), channel.fileno())
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "stageloom.planner.enrolment",
                str(self._certificate.absolute()),
                *map(str, files),
            ],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
        )

    def _serve(self, channel: socket.socket) -> None:
        while packet := channel.recv(PACKET_BYTES):
            try:
                ask = decode_ask(packet)
            except msgspec.MsgspecError:
                log.error("the process that enrols devices sends nonsense, and is ended")
                return
            answer = Answer(ask.ticket, self._answer(ask.peer, ask.frame))
            # Full only if the listener reads nothing any more; the error ends it.
            channel.send(encode(answer), socket.MSG_DONTWAIT)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """See a process end, by force if need be."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
