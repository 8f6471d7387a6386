"""Telling torch's want of memory from its other errors, on every device."""

from typing import Final

import torch

_SAYINGS: Final = ("NVML_SUCCESS", "out of memory", "NvMapMemAlloc")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the device had too little memory.

    On a Jetson torch asks NVML for the figures of its message, which NVML does not have there, and raises
    the failed assertion `NVML_SUCCESS == r` in place of its own exception (pytorch issue 185240). What CUDA
    itself refuses, a graph's memory for one, is a plain error that says "out of memory".
    """
    return isinstance(error, torch.OutOfMemoryError) or any(saying in str(error) for saying in _SAYINGS)
