"""What tracing needs of torch that has no public door, in one place. Checked on torch 2.11 and 2.13."""

from __future__ import annotations

from typing import Any

import torch

autograd: Any = vars(torch._C)["_autograd"]  # saved-tensor hooks, sequence numbers, version counters, the profiler
