"""Enrolment at the planner: the certificate, the answers to strangers, and the listener's process."""

import contextlib
import datetime
import hashlib
import ipaddress
import logging
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec

from stageloom.planner.dispatch.ports import EnrolAttempt, EnrolRefused
from stageloom.planner.dispatch.quotas import TokenBuckets
from stageloom.planner.dispatch.workers import Complaints
from stageloom.planner.enrolment.listener import PACKET_BYTES, Answer, decode_ask, encode
from stageloom.shared.backoff import backoff_s
from stageloom.shared.clock import Clock
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import DecodeError, StateError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages import enrol
from stageloom.shared.messages.base import RefusalCode, Refused
from stageloom.shared.module_command import module_command
from stageloom.shared.private_file import read_private, write_private

if TYPE_CHECKING:
    from cryptography.x509 import GeneralName

CERTIFICATE_FILE: Final = "enrolment.pem"
_LIMIT_CHARS: Final = 8192
_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_END: Final = "-----END CERTIFICATE-----"


def certificate_digest(
    path: Path, *, subject: str = "stageloom enrolment", hosts: Sequence[str] = ()
) -> bytes:
    """SHA-256 of the certificate (DER) in `path`; certificate and key are made first if there is no file.

    `hosts`: names and addresses that it holds for, where clients look at these, too.

    Raises:
        StorageError: the file cannot be written or read, or others could have read it.
        StateError: it holds no certificate.
    """
    if not path.exists():
        write_private(path, _new_certificate(subject, hosts))
    text = read_private(path, limit_chars=_LIMIT_CHARS, remedy="remove it: the planner makes a new one")
    begin, end = text.find(_BEGIN), text.find(_END)
    try:
        der = ssl.PEM_cert_to_DER_cert(text[begin : end + len(_END)])
    except ValueError as error:
        raise StateError(
            f"{path} holds no certificate", remedy="remove it: the planner makes a new one"
        ) from error
    return hashlib.sha256(der).digest()


def _new_certificate(subject: str, hosts: Sequence[str]) -> str:
    """A key (ECDSA, P-256) and its self-signed certificate in PEM."""
    # 10 MiB that only the first start needs.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
    )
    if hosts:
        names = x509.SubjectAlternativeName([*map(_general_name, hosts)])
        builder = builder.add_extension(names, critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (private + certificate.public_bytes(serialization.Encoding.PEM)).decode("ascii")


def _general_name(host: str) -> "GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


PER_PEER_S: Final = 5.0
BURST_PER_PEER: Final = 10
PER_S: Final = 50.0  # of all peers together: each attempt takes the database's writer for a moment


class EnrolmentDesk:
    """Answers strangers with a one-time secret, at a limited rate; used by one thread."""

    def __init__(
        self,
        enrol: Callable[[EnrolAttempt], DeviceId],
        admit: Callable[[DeviceId, str], None],
        clock: Clock,
    ) -> None:
        """`enrol` commits a key (`stageloom.planner.store.devices.enrol_device`).

        `admit(device, public_key)` returns when a connection with the key will be let in.
        """
        self._enrol = enrol
        self._admit = admit
        self._clock = clock
        self._complaints = Complaints(clock.monotonic_s)
        self._peers = TokenBuckets(per_s=PER_PEER_S, burst=BURST_PER_PEER)
        self._all = TokenBuckets(per_s=PER_S, burst=int(PER_S))

    def answer(self, peer: str, frame: bytes) -> bytes:
        """The reply to a request from the network address `peer`."""
        try:
            request = enrol.TO_PLANNER.decode(frame)
        except DecodeError as error:
            return _refusal(0, RefusalCode.MALFORMED, str(error))
        now_s = self._clock.monotonic_s()
        if not (self._peers.take(peer, now_s) and self._all.take("", now_s)):
            return _refusal(
                request.correlation, RefusalCode.RATE, "too many attempts; join again in a few seconds"
            )
        attempt = EnrolAttempt(
            digest_bytes([request.secret]),
            request.public_key,
            request.device,
            request.agent_version,
            request.device_class,
        )
        try:
            device = self._enrol(attempt)
            self._admit(device, request.public_key)
        except EnrolRefused as refused:
            return _refusal(request.correlation, refused.code, str(refused))
        except Exception as error:
            self._complaints.about("enrolment failed", error)
            reason = "the planner's store failed; try again"
            return _refusal(request.correlation, RefusalCode.INTERNAL, reason)
        return enrol.TO_DEVICE.encode(enrol.EnrolReply(correlation=request.correlation, device=device))


def _refusal(correlation: int, code: RefusalCode, reason: str) -> bytes:
    return enrol.TO_DEVICE.encode(Refused(correlation=correlation, code=code, reason=reason[:512]))


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
        arguments = [str(self._certificate.absolute()), *map(str, files)]
        return subprocess.Popen(
            module_command("stageloom.planner.enrolment", *arguments),
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
