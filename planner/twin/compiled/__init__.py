"""The twin compiled: `stageloom.planner.twin.reference` step by step, on arrays, hundreds of times as fast.

Import `stageloom.planner.twin.compiled.twin` where it is used: it brings in numba, which the planner starts
without.
"""
