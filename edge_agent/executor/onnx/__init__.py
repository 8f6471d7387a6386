"""Executors that run a plan's items as sessions on sub-models of the ONNX file.

For any backend: `parts` cuts sub-models, `program` says which sessions a combined block runs, `cache` makes
each once, `timing` times operators, `session_executor` runs plans with tensors by reference. `executor` is
onnxruntime's part.
"""
