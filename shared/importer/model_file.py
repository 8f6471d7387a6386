"""Checks on a model file that need no library; they come before a child process is started."""

import os
import stat
from pathlib import Path

from stageloom.shared.errors import ModelError
from stageloom.shared.importer.limits import ImportLimits


def require_model_file(path: Path, limits: ImportLimits) -> None:
    """Refuse what is no readable regular file of a plausible size.

    Raises:
        ModelError: with the reason.
    """
    try:
        status = path.stat()
        readable = os.access(path, os.R_OK)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}",
            remedy="give the path of an ONNX file",
        ) from error
    if not stat.S_ISREG(status.st_mode) or not readable:
        raise ModelError(f"{path} is not a readable file", remedy="give the path of an ONNX file")
    if status.st_size == 0:
        raise ModelError(f"{path.name} is empty", remedy="export or copy the model again")
    if status.st_size > limits.file_bytes:
        raise ModelError(
            f"{path.name} has {status.st_size} bytes, the limit is {limits.file_bytes}",
            remedy="raise the limit file_bytes if you trust the file; a protobuf ends at 2 GiB",
        )
