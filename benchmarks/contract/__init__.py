"""The contract that every executor keeps: whatever the schedule, the results are the whole model's.

Every tensor that crosses a block border, under every kind of schedule, every mask of a combined block, in
batches, again and again with random delays, is compared with the whole model in onnxruntime. The tests
run it on small models; `python -m benchmarks.contract` runs all of it and says how large the differences
were.
"""
