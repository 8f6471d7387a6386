"""The twin against the engine that it is a twin of; run as `python -m benchmarks.twin`."""
