"""Jobs: work that takes longer than an answer may, each on a thread, watched and ended by its id.

A job outlives the connection that asked for it, and not the planner.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from stageloom.planner.api.access import LOCAL
from stageloom.planner.api.problem import problem_of
from stageloom.planner.schema.job import JobInfo, JobProgress, JobState
from stageloom.shared.clock import Clock
from stageloom.shared.errors import InputError, NotFoundError, RefusedError
from stageloom.shared.text import bounded

RUNNING_MAX: Final = 16
RUNNING_OF_ONE: Final = 8  # of one token: the others' jobs may begin, too
KEPT: Final = 256


class JobCancelled(InputError):
    """The job was ended by an operator."""

    def __init__(self) -> None:
        super().__init__("the job was cancelled", remedy="run it again")


class Job:
    """What a job's work sees of it: it tells progress, and learns that it should end. Thread-safe."""

    def __init__(self, info: JobInfo, clock: Clock) -> None:
        self._clock = clock
        self._began_s = clock.monotonic_s()
        self._lock = threading.Lock()
        self._info = info
        self._version = 0
        self._cancel: Callable[[], object] | None = None
        self._cancelled = False

    @property
    def info(self) -> JobInfo:
        """The job as it is now."""
        return self._info

    @property
    def version(self) -> int:
        """Rises with every change."""
        return self._version

    @property
    def cancelled(self) -> bool:
        """Whether it should end."""
        return self._cancelled

    def check(self) -> None:
        """Raises:
        JobCancelled: it should end.
        """
        if self._cancelled:
            raise JobCancelled

    def progress(
        self, text: str = "", *, done: int = 0, size: int = 0, figures: Mapping[str, float] | None = None
    ) -> None:
        """Tell how far it is."""
        told = JobProgress(
            text=bounded(text),
            done=done,
            size=size,
            elapsed_s=self._clock.monotonic_s() - self._began_s,
            figures=dict(figures or {}),
        )
        self._set(msgspec.structs.replace(self._info, progress=told))

    def when_cancelled(self, cancel: Callable[[], object]) -> None:
        """Call `cancel` once it should end; at once, if it should already."""
        with self._lock:
            self._cancel = cancel
            late = self._cancelled
        if late:
            cancel()

    def cancel(self) -> None:
        """Have it end soon."""
        with self._lock:
            self._cancelled = True
            cancel = self._cancel
        if cancel is not None:
            cancel()

    def end(self, state: JobState, **said: Any) -> None:
        """It has ended so."""
        self._set(msgspec.structs.replace(self._info, state=state, ended_at_us=self._clock.wall_us(), **said))

    def _set(self, info: JobInfo) -> None:
        with self._lock:
            self._info = info
            self._version += 1


class Jobs:
    """The jobs of one planner: those that run, and the newest that have ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def start(self, operation: str, who: str, work: Callable[[Job], Any]) -> JobInfo:
        """Run `work(job)`; what it returns is the result.

        Raises:
            RefusedError: too many run, or too many of who asks.
        """
        info = JobInfo(
            job=secrets.token_hex(8),
            operation=operation,
            state=JobState.RUNNING,
            who=who,
            began_at_us=self._clock.wall_us(),
            progress=JobProgress(),
        )
        job = Job(info, self._clock)
        thread = threading.Thread(target=self._run, args=(job, work), name=operation, daemon=True)
        with self._lock:
            running = [job.info.who for job in self._jobs.values() if job.info.state is JobState.RUNNING]
            own = running.count(who)
            if len(running) >= RUNNING_MAX or (own >= RUNNING_OF_ONE and who != LOCAL) or self._closed:
                raise RefusedError(
                    f"{len(running)} jobs run already, {own} of {who}",
                    remedy="wait for one, or end one with `stageloom job cancel`",
                )
            self._jobs[info.job] = job
            self._forget()
            self._threads.add(thread)
        thread.start()
        return info

    def get(self, job: str) -> Job:
        """Raises:
        NotFoundError: no such job since the planner started, or too many ended after it.
        """
        with self._lock:
            known = self._jobs.get(job)
        if known is None:
            raise NotFoundError(f"there is no job {job}", remedy="see `stageloom job list`")
        return known

    def infos(self) -> list[JobInfo]:
        """All that are known, newest first."""
        with self._lock:
            return [job.info for job in reversed(self._jobs.values())]

    def close(self, timeout_s: float = 10.0) -> None:
        """End all jobs and wait for them."""
        with self._lock:
            self._closed = True
            jobs, threads = list(self._jobs.values()), list(self._threads)
        for job in jobs:
            if job.info.state is JobState.RUNNING:
                job.cancel()
        until_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(until_s - time.monotonic(), 0.0))

    def _forget(self) -> None:
        ended = [name for name, job in self._jobs.items() if job.info.state is not JobState.RUNNING]
        for name in ended[: max(len(self._jobs) - KEPT, 0)]:
            del self._jobs[name]

    def _run(self, job: Job, work: Callable[[Job], Any]) -> None:
        try:
            result = msgspec.to_builtins(work(job))
        except JobCancelled as error:
            job.end(JobState.CANCELLED, problem=problem_of(error, job.info.operation))
        except BaseException as error:
            job.end(JobState.FAILED, problem=problem_of(error, job.info.operation))
        else:
            job.end(JobState.DONE, result=result)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
