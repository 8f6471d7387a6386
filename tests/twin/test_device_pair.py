"""Pairs of devices: those that come with the twin, and what is refused."""

from math import inf

import pytest

from stageloom.planner.twin.device_pair import load_pair, pair_names, parse_pair
from stageloom.shared.engine.residency import Bus
from stageloom.shared.errors import InputError

GOOD = """
name = "mine"
title = "Two of them"
fast = "tx2"
slow = "xavier_nx_cpu"
latency_s = 1e-5
barrier_s = 2e-5
bytes_per_s = 1e9
[sources]
latency_s = "one copy"
barrier_s = "a wait"
bytes_per_s = "a bus"
"""


@pytest.mark.parametrize("name", pair_names())
def test_a_pair_that_comes_with_the_twin_is_a_fast_and_a_slow_device_with_sources(name: str) -> None:
    found = load_pair(name)
    assert found.name == name
    slow = found.slow.fp32_flop_per_s * max(found.slow.cores, 1)
    assert found.fast.fp32_flop_per_s > slow and found.slow.cores
    assert all(len(text) > 10 for text in found.sources.values())


def test_one_memory_is_a_bus_without_end() -> None:
    assert load_pair("xavier_nx").bus == Bus(latency_s=0.0, bytes_per_s=inf)
    assert parse_pair(GOOD, "it").bus == Bus(latency_s=1e-5, bytes_per_s=1e9)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("name", "label"), "is missing or unknown"),
        (("barrier_s = 2e-5", ""), "barrier_s is missing"),
        (('barrier_s = "a wait"', ""), "has no source"),
        (("2e-5", '"2"'), "is no number"),
        (("1e9", "0"), "bytes_per_s is 0"),
        (("tx2", "tx9"), "there is no device file"),
        (("[sources]", "[sources"), "is no TOML"),
        (("bytes_per_s", "bits_per_s"), "bits_per_s is missing or unknown"),
    ],
)
def test_a_wrong_pair_is_refused_with_the_cause(change: tuple[str, str], why: str) -> None:
    with pytest.raises(InputError, match=why):
        parse_pair(GOOD.replace(*change), "it")
    with pytest.raises(InputError, match="there is no pair of devices"):
        load_pair("none")
