"""Lower a normalised ONNX model to torch functions; imported once the torch executor is chosen.

dtypes     element types, precisions, the process-wide arithmetic mode
node       a node as its lowering function in `families/` sees it, constants on the device, the registry
trace      nodes to kernels in order: constants folded, shapes and memory order by meta tensors
program    a straight line of kernels over registers; units, which executors run
kernels    further kernels for a convolution with what follows it
batch      one model at one batch: its units, also of several operators or in onnxruntime
model      an artifact lowered: `ModelLowering`, the entrance for executors; merge stages
"""
