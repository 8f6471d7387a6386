"""Setups and figures for tests of the trial."""

import math

from stageloom.shared.engine.trial import TrialRecord, TrialSetup
from stageloom.shared.engine.windows import WindowFigures
from stageloom.shared.ids import Digest

RECORD = TrialRecord(candidate=Digest("c" * 64), control=Digest("a" * 64), environment="MAXN", began_us=1)


def setup(**fields: object) -> TrialSetup:
    """One model, an instance of 5 ms, memory for both."""
    known: dict[str, object] = {
        "record": RECORD,
        "models": ("m",),
        "service_s": (0.005,),
        "instance_s": (0.005,),
        "control_bytes": 100,
        "candidate_bytes": 50,
        "memory_bytes": 150,
    }
    return TrialSetup(**{**known, **fields})  # type: ignore[arg-type]


def figures(latency_s: float = 0.008, /, **fields: object) -> WindowFigures:
    """Twenty tasks at open load, none of them late, each of this latency."""
    known: dict[str, object] = {
        "completed": (20,),
        "failed": 0,
        "measured_s": 0.225,
        "busy_s": 0.1,
        "saturated": False,
        "p99_s": 0.01,
        "oldest_age_s": 0.002,
        "judged": (20,),
        "log_latency": (20 * math.log(latency_s),),
        "due": 20,
        "in_time": 20,
    }
    return WindowFigures(**{**known, **fields})  # type: ignore[arg-type]
