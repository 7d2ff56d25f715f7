"""The loss captured as one graph of forward and backward."""
