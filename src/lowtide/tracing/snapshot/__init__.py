"""Look at a step and change nothing: which tensors it holds, and how they are restored."""
