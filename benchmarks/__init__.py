"""Measurements that stay out of CI; start them from the project's root: `python -m benchmarks.perplexity`."""
