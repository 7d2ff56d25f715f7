"""Layers that need less memory, to be used in place of torch's own."""

from lowtide.nn.batchnorm import BatchNormAct1d, BatchNormAct2d, BatchNormAct3d
from lowtide.nn.chunked_loss import LinearCrossEntropy, linear_cross_entropy
from lowtide.nn.compress import compressed
from lowtide.nn.fewbit import FewBit
from lowtide.nn.functional import batch_norm_act
from lowtide.nn.randomized import RandomizedLinear
from lowtide.nn.renorm import BatchRenormAct1d, BatchRenormAct2d, BatchRenormAct3d
from lowtide.nn.scopes import keep_one_buffer

__all__ = [
    "BatchNormAct1d",
    "BatchNormAct2d",
    "BatchNormAct3d",
    "BatchRenormAct1d",
    "BatchRenormAct2d",
    "BatchRenormAct3d",
    "FewBit",
    "LinearCrossEntropy",
    "RandomizedLinear",
    "batch_norm_act",
    "compressed",
    "keep_one_buffer",
    "linear_cross_entropy",
]
