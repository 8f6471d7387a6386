"""Tables and figures of five papers, reproduced or refuted by one command: `python -m benchmarks.paper`."""
