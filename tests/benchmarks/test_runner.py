"""`benchmarks.runner`: statistics on numbers known beforehand."""

import pytest

from benchmarks.runner import rank_correlation


def test_rank_correlation_sees_order_alone_and_shares_the_ranks_of_equals() -> None:
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 10.0, 11.0, 1000.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [9.0, 8.0, 7.0]) == pytest.approx(-1.0)
    # Ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3: 4.5 over sqrt(4.5 * 5).
    assert rank_correlation([1.0, 2.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]) == pytest.approx((4.5 / 5.0) ** 0.5)
