"""The ring of samples that a policy reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageloom.shared.policy.queues import PolicySample, SampleRing, progress_bits


def sample(number: int, blocks: tuple[int, ...] = (2, 1)) -> PolicySample:
    return PolicySample(
        tuple((number % 2,) * count for count in blocks), tuple(float(number) for _ in blocks)
    )


@given(st.integers(1, 12), st.integers(0, 40))
def test_the_newest_samples_stay_in_order(length: int, pushed: int) -> None:
    ring = SampleRing(length)
    for number in range(pushed):
        ring.push(sample(number))
    assert ring.samples == tuple(sample(n) for n in range(max(0, pushed - length), pushed))
    assert ring.full == (pushed >= length)


def test_a_plan_with_other_blocks_starts_the_ring_anew() -> None:
    ring = SampleRing(3)
    for number in range(3):
        ring.push(sample(number))
    ring.push(sample(7, blocks=(3, 1)))
    assert ring.samples == (sample(7, blocks=(3, 1)),)


def test_progress_is_the_union_over_replicas() -> None:
    assert progress_bits([0b0001, 0b0100], 4) == (1, 0, 1, 0)
    assert progress_bits([], 2) == (0, 0)


def test_a_ring_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="ring of 0"):
        SampleRing(0)
