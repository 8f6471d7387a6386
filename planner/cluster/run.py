"""What a worker runs."""

import time

from shared.plan import Plan
from shared.schedule import StageSchedule
from shared.search.block_job import BlockJob, run_block_search
from shared.search.job import SearchJob, run_search


def search(job: SearchJob) -> Plan:
    """`run_search` on this machine's clock.

    Raises:
        SettingError, PlanError: as `run_search`.
    """
    return run_search(job, time.monotonic)


def search_block(job: BlockJob) -> StageSchedule:
    """`run_block_search` on this machine's clock."""
    return run_block_search(job, time.monotonic)
