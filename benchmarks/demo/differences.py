"""Sampled results against the original models in onnxruntime: how far off, and could it have failed?"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Arrays = Mapping[str, "np.ndarray[Any, Any]"]


def relative(value: "np.ndarray[Any, Any]", reference: "np.ndarray[Any, Any]") -> float:
    """Norm of the difference over norm of the reference; infinite where either is not finite."""
    wide = reference.astype(np.float64)
    difference = float(np.linalg.norm(value.astype(np.float64) - wide))
    norm = float(np.linalg.norm(wide))
    if not np.isfinite(difference) or not norm > 0.0:
        return float("inf")
    return difference / norm


def read_samples(path: Path) -> list[tuple[Arrays, Arrays]]:
    """The (inputs, outputs) pairs that a client process kept."""
    samples: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            index, side, name = key.split("|", 2)
            pair = samples.setdefault(int(index), ({}, {}))
            pair[0 if side == "in" else 1][name] = arrays[key]
    return [samples[index] for index in sorted(samples)]


def differences(model_path: Path, samples: list[tuple[Arrays, Arrays]]) -> tuple[float, float]:
    """(largest difference to onnxruntime, smallest relative change of an output over the best input pair)."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model_path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    difference = 0.0
    references: list[dict[str, Any]] = []
    for inputs, outputs in samples:
        reference = dict(zip(names, session.run(names, dict(inputs)), strict=True))
        difference = max([difference, *(relative(outputs[name], reference[name]) for name in names)])
        references.append(reference)
    changes = [
        min(relative(one[name], other[name]) for name in names)
        for index, one in enumerate(references)
        for other in references[:index]
    ]
    return difference, max(changes, default=0.0)
