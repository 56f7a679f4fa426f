"""What helps to test programs that use fxquant. Nothing in fxquant imports it."""
