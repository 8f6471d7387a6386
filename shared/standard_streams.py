"""What a program writes to its terminal or pipe, whatever text that is."""

import io
from typing import TextIO


def write_any_text(*streams: TextIO) -> None:
    """From now on what their encoding lacks, such as a path that is not UTF-8, is written as escapes."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
