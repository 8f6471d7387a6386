"""The executors that run models through our own lowering to torch: `torch_cuda` and `torch_cpu`.

`recipe` makes calls of lowered units, `memory` binds them to buffers, `kernels` and `builder` measure and
capture, and `cuda` holds every call that needs a device. docs/executors.md tells how a schedule becomes
streams, buffers and graphs.
"""
