"""How a comparison and a benchmark end when told to: with what they know, and nothing left running."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def ended_politely() -> Iterator[None]:
    """SIGTERM ends the block as an error does, and so does SIGHUP unless it is ignored, as under `nohup`:
    suspended contestants would stay for ever."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    wanted = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
