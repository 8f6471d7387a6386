"""Found first on the path, this puts the wall clock ahead by STAGELOOM_BENCH_AHEAD_S in a planner."""

import os
import time

_ahead_s = float(os.environ.get("STAGELOOM_BENCH_AHEAD_S", "0"))
if _ahead_s:
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + _ahead_s
    time.time_ns = lambda: _time_ns() + round(_ahead_s * 1e9)
