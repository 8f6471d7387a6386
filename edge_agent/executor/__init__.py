"""Executors: `base` is the interface, `registry` finds one by name, the rest are backends.

A backend's own packages are imported only when the registry loads it.
"""
