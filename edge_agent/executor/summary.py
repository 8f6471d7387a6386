"""Median and spread of repeated measurements."""

from collections.abc import Sequence

import numpy as np

from stageloom.edge_agent.executor.base import OperatorTime


def summary(taken_s: Sequence[float]) -> OperatorTime:
    """Of at least one run; the spread is half the distance of the 16th and the 84th percentile."""
    low, middle, high = (float(at) * 1e6 for at in np.percentile(taken_s, (16, 50, 84)))
    return OperatorTime(middle, (high - low) / 2, len(taken_s))
