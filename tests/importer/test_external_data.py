"""External data is read by our own rules: it cannot leave the model's folder; what was checked is used."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from stageloom.shared.errors import ModelError, NotNow
from stageloom.shared.importer.api import import_model
from stageloom.shared.importer.process import ImportLimits
from stageloom.shared.importer.source import read_model
from tests.importer.models import info, model_of, write_external

LIMITS = ImportLimits()
WEIGHT = np.arange(16, dtype=np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder beside a file that is none of its business."""
    (tmp_path / "secret.bin").write_bytes(WEIGHT.tobytes())
    inner = tmp_path / "model"
    inner.mkdir()
    (inner / "w.bin").write_bytes(WEIGHT.tobytes())
    return inner


def test_plain_data_beside_the_model_is_embedded(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "w.bin").rename(folder / "data/w.bin")
    model = read_model(write_external(folder, "data/w.bin", offset=0, length=64), LIMITS)
    (weight,) = model.graph.initializer
    assert weight.raw_data == WEIGHT.tobytes()
    assert not weight.external_data and weight.data_location == TensorProto.DEFAULT


@pytest.mark.promise("external-data-leaves-model")
@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("../secret.bin", "leaves the model's folder"),
        ("a/../../secret.bin", "leaves the model's folder"),
        ("/etc/hostname", "absolute path"),
        ("", "not a plain relative path"),
        (".", "leaves the model's folder"),
        ("absent.bin", "cannot be opened"),
        ("w.bin\0.png", "not a plain relative path"),
        ("..\\secret.bin", "not a plain relative path"),
    ],
)
def test_a_location_outside_the_folder_is_refused(folder: Path, location: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read_model(write_external(folder, location), LIMITS)


@pytest.mark.promise("external-data-leaves-model")
def test_a_symbolic_link_is_refused(folder: Path) -> None:
    (folder / "link.bin").symlink_to(folder.parent / "secret.bin")
    with pytest.raises(ModelError, match="goes through a link"):
        read_model(write_external(folder, "link.bin"), LIMITS)


@pytest.mark.promise("external-data-leaves-model")
def test_a_linked_folder_on_the_way_is_refused(folder: Path) -> None:
    (folder / "data").symlink_to(folder.parent)
    with pytest.raises(ModelError, match="goes through a link"):
        read_model(write_external(folder, "data/secret.bin"), LIMITS)


@pytest.mark.promise("external-data-leaves-model")
def test_a_hard_link_is_refused(folder: Path) -> None:
    os.link(folder.parent / "secret.bin", folder / "hard.bin")
    with pytest.raises(ModelError, match="it is a hard link, the file has 2 names"):
        read_model(write_external(folder, "hard.bin"), LIMITS)


def test_what_is_no_regular_file_is_refused_without_waiting(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(ModelError, match="not a regular file"):
        read_model(write_external(folder, "pipe"), LIMITS)


@pytest.mark.promise("external-data-leaves-model")
@pytest.mark.parametrize(
    ("offset", "length"), [(0, 65), (64, 1), (-4, 4), (60, 8), (0, 2**62), (2**62, 4), ("x", 4)]
)
def test_a_range_outside_the_file_is_refused(folder: Path, offset: int | str, length: int) -> None:
    with pytest.raises(ModelError, match=r"lie outside its 64 bytes|no number"):
        read_model(write_external(folder, "w.bin", offset=offset, length=length), LIMITS)


def test_a_folder_that_may_be_searched_need_not_be_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mode 0711 does not refuse root, so that the call is refused as the kernel would."""
    (folder / "data").mkdir()
    (folder / "w.bin").rename(folder / "data/w.bin")
    path = write_external(folder, "data/w.bin")
    usual = os.open

    def unlisted(path: str | Path, flags: int, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECTORY and not flags & os.O_PATH:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return usual(path, flags, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", unlisted)
    (weight,) = read_model(path, LIMITS).graph.initializer
    assert weight.raw_data == WEIGHT.tobytes()


@pytest.mark.parametrize(("place", "call"), [(Path, "read_bytes"), (os, "fdopen")], ids=["model", "weights"])
def test_a_disk_that_fails_while_a_model_is_read_is_told_of_the_model(
    place: Any, call: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_external(folder, "w.bin")

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(place, call, fails)
    with pytest.raises(NotNow, match=r"cannot read model\.onnx with its external data: Input/output error"):
        read_model(path, LIMITS)


_UNREAD = Path("/sys/class/net/lo/speed")
"""A regular file with a size, of which the kernel refuses every read: no loop has a speed."""


@pytest.mark.skipif(not _UNREAD.exists(), reason="looks for a file in /sys")
def test_a_file_that_its_disk_does_not_give_now_may_be_imported_later(tmp_path: Path) -> None:
    with pytest.raises(NotNow, match="cannot read speed with its external data: Invalid argument"):
        import_model(_UNREAD, shapes={}, out_dir=tmp_path / "out")


def test_external_data_counts_against_the_size_limit(folder: Path) -> None:
    path = write_external(folder, "w.bin")
    with pytest.raises(ModelError, match="exceed the limit of file_bytes"):
        read_model(path, ImportLimits(file_bytes=path.stat().st_size + 63))


def test_external_data_in_a_sub_graph_follows_the_same_rules(folder: Path) -> None:
    bad = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    entry = bad.external_data.add()
    entry.key, entry.value = "location", "../secret.bin"
    branch = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["o"])], "b", [], [info("o", [4])], initializer=[bad]
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    model = model_of([node], [info("c", [], TensorProto.BOOL)], [info("y", [4])])
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="leaves the model's folder"):
        read_model(path, LIMITS)


@pytest.mark.promise("old-files-gain-phantom")
def test_swapping_the_weights_file_changes_the_digest(folder: Path, tmp_path: Path) -> None:
    path = write_external(folder, "w.bin")
    before = import_model(path, shapes={}, out_dir=tmp_path / "out")
    (folder / "w.bin").write_bytes((WEIGHT + 1).tobytes())
    after = import_model(path, shapes={}, out_dir=tmp_path / "out")
    assert before.digest != after.digest
    assert before.parameters == after.parameters == 16


def test_embedded_and_external_weights_give_the_same_artifact(folder: Path, tmp_path: Path) -> None:
    path = write_external(folder, "w.bin")
    external = import_model(path, shapes={}, out_dir=tmp_path / "out")
    embedded = onnx.load(path)
    path.write_bytes(embedded.SerializeToString())
    assert import_model(path, shapes={}, out_dir=tmp_path / "out").digest == external.digest
