"""What the handlers of the API work with: the store, the devices' side, searches, jobs."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from stageloom.planner.api.access import Principal, Tokens
from stageloom.planner.api.apart import StoreReaders
from stageloom.planner.api.jobs import Jobs
from stageloom.planner.api.route import Route
from stageloom.planner.cluster.interface import SearchPool
from stageloom.planner.metrics.counting import PlannerCounters
from stageloom.planner.schema.base import Request
from stageloom.planner.store.store import ReadStore, Store
from stageloom.shared.clock import Clock
from stageloom.shared.errors import StorageError, UnavailableError
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Desired
from stageloom.shared.token import JoinToken

if TYPE_CHECKING:
    from stageloom.planner.config import PlannerConfig

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")
Q = TypeVar("Q", bound=Request)
R = TypeVar("R")


class FleetLink(Protocol):
    """The devices' side of a running planner. Methods may be called from any thread and return soon."""

    def online(self) -> frozenset[DeviceId]:
        """Devices with a live session."""
        ...

    def desired_changed(self, device: DeviceId, desired: Desired) -> None:
        """The store holds a newer desired value for a device."""
        ...

    def desired_in_doubt(self, devices: Sequence[DeviceId]) -> None:
        """A write that desires something of these devices (none: of any) failed, as far as is known."""
        ...

    def revoked(self, device: DeviceId) -> None:
        """The store holds a device as revoked; it is refused from its next message after this returns."""
        ...

    def released(self, device: DeviceId) -> None:
        """The store holds a device's quarantine as ended; its next message after this returns is heard."""
        ...

    def backlog_rows(self) -> int:
        """Telemetry rows taken in and not yet committed."""
        ...

    def telemetry_failures(self) -> tuple[int, int]:
        """Batches of telemetry that the store did not take: in all, and since the last that it took."""
        ...

    def token(self, secret: bytes) -> JoinToken:
        """A join token with this secret: where devices reach this planner, and how they know it."""
        ...


@contextmanager
def desiring(fleet: FleetLink, *devices: DeviceId) -> Iterator[None]:
    """Around a write that desires something of `devices` (none: of any). One whose answer was lost may be
    in the store although it failed here, so dispatch looks."""
    try:
        yield
    except (StorageError, UnavailableError):
        fleet.desired_in_doubt(devices)
        raise


@dataclass(frozen=True, kw_only=True)
class ApiContext:
    """A planner as handlers see it. One that does not run has its store alone, for reading."""

    reader: ReadStore
    clock: Clock
    jobs: Jobs
    config: "PlannerConfig"
    running: "RunningPlanner | None" = None

    @property
    def store(self) -> Store:
        """The store that writes, too.

        Raises:
            UnavailableError: no planner runs.
        """
        return self.live.store

    @property
    def live(self) -> "RunningPlanner":
        """Raises:
        UnavailableError: no planner runs.
        """
        if self.running is None:
            raise UnavailableError(
                f"no planner runs on {self.config.data_dir}",
                remedy="start it with `stageloom up`, or name its --data-dir",
            )
        return self.running

    def apart(
        self, function: Callable[Concatenate[ReadStore, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> "T | Future[T]":
        """What `function(store, ...)` returns, which takes long: beside a running planner, else here."""
        if self.running is None:
            return function(self.reader, *args, **kwargs)
        return self.running.readers.submit(function, *args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class RunningPlanner:
    """What only a running planner has. `certificate`: the SHA-256 that tokens pin, or empty.

    `wake_rollouts`: have rollouts looked at now, since one was made or changed.
    """

    store: Store
    fleet: FleetLink
    pool: SearchPool
    readers: StoreReaders
    tokens: Tokens
    started_s: float
    certificate: bytes = b""
    counters: PlannerCounters = field(default_factory=PlannerCounters)
    wake_rollouts: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request's surroundings: who asks, and the file that came with it."""

    principal: Principal
    upload: Path | None = None


Handler = Callable[[ApiContext, Any, ApiCall], Any]
HANDLERS: Final[dict[Route[Any, Any], Handler]] = {}
"""Filled by the modules of `stageloom.planner.api.handlers` as they are imported."""


def handles(
    route: Route[Q, R],
) -> Callable[[Callable[[ApiContext, Q, ApiCall], "R | Future[R] | Any"]], Handler]:
    """The function under it answers this verb. It runs on a thread of its own and may return a future.

    Of a job it returns the work, a function of the job; of a download the file's path, which is removed once
    it is sent.
    """

    def register(function: Callable[[ApiContext, Q, ApiCall], Any]) -> Handler:
        HANDLERS[route] = function
        return function

    return register


def then(first: "Future[T]", do: Callable[[T], V]) -> "Future[V]":
    """The future of `do` on what `first` results in; its error if it fails."""
    second: Future[V] = Future()

    def go_on(done: "Future[T]") -> None:
        try:
            second.set_result(do(done.result()))
        except Exception as error:
            second.set_exception(error)

    first.add_done_callback(go_on)
    return second
