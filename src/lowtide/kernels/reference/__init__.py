"""Kernels in plain torch: the truth that the fast ones are compared with, and what a CPU runs."""
