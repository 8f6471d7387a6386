"""What a program writes to its terminal or pipe, whatever text that is, and where it was given neither."""

import io
import os
import sys
from typing import TextIO


def open_closed_streams() -> None:
    """Have standard streams that the program was started without lead to nowhere, for its children, too.

    Python has None in their place; and the next file that is opened, a database or a socket, would get
    their descriptor and whatever a library prints. Call this before anything is opened.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:  # it is the lowest that is free, so this one gets it
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False))


def write_any_text(*streams: TextIO) -> None:
    """From now on what their encoding lacks, such as a path that is not UTF-8, is written as escapes."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
