"""Our lowering of a normalised ONNX model to torch functions; imported once the torch executor is chosen.

dtypes     element types, precisions, the process-wide arithmetic mode
weights    constants on the device, once per model
node       what a lowering function sees of its node, and what it returns
registry   operator type -> lowering function; `families/` holds them
trace      nodes to kernels in order: constants folded, shapes and memory order by meta tensors
program    a straight line of kernels over registers, with or without output buffers
unit       what an executor runs: one per operator of the graph, or for several
kernels    further kernels for a convolution with what follows it
foreign    operators that run in onnxruntime instead
batch      one model at one batch: its units, and units of several operators
merge      a merge stage as one convolution
model      an artifact lowered: `ModelLowering`, the entrance for executors
whole      a raw ONNX file through the same functions, for conformance
"""
