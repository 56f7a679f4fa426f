"""Runnable examples; start them from the project's root: `python -m examples.chat`."""
