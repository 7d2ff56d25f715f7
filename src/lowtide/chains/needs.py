"""The bytes that parts of a chain need, beyond the part's input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.chains.chain import Chain
from lowtide.errors import LowtideError


class Needs:
    """For every part of a chain, stages s to t with backward: what it needs at least to run in a given way.

    The part's own input is not counted: whoever runs the part holds it. While stages run forward the gradient of
    value t + 1 waits, and what the stages behind t left, except in parts that reach the end of the chain, which run
    forward before there is any.

        keeping[s, t]   keep everything of stage s: its forward, and its backward once s + 1 to t are done
        lightly[s, t]   the same without what is cheap
        passed[s, j]    run forward from s to j once, keeping nothing but the input of s; without what waits
        waiting[t]      what waits
        whole[s, t]     keep everything of all stages

    ``segment_ends[s]`` is one past the last stage that can be passed over together with stage s, which is the first:
    s itself where everything of s must be kept. By default all can.
    """

    def __init__(self, chain: Chain, segment_ends: Sequence[int] = ()) -> None:
        self.chain = chain
        self.segment_ends = tuple(segment_ends) or (chain.stages,) * chain.stages
        if len(self.segment_ends) != chain.stages or any(end < s for s, end in enumerate(self.segment_ends)):
            raise LowtideError(
                f"segment_ends of a chain of {chain.stages} stages has one for each, none before its stage: "
                f"{self.segment_ends}"
            )
        self.values = np.array(chain.value_bytes, np.int64)
        self.saved = np.array(chain.saved_bytes, np.int64)
        self.light = np.array(chain.light_bytes, np.int64)
        self.light_seconds = np.array(chain.light_seconds)
        self.seconds = np.concatenate([[0.0], np.cumsum(chain.forward_seconds)])  # of all stages before one
        self.tails = np.array(chain.tail_seconds)
        forward, passing, backward, light_backward, left = (
            np.array(sizes, np.int64)
            for sizes in (
                chain.forward_temporary_bytes,
                chain.passing_temporary_bytes,
                chain.backward_temporary_bytes,
                chain.light_temporary_bytes,
                chain.left_bytes,
            )
        )
        gradient = np.array(chain.gradient_bytes, np.int64)
        behind = np.append(np.cumsum(left[::-1])[::-1], 0)  # what a stage and those behind it leave
        self.waiting = np.append(gradient[1:-1], 0) + behind[1:]
        self.has_light = bool(((self.light < self.saved) | (light_backward < backward)).any())
        backward += gradient[:-1] + gradient[1:] + behind[:-1]
        light_backward += gradient[:-1] + gradient[1:] + behind[:-1]
        ends = np.concatenate([[0], np.cumsum(self.saved)])

        stages, waiting = chain.stages, self.waiting
        self.keeping, self.lightly, self.passed, self.whole = (np.zeros((stages, stages), np.int64) for _ in range(4))
        for s in range(stages):
            self.keeping[s, s:] = self.saved[s] + np.maximum(waiting[s:] + forward[s], backward[s])
            self.lightly[s, s:] = self.light[s] + np.maximum(waiting[s:] + forward[s], light_backward[s])
            inputs = np.append(0, self.values[s + 1 : -1])
            self.passed[s, s:] = np.maximum.accumulate(inputs + self.values[s + 1 :] + passing[s:])
            held = ends[s + 1 :] - ends[s]
            self.whole[s, s:] = np.maximum(
                waiting[s:] + np.maximum.accumulate(held + forward[s:]), np.maximum.accumulate(held + backward[s:])
            )
