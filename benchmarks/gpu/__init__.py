"""Our executor on one GPU beside every rival: `python -m benchmarks.gpu`; see `__main__`."""
