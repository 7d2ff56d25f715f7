"""Kernels in Triton. Importing this needs triton; nothing here is imported before it is used."""
