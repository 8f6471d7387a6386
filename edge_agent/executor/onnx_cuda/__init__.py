"""`onnx_cuda`: onnxruntime's CUDA provider, one session per stream, tensors resident on the device.

From pure to impure: `recipe` says which session runs on which stream after what, and where every tensor lies;
`memory` is a plan's memory on a device; `sessions` makes sessions; `executor` issues steps; `cuda` holds all
calls that need a device. docs/executors.md tells what is ordered by what.
"""
