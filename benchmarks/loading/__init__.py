"""The parts of `python -m benchmarks.load`. Nothing here imports fxquant before a case of fxquant runs."""
