"""What the admin handler needs from dispatch: who is there, and whom to tell."""

from typing import Protocol

from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Desired
from stageloom.shared.token import JoinToken


class Fleet(Protocol):
    """The devices' side of a running planner. Methods may be called from any thread and return at once."""

    def online(self) -> frozenset[DeviceId]:
        """Devices with a live session."""
        ...

    def desired_changed(self, device: DeviceId, desired: Desired) -> None:
        """The store holds a newer desired value for a device."""
        ...

    def revoked(self, device: DeviceId) -> None:
        """The store holds a device as revoked."""
        ...

    def released(self, device: DeviceId) -> None:
        """The store holds a device's quarantine as ended."""
        ...

    def backlog_rows(self) -> int:
        """Telemetry rows taken in and not yet committed."""
        ...

    def token(self, secret: bytes) -> JoinToken:
        """A join token with this secret: where devices reach this planner, and how they know it."""
        ...
