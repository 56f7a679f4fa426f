"""Kernels of the simulated device, over host memory."""
