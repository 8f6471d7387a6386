"""RapidOCR's pipeline with its two networks on an agent instead of in its own process.

    stageloom-agent run --model det=DET.onnx:x=1x3x736x736..1x3x1472x1472 \\
                        --model rec=REC.onnx:x=1..6x3x48x320..1600
    python -m examples.ocr IMAGE...

The pipeline keeps what it is good at, cutting lines out of an image and decoding; every process that reads
images shares the networks' sessions, and the agent decides whose turn it is. Needs `pip install rapidocr`.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from stageloom import Client
from stageloom.shared.errors import StageloomError


class AgentSession:
    """What RapidOCR calls in place of a session of onnxruntime: one input `x`, one output."""

    def __init__(self, client: Client, model: str, timeout_s: float = 120.0) -> None:
        self._client = client
        self._model = model
        self._timeout_s = timeout_s

    def __call__(self, content: np.ndarray) -> np.ndarray:
        """The network's output.

        Raises:
            StageloomError: the agent refuses the shape, or does not answer in time.
        """
        made: np.ndarray
        (made,) = self._client.run(self._model, {"x": content}, timeout_s=self._timeout_s).values()
        return made


def on_agent(pipeline: Any, detector: Any, recogniser: Any) -> Any:
    """The pipeline of RapidOCR, calling these instead of its own sessions."""
    pipeline.text_det.session, pipeline.text_rec.session = detector, recogniser
    return pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description="Read the text of images; the networks run on an agent.")
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE")
    parser.add_argument("--detector", default="det", help="its name on the agent")
    parser.add_argument("--recogniser", default="rec", help="its name on the agent")
    options = parser.parse_args()
    if missing := [str(path) for path in options.images if not path.is_file()]:
        raise SystemExit(f"error: there is no {', '.join(missing)}")
    try:
        from rapidocr import RapidOCR
    except ImportError:
        raise SystemExit("error: rapidocr is missing; `pip install rapidocr`") from None
    try:
        with Client() as client:
            sessions = [AgentSession(client, name) for name in (options.detector, options.recogniser)]
            pipeline = on_agent(RapidOCR(params={"Global.log_level": "error"}), *sessions)
            for path in options.images:
                for text, score in _lines(pipeline(str(path))):
                    print(f"{path}: {text}  ({score:.2f})")
    except StageloomError as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _lines(found: Any) -> list[tuple[str, float]]:
    return list(zip(found.txts or (), found.scores or (), strict=True))


if __name__ == "__main__":
    main()
