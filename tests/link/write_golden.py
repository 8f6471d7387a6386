"""Rewrites the golden files: `python -m tests.link.write_golden`.

Only for a new message type. A golden file that changes means that peers in the field no longer understand
each other: a changed meaning is a new message.
"""

from pathlib import Path

from stageloom.shared.codec import PLAIN
from stageloom.shared.messages import telemetry
from tests.link.samples import MESSAGES, ROWS
from tests.link.test_messages import GOLDEN, _codec_for


def write_golden(folder: Path) -> None:
    """One file of hexadecimal lines per message type and row kind."""
    frames = {
        type(message).__name__: PLAIN + _codec_for(message).encode_body(message) for message in MESSAGES
    }
    for data in ROWS:
        row = telemetry.Row(1_700_000_000_000_000, data)
        frames[f"row.{type(data).__name__}"] = telemetry.encode_row(row)
    folder.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        text = frame.hex()
        lines = [text[at : at + 100] for at in range(0, len(text), 100)]
        (folder / f"{name}.hex").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_golden(GOLDEN)
