"""Every scheduler on every network; see `__main__.py`."""
