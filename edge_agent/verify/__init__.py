"""Does a schedule compute what the model computes? Every block border and output is compared.

`seeding` replaces uniform weights, `inputs` draws pairs of inputs, `pairs` chooses one and runs the whole
model in onnxruntime, `analysis` finds tensors that are hard to compare, `standards` decides what agrees,
`engine_run` runs the model through the engine, and `check` is the whole comparison.
"""
