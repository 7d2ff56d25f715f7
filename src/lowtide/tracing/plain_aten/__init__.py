"""Ops as a plain step runs them, where ATen takes another way under a dispatch mode."""
