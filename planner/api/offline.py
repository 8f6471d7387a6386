"""The verbs that the store alone can answer, where no planner runs: handlers called in this process."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import msgspec

from stageloom.planner.api.access import LOCAL, Principal
from stageloom.planner.api.client import CHUNK, new_file, result
from stageloom.planner.api.context import ApiCall, ApiContext
from stageloom.planner.api.handlers import handler_of
from stageloom.planner.api.jobs import Jobs
from stageloom.planner.api.route import AnswerForm, Route
from stageloom.planner.api.routes import JOB_CANCEL, JOB_EVENTS
from stageloom.planner.config import PlannerConfig
from stageloom.planner.schema.access import Role
from stageloom.planner.schema.base import Page, Request
from stageloom.planner.schema.job import JobCancelRequest, JobEventsRequest, JobInfo
from stageloom.planner.store.store import ReadStore
from stageloom.planner.store.used_database import kept_url
from stageloom.shared.clock import SystemClock

Q = TypeVar("Q", bound=Request)
R = TypeVar("R")
T = TypeVar("T")


class StoreClient:
    """As `stageloom.planner.api.client.PlannerClient`, on the data of a planner that does not run."""

    live = False

    def __init__(self, data_dir: Path, *, or_older: bool = False) -> None:
        """`or_older`: on a database that is not migrated yet, too, which most verbs cannot read.

        Raises:
            InputError: there is no planner's data in `data_dir`.
            StorageError: the database cannot be read, or has another schema.
        """
        clock = SystemClock()
        config = PlannerConfig(data_dir=data_dir, database_url=kept_url(data_dir))
        self._store = ReadStore.open(data_dir, or_older=or_older)
        self._api = ApiContext(reader=self._store, clock=clock, jobs=Jobs(clock), config=config)
        self._call = ApiCall(Principal(LOCAL, Role.ADMIN, LOCAL))

    def close(self) -> None:
        """Close the database."""
        self._store.close()

    def __enter__(self) -> "StoreClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, route: Route[Q, R], request: Q, *, timeout_s: float = 0.0) -> R:
        """The reply to a request; of a job, its result.

        Raises:
            StageloomError: what the handler raises.
            UnavailableError: it takes a running planner.
        """
        if route.form is AnswerForm.JOB:
            *_, end = self.follow(self.start(route, request).job)
            return result(route, end)
        reply: R = self._handled(route, request)
        return reply

    def _handled(self, route: Route[Q, R], request: Q) -> R:
        if not route.offline:
            self._api.live  # noqa: B018  (there is none, which is the error)
        reply = handler_of(route)(self._api, request, self._call)
        done: R = reply.result() if isinstance(reply, Future) else reply
        return done

    def start(self, route: Route[Q, R], request: Q) -> JobInfo:
        """Begin a job. Raises as `call`."""
        return self._api.jobs.start(route.name, LOCAL, self._handled(route, request))  # type: ignore[arg-type]

    def follow(self, job: str) -> Iterator[JobInfo]:
        """The job at each change, and at last as it ended."""
        for item in handler_of(JOB_EVENTS)(self._api, JobEventsRequest(job=job), self._call):
            if isinstance(item, float):
                time.sleep(item)
            else:
                yield item[1]

    def cancel(self, job: str) -> JobInfo:
        """Have a job end."""
        info: JobInfo = handler_of(JOB_CANCEL)(self._api, JobCancelRequest(job=job), self._call)
        return info

    def pages(self, route: Route[Q, Page[T]], request: Q, *, timeout_s: float = 0.0) -> Iterator[T]:
        """All items of a list. Raises as `call`."""
        while True:
            page = self.call(route, request)
            yield from page.items
            if not page.next:
                return
            request = msgspec.structs.replace(request, after=page.next)

    def upload(self, route: Route[Q, R], request: Q, file: Path) -> R:
        """It takes a running planner. Raises as `call`."""
        return self._handled(route, request)

    def download(self, route: Route[Q, bytes], request: Q, file: Path) -> int:
        """Have the answer as a new file of mode 0600; returns its size. Raises as `call` and `new_file`."""
        with new_file(file) as write:
            made = Path(str(self._handled(route, request)))  # what a download's handler returns
            try:
                with made.open("rb") as source:
                    return sum(write(chunk) for chunk in iter(lambda: source.read(CHUNK), b""))
            finally:
                made.unlink()
