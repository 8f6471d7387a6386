"""One thread for what numpy computes with.

Our matrices are small. A second thread of OpenBLAS's brings nothing for them, and where all cores are taken,
as they are by searches side by side, each product waits until the second thread is given a core.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

ONE_THREAD: Final[Mapping[str, str]] = MappingProxyType(
    {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
)
"""Variables of a process's environment; the libraries read them when numpy is imported, not later."""
