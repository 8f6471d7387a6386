"""What one device may ask of the planner over time. Pure: the clock is an argument.

The defaults lie well above what the agent does (the page `docs/protocol.md` has both side by side). What is
beyond a quota is dropped unanswered: nothing is cheaper, and whatever a device sends it keeps and sends again
until it is answered. A device that has much to tell is slowed down by that, and loses nothing.

A bucket of `burst` tokens refills at `per_s` tokens a second. Over any time T it passes amounts of at most
burst + per_s * T in all. Source: Turner, "New directions in communications", IEEE Communications Magazine
24(10), 1986 (the leaky bucket as a meter).
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

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


TOLD_EVERY_S: Final = 60.0
"""An operator is told of a device that is beyond its quotas once in this time."""


class Quota(str, Enum):
    """What is counted; the value is its name in the planner's settings, after `quota_`."""

    CONNECTIONS = "connections"  # handshakes, on any socket
    CONTROL = "control"  # messages on the control socket, of whatever kind, before they are decoded
    BATCHES = "batches"  # messages on the telemetry socket, likewise, empty ones too
    CHUNKS = "chunks"  # messages on the bulk socket, likewise
    HELLOS = "hellos"
    REPORTS = "reports"
    ALARMS = "alarms"
    LOCAL_PLANS = "local_plans"
    GENERATIONS = "generations"  # those that a device brings about: a local plan, a restored database
    TELEMETRY_BYTES = "telemetry_bytes"  # rows, each with `ROW_BYTES` for its keys
    SINGLE_ROWS = "single_rows"  # rows that the store works on one by one: profiles, trials, states
    LEDGERS = "ledgers"  # of boots not heard of in this planner's life: each is a row that stays


ROW_BYTES: Final = 64


DEFAULT_QUOTAS: Final[Mapping[Quota, Rate]] = {
    Quota.CONNECTIONS: Rate(0.1, 120.0),
    Quota.CONTROL: Rate(100.0, 1_000.0),
    Quota.BATCHES: Rate(20.0, 400.0),
    Quota.CHUNKS: Rate(2_000.0, 8_000.0),
    Quota.HELLOS: Rate(2.0, 60.0),
    Quota.REPORTS: Rate(20.0, 200.0),
    Quota.ALARMS: Rate(1.0, 60.0),
    Quota.LOCAL_PLANS: Rate(0.2, 20.0),
    Quota.GENERATIONS: Rate(0.1, 60.0),
    Quota.TELEMETRY_BYTES: Rate(128.0 * 1024, 128.0 * 1024 * 1024),
    Quota.SINGLE_ROWS: Rate(20.0, 512.0),
    Quota.LEDGERS: Rate(0.2, 4_096.0),
}


class DeviceQuotas:
    """The buckets of one device, and what it did beyond them since an operator was told."""

    __slots__ = ("_beyond", "_buckets", "_rates", "_told_s")

    def __init__(self, rates: Mapping[Quota, Rate]) -> None:
        self._rates = rates
        self._buckets: dict[Quota, TokenBucket] = {}  # made at first use: most devices do few things
        self._beyond: Counter[Quota] = Counter()
        self._told_s = float("-inf")

    def take(self, quota: Quota, now_s: float, amount: float = 1.0) -> bool:
        """Whether the device may do this much more now; if so it has done it, else it is noted."""
        bucket = self._buckets.get(quota)
        if bucket is None:
            bucket = self._buckets[quota] = TokenBucket(self._rates[quota], now_s)
        if bucket.take(now_s, amount):
            return True
        self._beyond[quota] += 1
        return False

    def excess(self, now_s: float) -> str:
        """What to tell of it now, such as "alarms 812, batches 40"; empty where there is nothing, or where
        something was told less than `TOLD_EVERY_S` ago."""
        if not self._beyond or now_s - self._told_s < TOLD_EVERY_S:
            return ""
        self._told_s = now_s
        text = ", ".join(f"{quota.value} {count}" for quota, count in self._beyond.most_common())
        self._beyond.clear()
        return text
