"""Solvers: from a captured graph to the programs that are worth a look."""
