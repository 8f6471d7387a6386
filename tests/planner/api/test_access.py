"""Who is counted as one client: networks, tokens, and what each may have of what all share."""

import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from stageloom.planner.api.access import FAILURES_BURST, LOCAL, Tokens, network_of
from stageloom.planner.api.certificate import expiry_notices
from stageloom.planner.api.jobs import RUNNING_MAX, RUNNING_OF_ONE, Job, Jobs
from stageloom.planner.schema.base import Done
from stageloom.shared.clock import SystemClock
from stageloom.shared.errors import RefusedError


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("?", "?"),
    ],
)
def test_a_client_is_an_address_and_of_ipv6_all_of_a_network(address: str, network: str) -> None:
    assert network_of(address) == network


def test_requests_without_a_token_are_counted_by_network() -> None:
    tokens = Tokens()
    failed = [tokens.may_fail(f"2001:db8::{number:x}", 0.0) for number in range(2 * FAILURES_BURST)]
    assert sum(failed) == FAILURES_BURST
    assert tokens.may_fail("2001:db8:0:1::1", 0.0)
    assert tokens.may_fail("192.0.2.7", 0.0)


def test_one_token_cannot_take_all_jobs_and_the_owner_of_the_planner_may() -> None:
    jobs = Jobs(SystemClock())
    ended = threading.Event()

    def work(job: Job) -> Done:
        assert ended.wait(20)
        return Done()

    def begun(who: str) -> int:
        number = 0
        while number <= RUNNING_MAX:
            try:
                jobs.start("try.work", who, work)
            except RefusedError as error:
                assert f", {number} of {who}; wait for one" in str(error)
                return number
            number += 1
        raise AssertionError("no bound")

    try:
        assert begun("ci") == RUNNING_OF_ONE
        assert begun(LOCAL) == RUNNING_MAX - RUNNING_OF_ONE
    finally:
        ended.set()
        jobs.close()


@pytest.mark.parametrize(
    ("day", "said"),
    [
        (1, ""),
        (17, "expires on 2027-03-31, in 13 days; renew"),
        (31, "expired on 2027-03-31; renew"),
    ],
)
def test_a_given_certificate_that_expires_soon_is_told(tmp_path: Path, day: int, said: str) -> None:
    file = tmp_path / "given.pem"
    file.write_bytes(certificate(datetime(2027, 3, 31, tzinfo=UTC)))
    now_us = round(datetime(2027, 3, day, 1, tzinfo=UTC).timestamp() * 1e6)
    notices = expiry_notices(file, now_us)
    assert len(notices) == bool(said) and all(said in notice for notice in notices)


def test_a_given_certificate_that_nobody_can_read_is_told(tmp_path: Path) -> None:
    file = tmp_path / "given.pem"
    (absent,) = expiry_notices(file, 0)
    file.write_text("nonsense")
    (nonsense,) = expiry_notices(file, 0)
    assert "cannot be read" in absent and "cannot be read" in nonsense


def certificate(until: datetime) -> bytes:
    """One that holds until then, with its key before it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "planner")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(until)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + made.public_bytes(serialization.Encoding.PEM)
