"""A camera's loop over HTTP: the newest frame is worth something, an old one nothing.

    python -m examples.camera URL MODEL [--frames 100] [--rate 15] [--deadline-ms 100]

Frames come from a source of their own at a steady pace; here it draws them. The loop holds one frame at most:
one that comes while the last is still being looked at takes the place of what waits. `timeout` and `priority`
are the request parameters of Triton that an agent understands as deadline and priority. Needs
`pip install 'tritonclient[http]'`.
"""

import argparse
import threading
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, triton_to_np_dtype

Frame = np.ndarray


class NewestFrame:
    """One place for a frame: a new one drives out the one that waits there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frame: Frame | None = None
        self._ended = False
        self.driven_out = 0

    def put(self, frame: Frame) -> None:
        with self._changed:
            self.driven_out += self._frame is not None
            self._frame = frame
            self._changed.notify()

    def end(self) -> None:
        """What waits is still handed out; then there is nothing more."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def __iter__(self) -> Iterator[Frame]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._frame is not None or self._ended)
                frame, self._frame = self._frame, None
            if frame is None:
                return
            yield frame


def film(place: NewestFrame, shape: tuple[int, ...], dtype: np.dtype, frames: int, rate: float) -> None:
    """Put frames of noise at a steady pace, as a camera's driver would."""
    rng = np.random.default_rng(0)
    start_s = time.monotonic()
    for number in range(frames):
        time.sleep(max(start_s + number / rate - time.monotonic(), 0.0))
        place.put(rng.random(shape).astype(dtype))
    place.end()


def look(
    client: triton.InferenceServerClient, model: str, name: str, frame: Frame, deadline_ms: float
) -> str:
    """How it went with a frame: `seen`, `late`, or what the server says."""
    content = triton.InferInput(name, list(frame.shape), np_to_triton_dtype(frame.dtype))
    content.set_data_from_numpy(frame)
    try:
        # `timeout` is in microseconds; the agent drops a frame that cannot be looked at in time.
        client.infer(model, [content], timeout=int(1000 * deadline_ms), priority=1)
    except InferenceServerException as error:
        return "late" if "timeout expired" in str(error) else str(error)  # Triton's words
    return "seen"


def main() -> None:
    parser = argparse.ArgumentParser(description="Look at the newest frame of a camera, over HTTP.")
    parser.add_argument("url", help="HOST:PORT of an agent's --http")
    parser.add_argument("model")
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--rate", type=float, default=15.0, help="frames a second")
    parser.add_argument(
        "--deadline-ms", type=float, default=100.0, help="milliseconds that a frame is worth anything"
    )
    options = parser.parse_args()
    ended: Counter[str] = Counter()
    try:
        with triton.InferenceServerClient(options.url) as client:
            (tensor,) = client.get_model_metadata(options.model)["inputs"]
            shape = tuple(max(int(size), 1) for size in tensor["shape"])
            dtype = np.dtype(triton_to_np_dtype(tensor["datatype"]))
            place = NewestFrame()
            threading.Thread(
                target=film, args=(place, shape, dtype, options.frames, options.rate), daemon=True
            ).start()
            for frame in place:
                ended[look(client, options.model, tensor["name"], frame, options.deadline_ms)] += 1
    except (InferenceServerException, OSError) as error:
        raise SystemExit(f"error: {options.url}: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    ended["replaced by a newer one"] = place.driven_out
    print(", ".join(f"{number} {word}" for word, number in ended.most_common() if number))


if __name__ == "__main__":
    main()
