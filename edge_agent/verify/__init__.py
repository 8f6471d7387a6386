"""Does a schedule compute what the model computes? Every block border and output is compared.

`seeding` gives weights that say nothing (all equal) values that do, `inputs` draws pairs of inputs,
`reference` runs the whole model in onnxruntime, `candidate` runs it through the engine, `compare` holds the
two numbers, `check` is the whole comparison and `command` what the command line calls.
"""
