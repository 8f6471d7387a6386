"""The executors that run models through our own lowering to torch: `torch_cuda` and `torch_cpu`.

docs/executors.md tells how a schedule becomes streams, buffers and graphs. From pure to impure:
`on_device` and `issue_order` decide; `layout` says where every tensor of a
program lies; `program` joins that with kernels; `cuda` holds every call that needs a device.
"""
