"""Importing a model: an ONNX file in, a content-addressed artifact and a report out.

Nothing here parses the file; that happens in a child process under limits
(`stageloom.shared.importer.child`).
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from stageloom.shared.artifact import open_artifact
from stageloom.shared.errors import StorageError
from stageloom.shared.ids import Digest
from stageloom.shared.importer.limits import ImportLimits
from stageloom.shared.importer.model_file import require_model_file
from stageloom.shared.importer.process import ARTIFACT_NAME, Progress, run_child
from stageloom.shared.importer.report import ImportReport

SUFFIX = ".artifact"
_SCRATCH_PREFIX = ".import-"


def artifact_path(directory: Path, digest: Digest) -> Path:
    """Where an artifact of that digest lies in `directory`."""
    return directory / f"{digest}{SUFFIX}"


def import_model(
    path: Path,
    *,
    shapes: Mapping[str, Sequence[int]],
    out_dir: Path,
    limits: ImportLimits | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Import an ONNX file into `out_dir` as `<digest>.artifact`.

    Equal content gives the same digest and the same file, so importing twice changes nothing. `shapes` pins
    inputs whose dimensions the file leaves open. `progress` is told the phases, one short line each. A failed
    import leaves nothing behind.

    Raises:
        ModelError: the file cannot be imported; the message says why and what to do.
        UnpinnedShape: an input dimension has no number.
        StorageError: `out_dir` cannot be written.
        DecodeError: the child left something else than the artifact that it reports.
    """
    limits = limits or ImportLimits()
    require_model_file(path, limits)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        _sweep(out_dir)
        scratch = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH_PREFIX}{os.getpid()}-", dir=out_dir))
    except OSError as error:
        raise _storage(out_dir, error) from error
    try:
        found = ImportReport.from_json(run_child(path, shapes, scratch, limits, progress or _ignore))
        # The child read a hostile file: believe its artifact only after looking at it.
        open_artifact(scratch / ARTIFACT_NAME, found.digest)
        os.replace(scratch / ARTIFACT_NAME, artifact_path(out_dir, found.digest))
        return found
    except OSError as error:
        raise _storage(out_dir, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _ignore(line: str) -> None:
    """The progress that nobody asked for."""


def _sweep(out_dir: Path) -> None:
    """Remove what imports left whose process was killed."""
    for left in out_dir.glob(f"{_SCRATCH_PREFIX}*"):
        owner = left.name.removeprefix(_SCRATCH_PREFIX).partition("-")[0]
        if owner.isdecimal() and not _alive(int(owner)):
            shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _storage(out_dir: Path, error: OSError) -> StorageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free some space there" if full else "choose a folder that can be written"
    return StorageError(f"cannot write the artifact to {out_dir}: {error.strerror or error}", remedy=remedy)
