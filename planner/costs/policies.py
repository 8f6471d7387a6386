"""The trained policy that a search takes along."""

import logging
from typing import Protocol

from stageloom.shared.errors import DecodeError

_log = logging.getLogger(__name__)


class Policies(Protocol):
    """The part of the store that policies come from."""

    def newest_checkpoint(self, policy: str, device_class: str) -> bytes | None:
        """The newest trained policy of a device class, else the newest for any device."""
        ...


def trained_policy(store: Policies, device_class: str) -> bytes:
    """The bytes of gpg's newest policy; empty, for the packaged one, where there is none that can be used.

    A policy that another version trained on other features must not stop a search.
    """
    from stageloom.shared.policy.gpg.checkpoint import decode  # numpy, which no start needs

    found = store.newest_checkpoint("gpg", device_class)
    if found is None:
        return b""
    try:
        decode(found)
    except DecodeError as error:
        _log.warning("the packaged policy is used: %s", error)
        return b""
    return found
