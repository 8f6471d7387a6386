"""Memory files of clients, mapped into the engine process: tasks' tensors are read and written in place."""

import fcntl
import mmap
import os
from typing import TYPE_CHECKING

from stageloom.shared.errors import RefusedError
from stageloom.shared.graph import ITEM_BYTES, Tensor

if TYPE_CHECKING:
    import numpy


class Arena:
    """One mapped memory file."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map `size_bytes` of `fd`; the descriptor may be closed afterwards.

        Raises:
            RefusedError: the file can still shrink, which would kill whoever reads it, or is too small.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if not seals & fcntl.F_SEAL_SHRINK:
            raise RefusedError(
                "the arena can be made shorter while it is in use",
                remedy="seal the memory file with F_SEAL_SHRINK",
            )
        if not 0 < size_bytes <= os.fstat(fd).st_size:
            raise RefusedError(f"the arena does not have {size_bytes} bytes")
        try:
            self._memory = mmap.mmap(fd, size_bytes)
        except OSError as error:
            raise RefusedError(f"the arena cannot be mapped: {error.strerror}") from error
        self.size_bytes = size_bytes

    def view(self, tensor: Tensor, offset: int) -> "numpy.ndarray":
        """A tensor of batch 1 in place. The mapping lives as long as any view of it.

        Raises:
            RefusedError: it does not lie inside the arena, or is not aligned to its items.
        """
        import numpy

        end = offset + tensor.nbytes
        if offset < 0 or end > self.size_bytes or offset % ITEM_BYTES[tensor.dtype]:
            raise RefusedError(
                f"tensor {tensor.name!r} at {offset} to {end} does not fit into {self.size_bytes} bytes"
            )
        count = tensor.nbytes // ITEM_BYTES[tensor.dtype]
        return numpy.frombuffer(self._memory, tensor.dtype, count, offset).reshape(tensor.shape)
