"""Lowerings: from a program to code that runs."""
