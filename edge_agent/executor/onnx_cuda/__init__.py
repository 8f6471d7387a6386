"""`onnx_cuda`: onnxruntime's CUDA provider, one session per stream, tensors resident on the device.

`recipe` says which session runs on which stream and where tensors lie, `sessions` makes and times sessions,
`executor` loads plans, and `cuda` holds every call that needs a device. docs/executors.md tells what is
ordered by what.
"""
