"""Executors: `base` is the interface, `executors` finds one by name, the rest are backends.

A backend's own packages are imported only when `make_executor` loads it.
"""
