"""A step on fake tensors: nothing is allocated or computed."""
