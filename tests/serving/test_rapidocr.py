"""RapidOCR, whose two networks take images and texts of any size, on an agent instead of onnxruntime."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from examples.ocr import AgentSession, on_agent
from stageloom import Client
from stageloom.edge_agent.config import ModelFile
from tests.agent.process import AgentProcess

IMAGES = 30
WORDS = (
    "harbour",
    "copper",
    "signal",
    "meadow",
    "lantern",
    "quartz",
    "velvet",
    "timber",
    "orchid",
    "granite",
)


class _NotingSession(AgentSession):
    """The example's, which notes the shapes that it was asked for."""

    def __init__(self, client: Client, model: str) -> None:
        super().__init__(client, model)
        self.shapes: set[tuple[int, ...]] = set()

    def __call__(self, content: np.ndarray) -> np.ndarray:
        self.shapes.add(content.shape)
        return super().__call__(content)


def _served(name: str, file: Path, smallest: tuple[int, ...], largest: tuple[int, ...]) -> ModelFile:
    return ModelFile(path=str(file), name=name, shapes={"x": largest}, smallest={"x": smallest})


def _drawn(seed: int) -> tuple[np.ndarray, list[str]]:
    """An image of random size with one to four lines of text, and the lines."""
    rng = np.random.default_rng(seed)
    lines = [" ".join(rng.choice(WORDS, rng.integers(1, 4))) for _ in range(rng.integers(1, 5))]
    size = int(rng.integers(24, 40))
    font = ImageFont.load_default(size)
    widths = [font.getlength(line) for line in lines]
    width, height = int(max(widths)) + int(rng.integers(30, 120)), (len(lines) * 2 + 1) * size
    height = max(height, width // 2 + 1)  # the longer side is at most twice the other, as the range has it
    width = max(width, height // 2 + 1)
    image = Image.new("RGB", (width, height), "white")
    for number, line in enumerate(lines):
        ImageDraw.Draw(image).text((15, size * (2 * number + 1)), line, fill="black", font=font)
    return np.asarray(image), lines


def _read(pipeline: Any, images: list[np.ndarray]) -> list[tuple[Any, Any, Any]]:
    return [(found.txts, found.boxes, found.scores) for found in map(pipeline, images)]


@pytest.mark.full
@pytest.mark.promise("open-dimensions")
def test_rapidocr_reads_the_same_on_an_agent_as_on_onnxruntime(tmp_path: Path) -> None:
    """1. Its own sessions read 30 images. 2. Calls to an agent take their place. 3. All is equal."""
    package = importlib.import_module("rapidocr")
    folder = Path(str(package.__file__)).parent / "models"
    drawn = [_drawn(seed) for seed in range(IMAGES)]
    images = [image for image, _ in drawn]
    pipeline = package.RapidOCR(params={"Global.log_level": "error"})
    wanted = _read(pipeline, images)
    models = (
        _served("det", folder / "PP-OCRv6_det_small.onnx", (1, 3, 736, 736), (1, 3, 1472, 1472)),
        _served("rec", folder / "PP-OCRv6_rec_small.onnx", (1, 3, 48, 320), (6, 3, 48, 1600)),
    )
    with AgentProcess(tmp_path / "home", models=models) as agent, Client(agent.socket_when_ready()) as client:
        detector, recogniser = _NotingSession(client, "det"), _NotingSession(client, "rec")
        found = _read(on_agent(pipeline, detector, recogniser), images)
    for (texts, boxes, scores), (own_texts, own_boxes, own_scores) in zip(found, wanted, strict=True):
        assert texts == own_texts
        assert np.array_equal(boxes, own_boxes)
        assert scores == own_scores
    read = [line for texts, _, _ in found for line in texts or ()]
    lines = [line for _, own in drawn for line in own]
    assert sum(line in read for line in lines) > 0.8 * len(lines), "it reads what was drawn"
    assert min(len(detector.shapes), len(recogniser.shapes)) > 10
