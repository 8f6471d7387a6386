"""Who asks: access tokens, roles, and how much each client may ask over time. Pure but for randomness.

A token is `stl_` and 32 random bytes, and, where clients pin the planner's own certificate, a dot and its
SHA-256; both in URL-safe base64. The planner keeps a digest of the first part alone.
"""

import base64
import ipaddress
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stageloom.planner.dispatch.quotas import Rate, TokenBucket, TokenBuckets
from stageloom.planner.schema.access import Role
from stageloom.shared.digest import digest_bytes
from stageloom.shared.errors import TokenError
from stageloom.shared.ids import Digest

PREFIX: Final = "stl_"
SECRET_BYTES: Final = 32

REQUESTS: Final = Rate(per_s=50.0, burst=200.0)
"""Of one token, unless the setting `api_rate` says otherwise."""

LOCAL: Final = "local"
"""Who asks over the local socket: no token may be called so."""

FAILURES_PER_S: Final = 1.0
FAILURES_BURST: Final = 20
"""Of one client's network (`network_of`): requests without a valid token."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks: the token's name, or `local`; with which role; from which address. A stranger has no name and
    no role."""

    name: str
    role: Role | None
    source: str

    def may(self, role: Role) -> bool:
        """Whether they may do what is for this role."""
        return self.role is not None and self.role.includes(role)


def network_of(address: str) -> str:
    """What clients are counted by: the address; of IPv6 its /64, all of which one client may use.

    An IPv4 address that is written as an IPv6 one is that address.
    """
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address  # none, as over the local socket
    if known.version == 4:
        return address
    if known.ipv4_mapped is not None:
        return str(known.ipv4_mapped)
    return str(ipaddress.ip_network((int(known), 64), strict=False))


def token_text(secret: bytes, certificate: bytes) -> str:
    """The token as a person gets it; `certificate` is the SHA-256 to pin, or empty."""
    text = PREFIX + _encode(secret)
    return f"{text}.{_encode(certificate)}" if certificate else text


def split_token(text: str) -> tuple[str, bytes]:
    """(what authenticates, SHA-256 of the certificate to pin or empty).

    Raises:
        TokenError: this is no access token.
    """
    word = text.strip()
    bearer, dot, pinned = word.partition(".")
    try:
        certificate = base64.urlsafe_b64decode(pinned + "=") if dot else b""
    except ValueError:
        certificate = b"?"
    one_word = all("!" <= char <= "~" for char in word)  # a second line would be none of the token
    if not one_word or not bearer.startswith(PREFIX) or len(certificate) not in (0, 32):
        raise TokenError(
            "this is no access token",
            remedy="use the whole text that `stageloom access create` printed, and nothing else",
        )
    return bearer, certificate


def bearer_digest(bearer: str) -> Digest:
    """What the planner keeps of a token."""
    return digest_bytes([bearer.encode("utf-8", "replace")])


def _encode(body: bytes) -> str:
    return base64.urlsafe_b64encode(body).decode("ascii").rstrip("=")


class Tokens:
    """The tokens that hold, by digest, and what each client did lately. Thread-safe."""

    def __init__(self, requests: Rate = REQUESTS) -> None:
        """`requests`: of one token."""
        self._requests = requests
        self._lock = threading.Lock()
        self._held: dict[Digest, tuple[str, Role]] = {}
        self._buckets: dict[str, TokenBucket] = {}
        self._failures = TokenBuckets(per_s=FAILURES_PER_S, burst=FAILURES_BURST)

    def hold(self, tokens: Iterable[tuple[Digest, str, Role]]) -> None:
        """From now on these hold, and no others: (digest, name, role)."""
        held = {digest: (name, role) for digest, name, role in tokens}
        with self._lock:
            self._held = held
            names = {name for name, _ in held.values()}
            self._buckets = {name: bucket for name, bucket in self._buckets.items() if name in names}

    def principal(self, bearer: str, source: str) -> Principal | None:
        """Whose token this is; None if it is nobody's."""
        return self.principal_of(bearer_digest(bearer), source)

    def principal_of(self, digest: Digest, source: str) -> Principal | None:
        """Whose token has this digest; None if it is nobody's, or was revoked."""
        known = self._held.get(digest)
        return None if known is None else Principal(*known, source)

    def holds(self, principal: Principal) -> bool:
        """Whether the token of this client still holds."""
        return (principal.name, principal.role) in self._held.values()

    def may_ask(self, principal: Principal, now_s: float) -> bool:
        """Whether this client may do one more request now; if so it has done it."""
        with self._lock:
            bucket = self._buckets.get(principal.name)
            if bucket is None:
                bucket = self._buckets[principal.name] = TokenBucket(self._requests, now_s)
            return bucket.take(now_s)

    def may_fail(self, source: str, now_s: float) -> bool:
        """Whether one more request without a valid token is answered to who asks from this address."""
        with self._lock:
            return self._failures.take(network_of(source), now_s)
