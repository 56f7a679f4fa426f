"""The parts of `python -m benchmarks.accuracy`. Nothing here imports fxquant in a process of a peer."""
