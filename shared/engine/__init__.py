"""The engine core: queues, launcher, slots, step choice and swaps as pure decisions.

`steps` holds what passes between the core, its shell and an executor; `core` decides.
"""
