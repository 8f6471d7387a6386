"""Block borders that an ONNX file carries, as metadata under the key `stageloom.blocks`.

The value is JSON: `{"version": 1, "borders": [["t1"], ["t2", "t3"], ...], "body": ["pool"]}`. Each border
names tensors; everything they are computed from lies before it, everything else after. Each border must hold
the one before. `body` (optional) names the tensors where the network's body ends: operators that none of them
needs are the classifier, which the papers' counts leave out.
"""

import json
from dataclasses import dataclass

from stageloom.shared.errors import ModelError

METADATA_KEY = "stageloom.blocks"
_VERSION = 1
_MAX_CHARS = 1 << 20


@dataclass(frozen=True)
class Borders:
    """Tensor names per border, in order, and where the body ends (empty: there is no classifier)."""

    borders: tuple[tuple[str, ...], ...] = ()
    body: tuple[str, ...] = ()


def parse_borders(text: str) -> Borders:
    """Read the metadata value.

    Raises:
        ModelError: it is not the documented JSON.
    """
    try:
        if len(text) > _MAX_CHARS:
            raise ValueError(f"longer than {_MAX_CHARS} characters")
        value = json.loads(text)
        if not isinstance(value, dict) or value.get("version") != _VERSION:
            raise ValueError(f"not an object of version {_VERSION}")
        borders = tuple(_names(names) for names in value.get("borders", []))
        return Borders(borders, _names(value.get("body", [])))
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelError(
            f"metadata {METADATA_KEY!r} is unreadable: {error}", remedy="correct or remove that entry"
        ) from error


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("a border is a list of tensor names")
    return tuple(value)
