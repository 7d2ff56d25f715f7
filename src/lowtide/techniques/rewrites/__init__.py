"""Rewrites of a captured graph: a pattern of ops, replaced by another."""
