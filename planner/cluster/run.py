"""What a worker runs."""

import time

from shared.plan import Plan
from shared.search.job import SearchJob, run_search


def search(job: SearchJob) -> Plan:
    """`run_search` on this machine's clock.

    Raises:
        SettingError, PlanError: as `run_search`.
    """
    return run_search(job, time.monotonic)
