"""The contract that every executor keeps: whatever the schedule, the results are the whole model's.

`cases` has its plans and compares them with the whole model in onnxruntime; `schedules` draws legal ones.
"""
