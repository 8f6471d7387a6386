"""A rate limit for strangers: token buckets per peer address, in bounded memory."""

from collections import OrderedDict

_MAX_ADDRESSES = 4096


class TokenBuckets:
    """Each address may do `burst` things at once and `per_s` per second after that."""

    def __init__(self, *, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address: (tokens, at_s)

    def take(self, address: str, now_s: float) -> bool:
        """Whether `address` may do one more thing now; if so it has done it."""
        tokens, at_s = self._buckets.pop(address, (float(self._burst), now_s))
        tokens = min(float(self._burst), tokens + (now_s - at_s) * self._per_s)
        allowed = tokens >= 1
        self._buckets[address] = (tokens - 1 if allowed else tokens, now_s)
        if len(self._buckets) > _MAX_ADDRESSES:
            self._buckets.popitem(last=False)  # the one that has been quiet the longest has refilled most
        return allowed
