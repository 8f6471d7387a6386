"""Who may ask: bearer tokens, and clients of this account for what touches its shared memory."""

import hmac
import os
from collections.abc import Set

from stageloom.edge_agent.serving.failures import FailureKind, InferenceFailure
from stageloom.edge_agent.serving.peer import uid_of


def check_token(authorization: str, tokens: Set[str]) -> None:
    """`authorization` is the header's value; without tokens everybody may ask.

    Raises:
        InferenceFailure: it is no bearer token that holds.
    """
    if not tokens:
        return
    scheme, _, given = authorization.partition(" ")
    known = [hmac.compare_digest(given.strip().encode(), token.encode()) for token in tokens]
    if scheme.lower() != "bearer" or not any(known):
        raise InferenceFailure(
            FailureKind.STRANGER, "a bearer token is missing or wrong", remedy="send one in `authorization`"
        )


def check_account(client: tuple[str, int] | None, server: tuple[str, int] | None) -> None:
    """Shared memory is for programs of this machine and of the agent's account.

    Raises:
        InferenceFailure: the other end of this connection is another account's, or nobody knows whose.
    """
    if client is None or server is None or uid_of(client, server) != os.geteuid():
        raise InferenceFailure(
            FailureKind.FORBIDDEN,
            "shared memory is for programs of the agent's account on this machine",
            remedy="send the tensors in the request",
        )
