"""`stageloom.shared.matmul`: numpy's product, and no warning from the processor's flags."""

import numpy as np
import pytest

from stageloom.shared.matmul import matmul


def test_products_are_numpys_in_every_shape() -> None:
    draw = np.random.default_rng(0).random
    for left, right in (
        ((2, 5), (5,)),
        ((5,), (5, 3)),
        ((4, 5), (5, 3)),
        ((3, 4, 5), (3, 5, 1)),
        ((5,), (5,)),
    ):
        a, b = draw(left), draw(right)
        assert np.array_equal(matmul(a, b), a @ b)


def test_an_invalid_operation_warns_nobody_and_its_nan_goes_out() -> None:
    a, b = np.array([[np.inf, 1.0]]), np.array([0.0, 1.0])
    with pytest.warns(RuntimeWarning, match="invalid value"):
        a @ b
    assert np.isnan(matmul(a, b)).all()
