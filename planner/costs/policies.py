"""The trained policy that a search takes along."""

import logging

from stageloom.planner.store.policies import newest_policy
from stageloom.planner.store.store import Reader
from stageloom.shared.errors import DecodeError

_log = logging.getLogger(__name__)


def trained_policy(store: Reader, device_class: str) -> bytes:
    """The bytes of gpg's newest policy; empty, for the packaged one, where there is none that can be used.

    A policy that another version trained on other features must not stop a search.
    """
    from stageloom.shared.policy.gpg.checkpoint import decode  # numpy, which no start needs

    found = store.read(newest_policy, "gpg", device_class)
    if found is None:
        return b""
    try:
        decode(found)
    except DecodeError as error:
        _log.warning("the packaged policy is used: %s", error)
        return b""
    return found
