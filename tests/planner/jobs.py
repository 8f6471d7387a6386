"""Jobs as the planner's handlers and searches are given them."""

import secrets

from stageloom.planner.api.jobs import Job
from stageloom.planner.schema.job import JobInfo, JobProgress, JobState
from stageloom.shared.clock import Clock


def running_job(clock: Clock, operation: str = "plan.create") -> Job:
    """One that runs, and has told nothing yet."""
    info = JobInfo(
        job=secrets.token_hex(8),
        operation=operation,
        state=JobState.RUNNING,
        who="test",
        began_at_us=clock.wall_us(),
        progress=JobProgress(),
    )
    return Job(info, clock)
