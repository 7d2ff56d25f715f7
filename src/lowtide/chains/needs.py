"""The bytes that parts of a chain need, beyond the part's input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.chains.chain import Chain
from lowtide.errors import LowtideError


class Needs:
    """For every part of a chain, stages s to t with backward: what it needs at least to run in a given way.

    The part's own input is not counted: whoever runs the part holds it. While stages run forward the gradient of
    value t + 1 waits, except in parts that reach the end of the chain, which run forward before there is one.

        keeping[s, t]   keep everything of stage s: its forward, and its backward once s + 1 to t are done
        passing[s, t]   run forward from s to t once, keeping nothing but the input of s
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
        self.seconds = np.concatenate([[0.0], np.cumsum(chain.forward_seconds)])  # of all stages before one
        self.tails = np.array(chain.tail_seconds)
        forward = np.array(chain.forward_temporary_bytes, np.int64)
        gradient = np.array(chain.gradient_bytes, np.int64)
        backward = gradient[:-1] + gradient[1:] + np.array(chain.backward_temporary_bytes, np.int64)
        waiting = np.append(gradient[1:-1], 0)
        ends = np.concatenate([[0], np.cumsum(self.saved)])

        stages = chain.stages
        self.keeping = np.zeros((stages, stages), np.int64)
        self.passing = np.zeros((stages, stages), np.int64)
        self.whole = np.zeros((stages, stages), np.int64)
        stage = self.values[:-1] + self.values[1:] + forward
        for s in range(stages):
            self.keeping[s, s:] = self.saved[s] + np.maximum(waiting[s:] + forward[s], backward[s])
            passed = np.maximum.accumulate(np.append(self.values[s + 1] + forward[s], stage[s + 1 : -1]))
            self.passing[s, s + 1 :] = waiting[s + 1 :] + passed[: stages - s - 1]
            held = ends[s + 1 :] - ends[s]
            self.whole[s, s:] = np.maximum(
                waiting[s:] + np.maximum.accumulate(held + forward[s:]), np.maximum.accumulate(held + backward[s:])
            )
