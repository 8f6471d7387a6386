"""Our lowering of a normalised ONNX model to torch functions; imported once the torch executor is chosen.

dtypes     element types, precisions, the process-wide arithmetic mode
weights    constants on the device, once per model
node       what a lowering function sees of its node, and what it returns
registry   operator type -> lowering function; `families/` holds them
trace      nodes to kernels in order: constants folded, shapes and memory order by meta tensors
program    a straight line of kernels over registers, with or without output buffers
unit       what an executor runs: one per operator of the graph
model      an artifact lowered: `ModelLowering`, `LoweredModel`
foreign    operators that run in onnxruntime instead
"""
