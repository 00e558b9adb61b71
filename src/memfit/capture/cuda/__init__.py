"""Operators as a CUDA device runs them, traced on tensors of a CPU without memory."""
