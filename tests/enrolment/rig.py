"""A dispatch server and real enrolment over the memory store."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from zmq.utils import z85

from stageloom.planner.dispatch.ports import EnrolAttempt
from stageloom.planner.dispatch.sockets import listen
from stageloom.planner.enrolment.service import (
    CERTIFICATE_FILE,
    EnrolmentDesk,
    EnrolmentService,
    certificate_digest,
)
from stageloom.shared.clock import SystemClock
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import DeviceId
from stageloom.shared.token import JoinToken
from tests.link.rig import Rig


class EnrolmentRig(Rig):
    """`Rig` with the listener's process in front of its store."""

    def open(self, folder: Path, enrol: Callable[[EnrolAttempt], DeviceId]) -> None:
        """Begin to take requests; the certificate lies in `folder`."""
        certificate = folder / CERTIFICATE_FILE
        self.certificate = certificate_digest(certificate)
        clock = SystemClock()
        self.enrolment = EnrolmentService(
            listen("127.0.0.1", 0, backlog=128, guarded=False),
            certificate,
            EnrolmentDesk(enrol, self.server.admit, clock).answer,
            clock=clock,
            rng=Random(1),
        )
        self.enrolment.start()

    def token(self, secret: bytes = b"s" * 16, *, known: bool = True) -> JoinToken:
        """A token with this secret, `known` to the store or not."""
        if known:
            self.store.tokens.setdefault(digest_bytes([secret]), "")
        where = self.endpoints
        return JoinToken(
            z85.decode(self.keys.public.encode()),
            secret,
            where.control,
            where.telemetry,
            where.bulk,
            f"tls://127.0.0.1:{self.enrolment.port}",
            self.certificate,
        )


@contextmanager
def enrolling(
    folder: Path, *devices: str, enrol: Callable[[EnrolAttempt], DeviceId] | None = None
) -> Iterator[EnrolmentRig]:
    """A server that serves and enrols, with these devices enrolled already.

    `enrol` commits a key where the memory store does not.
    """
    rig = EnrolmentRig()
    for name in devices:
        rig.enrolled(name)
    rig.start()
    try:
        rig.open(folder, enrol or rig.store.enrol)
        try:
            yield rig
        finally:
            rig.enrolment.close()
    finally:
        rig.server.stop()
