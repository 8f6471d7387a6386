"""Rate limits as token buckets. Pure: the clock is an argument.

A bucket of `burst` tokens refills at `per_s` tokens a second. Over any time T it passes amounts of at most
burst + per_s * T in all. Source: Turner, "New directions in communications", IEEE Communications Magazine
24(10), 1986 (the leaky bucket as a meter).
"""

from collections import OrderedDict
from dataclasses import dataclass

_MAX_ADDRESSES = 4096


@dataclass(frozen=True, slots=True)
class Rate:
    """`burst` units at once, and `per_s` a second after that."""

    per_s: float
    burst: float


class TokenBucket:
    """One bucket, full at first. An amount above the burst needs a full bucket and leaves a debt, so that no
    amount waits for ever."""

    __slots__ = ("_at_s", "_burst", "_per_s", "_tokens")

    def __init__(self, rate: Rate, now_s: float) -> None:
        self._per_s, self._burst = rate.per_s, rate.burst
        self._tokens, self._at_s = rate.burst, now_s

    def take(self, now_s: float, amount: float = 1.0) -> bool:
        """Whether `amount` passes now; if so its tokens are gone, else none are."""
        burst = self._burst
        tokens = self._tokens + (now_s - self._at_s) * self._per_s
        if tokens > burst:
            tokens = burst
        self._at_s = now_s
        if tokens < amount and tokens < burst:
            self._tokens = tokens
            return False
        self._tokens = tokens - amount
        return True


class TokenBuckets:
    """A bucket for each network address that has been heard of lately, in bounded memory."""

    def __init__(self, *, per_s: float, burst: int) -> None:
        self._rate = Rate(per_s, burst)
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, address: str, now_s: float) -> bool:
        """Whether `address` may do one more thing now; if so it has done it."""
        bucket = self._buckets.pop(address, None) or TokenBucket(self._rate, now_s)
        self._buckets[address] = bucket
        if len(self._buckets) > _MAX_ADDRESSES:
            self._buckets.popitem(last=False)  # the one that has been quiet the longest has refilled most
        return bucket.take(now_s)
