"""Run time: quantized weights in the user's module, and the graphs that use them."""
