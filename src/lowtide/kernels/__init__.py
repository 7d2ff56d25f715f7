"""The same function twice: ``reference`` in plain torch is the truth, ``triton`` is fast on a GPU."""
