"""Layers that need less memory, to be used in place of torch's own."""

from lowtide.nn.batchnorm import BatchNormAct1d, BatchNormAct2d, BatchNormAct3d
from lowtide.nn.functional import batch_norm_act
from lowtide.nn.rebuild import keep_one_buffer
from lowtide.nn.renorm import BatchRenormAct1d, BatchRenormAct2d, BatchRenormAct3d

__all__ = [
    "BatchNormAct1d",
    "BatchNormAct2d",
    "BatchNormAct3d",
    "BatchRenormAct1d",
    "BatchRenormAct2d",
    "BatchRenormAct3d",
    "batch_norm_act",
    "keep_one_buffer",
]
