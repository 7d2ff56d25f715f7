"""Microbatch: a batch in pieces, forward and backward one after the other, so that one piece's activations live."""

from lowtide.techniques.microbatch.loss import MicrobatchLoss, microbatch

__all__ = ["MicrobatchLoss", "microbatch"]
