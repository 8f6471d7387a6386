"""A planner as the API's handlers see it, without a process, and answers of handlers without HTTP."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from stageloom.planner.api.access import Principal, Tokens
from stageloom.planner.api.context import ApiCall, ApiContext, RunningPlanner
from stageloom.planner.api.handlers import handler_of
from stageloom.planner.api.jobs import Jobs
from stageloom.planner.api.route import AnswerForm, Route
from stageloom.planner.config import PlannerConfig
from stageloom.planner.schema.access import Role
from stageloom.planner.schema.base import Request
from stageloom.planner.store.store import Store
from stageloom.shared.clock import Clock
from stageloom.shared.ids import DeviceId
from stageloom.shared.messages.control import Desired
from stageloom.shared.token import JoinToken
from tests.planner.jobs import running_job

Q = TypeVar("Q", bound=Request)
R = TypeVar("R")
T = TypeVar("T")

OPERATOR = ApiCall(Principal("local", Role.ADMIN, "local"))


class QuietFleet:
    """Nobody is online; what devices would be told is remembered."""

    def __init__(self) -> None:
        self.told: list[Desired] = []
        self.doubted: list[tuple[DeviceId, ...]] = []

    def online(self) -> frozenset[DeviceId]:
        return frozenset()

    def desired_changed(self, device: DeviceId, desired: Desired) -> None:
        self.told.append(desired)

    def desired_in_doubt(self, devices: Sequence[DeviceId]) -> None:
        self.doubted.append(tuple(devices))

    def revoked(self, device: DeviceId) -> None: ...

    def released(self, device: DeviceId) -> None: ...

    def backlog_rows(self) -> int:
        return 0

    def telemetry_failures(self) -> tuple[int, int]:
        return 0, 0

    def token(self, secret: bytes) -> JoinToken:
        raise NotImplementedError


class ReadersHere:
    """Runs at once what is to be read beside the planner."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def submit(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        found: Future[T] = Future()
        try:
            found.set_result(function(self._store, *args, **kwargs))
        except Exception as error:
            found.set_exception(error)
        return found


def planner_context(
    store: Store,
    clock: Clock,
    fleet: QuietFleet | None = None,
    *,
    certificate: bytes = b"",
    database_url: str = "",
    readers: Any = None,
) -> ApiContext:
    """A running planner on a store, without processes; tokens pin the certificate."""
    pool: Any = None
    here: Any = ReadersHere(store)
    running = RunningPlanner(
        store=store,
        fleet=fleet or QuietFleet(),
        pool=pool,
        tokens=Tokens(),
        started_s=clock.monotonic_s(),
        readers=readers or here,
        certificate=certificate,
    )
    config = PlannerConfig(data_dir=store.data_dir, database_url=database_url)
    return ApiContext(reader=store, clock=clock, jobs=Jobs(clock), config=config, running=running)


def answer_of(api: ApiContext, route: Route[Q, R], request: Q) -> R:
    """What a handler answers; of a job, its result."""
    reply: Any = handler_of(route)(api, request, OPERATOR)
    if route.form is AnswerForm.JOB:
        reply = reply(running_job(api.clock, route.name))
    answer: R = reply.result() if isinstance(reply, Future) else reply
    return answer
