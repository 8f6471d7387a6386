"""Seeded ONNX files of the networks that the papers measure, made without any framework or download.

`python -m benchmarks.zoo OUT_DIR [--model NAME]... [--width 0.25] [--json]`

One module per family; `net` holds what they share. All end in logits. BatchNorm is folded: every convolution
that has one carries a bias. Each file carries the borders of the papers' blocks as metadata
`stageloom.blocks`; see `stageloom.shared.importer.cuts` for the format.
"""

from benchmarks.zoo.catalogue import ZOO, build, parameters, write

__all__ = ["ZOO", "build", "parameters", "write"]
