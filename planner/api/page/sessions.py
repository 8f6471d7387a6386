"""Who is signed in to the page.

A session lives in memory and refers to its access token by digest, so it ends when the token is revoked or
the planner starts again.
"""

import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from stageloom.planner.api.access import Principal, Tokens, bearer_digest
from stageloom.shared.digest import digest_bytes
from stageloom.shared.ids import Digest

IDLE_S: Final = 12 * 3600.0
MOST_SESSIONS: Final = 1024
MOST_OF_ONE: Final = 32
"""Sessions of one token; the one that was used least lately ends for another."""


@dataclass(slots=True)
class _Session:
    bearer: Digest
    csrf: str
    seen_s: float


@dataclass(frozen=True, slots=True)
class SignedIn:
    """Who a session is of, and what its forms must carry."""

    principal: Principal
    csrf: str


class Sessions:
    """Sessions by the digest of what their cookies hold. Thread-safe."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._lock = threading.Lock()
        self._held: OrderedDict[Digest, _Session] = OrderedDict()

    def begin(self, bearer: str, source: str, now_s: float) -> str | None:
        """The cookie of a new session; None if the token is nobody's."""
        if self._tokens.principal(bearer, source) is None:
            return None
        cookie, digest = secrets.token_urlsafe(32), bearer_digest(bearer)
        with self._lock:
            own = [key for key, session in self._held.items() if session.bearer == digest]
            full = len(own) >= MOST_OF_ONE
            if full or len(self._held) >= MOST_SESSIONS:
                del self._held[own[0] if full else next(iter(self._held))]
            self._held[_key(cookie)] = _Session(digest, secrets.token_urlsafe(32), now_s)
        return cookie

    def find(self, cookie: str, source: str, now_s: float) -> SignedIn | None:
        """Who this cookie signs in; None: nobody, any more."""
        key = _key(cookie)
        with self._lock:
            session = self._held.get(key)
            if session is None:
                return None
            principal = self._tokens.principal_of(session.bearer, source)
            if principal is None or now_s - session.seen_s > IDLE_S:
                del self._held[key]
                return None
            session.seen_s = now_s
            self._held.move_to_end(key)
            return SignedIn(principal, session.csrf)

    def end(self, cookie: str) -> None:
        """Sign out."""
        with self._lock:
            self._held.pop(_key(cookie), None)


def _key(cookie: str) -> Digest:
    return digest_bytes([cookie.encode("utf-8", "replace")])
