"""Matrix products of finite numbers, without a false alarm of the library that computes them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


def matmul(left: "NDArray[Any]", right: "NDArray[Any]") -> "NDArray[Any]":
    """`left @ right`; shapes and broadcasting are numpy's.

    numpy reports an invalid operation from the processor's flags after the product, and some of OpenBLAS's
    kernels compute on lanes past a short row's end whose numbers nobody wrote and nobody reads: of finite
    numbers, a warning about one product in millions (numpy issue 24067), which is an error in our tests and a
    riddle on a user's terminal. A NaN that comes in still goes out.
    """
    import numpy as np

    with np.errstate(invalid="ignore"):
        found: NDArray[Any] = np.matmul(left, right)
    return found
