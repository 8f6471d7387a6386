"""The twin compiled: `planner.twin.reference` step by step, on arrays, hundreds of times as fast.

Import `planner.twin.compiled.twin` where it is used: it brings in numba, which the planner starts without.
"""
