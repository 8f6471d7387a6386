"""What the admin handler needs from dispatch: who is there, and whom to tell."""

from typing import Protocol

from shared.ids import DeviceId
from shared.messages.control import Desired
from shared.token import Endpoints


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

    def endpoints(self) -> Endpoints:
        """Where devices reach this planner."""
        ...

    def public_key(self) -> bytes:
        """The planner's raw CURVE public key, 32 bytes."""
        ...
