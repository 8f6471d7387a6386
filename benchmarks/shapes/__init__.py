"""The shapes of TOP's figures 18, 20 and 24 to 27 on the twin; see `__main__`."""
