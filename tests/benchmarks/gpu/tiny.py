"""Small models of the zoo, made once per process."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.gpu.networks import Subject, make_subject
from stageloom.shared.graph import Graph

WIDTH, SIZE = 0.125, 75
_FOLDER = TemporaryDirectory(prefix="stageloom-tiny-")


@cache
def subject_of(name: str, width: float = WIDTH, size: int = SIZE) -> Subject:
    """With seeded weights; its artifact lies in a folder that lives as long as the process."""
    folder = Path(_FOLDER.name) / f"{width}-{size}"
    folder.mkdir(exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would only wait for each other
    try:
        return make_subject(name, folder, width=width, size=size)
    finally:
        torch.set_num_threads(threads)


def graph_of(name: str, width: float = WIDTH, size: int = SIZE) -> Graph:
    """Its operators."""
    return subject_of(name, width, size).artifact.graph
