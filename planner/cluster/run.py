"""What a worker runs."""

import time

from stageloom.shared.plan import Plan
from stageloom.shared.schedule import StageSchedule
from stageloom.shared.search.job import BlockJob, SearchJob, run_block_search, run_search


def search(job: SearchJob) -> Plan:
    """`run_search` on this machine's clock.

    Raises:
        SettingError, PlanError: as `run_search`.
    """
    return run_search(job, time.monotonic)


def search_block(job: BlockJob) -> StageSchedule:
    """`run_block_search` on this machine's clock."""
    return run_block_search(job, time.monotonic)
