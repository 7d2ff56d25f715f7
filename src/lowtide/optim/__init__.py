"""Changes to optimizers: states in 8 bits or on the host, steps inside backward, 16-bit weights, larger batches.

    undo = lowtide.optim.lower_state(optimizer, "8bit")      # torch's Adam, AdamW or SGD, in place
    undo = lowtide.optim.step_in_backward(optimizer)         # gradients are never all alive
    undo = lowtide.optim.round_updates(optimizer)            # bfloat16 weights without a master copy
    undo = lowtide.optim.store_gradients(optimizer, "8bit")  # between backward and step
    undo = lowtide.optim.scale_rates(optimizer, 16, warmup_steps=500)  # a batch 16 times as large

The optimizer stays the same object, so loops, schedulers and checkpoints keep working.
"""

from lowtide.optim.adamw8bit import AdamW8bit
from lowtide.optim.gradients import store_gradients
from lowtide.optim.in_backward import step_in_backward
from lowtide.optim.large_batch import lamb, lars, scale_batch, scale_rates
from lowtide.optim.rounding import round_stochastically, round_updates
from lowtide.optim.scaling import LossScale
from lowtide.optim.state import lower_state

__all__ = [
    "AdamW8bit",
    "LossScale",
    "lamb",
    "lars",
    "lower_state",
    "round_stochastically",
    "round_updates",
    "scale_batch",
    "scale_rates",
    "step_in_backward",
    "store_gradients",
]
