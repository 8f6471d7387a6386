"""Importing a model: an ONNX file in, a content-addressed artifact and a report out.

No function here parses the file. A child process does that under limits (`stageloom.shared.importer.child`).
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from stageloom.shared.artifact import open_artifact
from stageloom.shared.errors import StorageError
from stageloom.shared.ids import Digest
from stageloom.shared.importer.process import (
    ARTIFACT_NAME,
    ImportLimits,
    Progress,
    limits_in_force,
    require_model_file,
    run_child,
)
from stageloom.shared.importer.report import ImportReport

SUFFIX = ".artifact"
_SCRATCH_PREFIX = ".import-"


def artifact_path(directory: Path, digest: Digest) -> Path:
    """Return the path that an artifact of that digest has in `directory`."""
    return directory / f"{digest}{SUFFIX}"


def import_model(
    path: Path,
    *,
    shapes: Mapping[str, Sequence[int]],
    out_dir: Path,
    smallest: Mapping[str, Sequence[int]] | None = None,
    limits: ImportLimits | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Import an ONNX file into `out_dir` as `<digest>.artifact`.

    Equal content gives the same digest and the same file, so importing twice changes nothing. `shapes` pins
    inputs whose dimensions the file leaves open. Those of `smallest` stay open: they take every shape from
    that one to the one of `shapes`. `progress` receives one short line per phase. A failed
    import leaves nothing behind. Without `limits` those that the environment sets hold.

    Raises:
        ModelError: the file cannot be imported; the message says why and what to do.
        UnpinnedShape: an input dimension has no number.
        SettingError: the environment sets limits that cannot be used.
        StorageError: `out_dir` cannot be written.
        DecodeError: the child wrote another artifact than it reports.
    """
    limits = limits or limits_in_force(os.environ)
    require_model_file(path, limits)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        _sweep(out_dir)
        scratch = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH_PREFIX}{os.getpid()}-", dir=out_dir))
    except OSError as error:
        raise _storage(out_dir, error) from error
    try:
        report = ImportReport.from_json(
            run_child(path, shapes, scratch, limits, progress or (lambda line: None), smallest=smallest)
        )
        # The child read a hostile file, so its artifact is checked before it is kept.
        open_artifact(scratch / ARTIFACT_NAME, report.digest)
        os.replace(scratch / ARTIFACT_NAME, artifact_path(out_dir, report.digest))
        return report
    except OSError as error:
        raise _storage(out_dir, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sweep(out_dir: Path) -> None:
    """Remove the scratch folders of imports whose process was killed."""
    for left in out_dir.glob(f"{_SCRATCH_PREFIX}*"):
        owner = left.name.removeprefix(_SCRATCH_PREFIX).partition("-")[0]
        if owner.isdecimal() and not _alive(int(owner)):
            shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


def _storage(out_dir: Path, error: OSError) -> StorageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free some space there" if full else "choose a folder that can be written"
    return StorageError(f"cannot write the artifact to {out_dir}: {error.strerror or error}", remedy=remedy)


def inspect_model(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    *,
    smallest: Mapping[str, Sequence[int]] | None = None,
    limits: ImportLimits | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Import into a folder that is deleted afterwards.

    Raises:
        ModelError, UnpinnedShape, SettingError, StorageError: as `import_model`.
    """
    with tempfile.TemporaryDirectory(prefix="stageloom-inspect-") as folder:
        return import_model(
            path, shapes=shapes, out_dir=Path(folder), smallest=smallest, limits=limits, progress=progress
        )


def list_inputs(path: Path, limits: ImportLimits | None = None) -> str:
    """Return the inputs that the file declares, like `'ids' (batchx128), 'scale' (scalar)`.

    The child process reads the file and checks nothing else of it.

    Raises:
        ModelError: the file cannot be read.
        SettingError: the environment sets limits that cannot be used.
        ExecutorError: onnx is not installed.
    """
    limits = limits or limits_in_force(os.environ)
    require_model_file(path, limits)
    with tempfile.TemporaryDirectory(prefix="stageloom-inputs-") as folder:
        result = run_child(path, {}, Path(folder), limits, lambda line: None, inputs_only=True)
    return str(result["inputs"])
