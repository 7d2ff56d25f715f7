"""Seconds of ops in compiled code: elementwise ops run inside the kernel of their reader, and cost nothing alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from lowtide.compat.operators import name_of
from lowtide.planning.programs.in_place import is_elementwise
from lowtide.tracing.capture.joint import Joint, viewed

_FUSED = frozenset((
    "aten::_to_copy", "aten::clone", "aten::native_layer_norm", "aten::native_group_norm", "aten::cat",
    "aten::constant_pad_nd", "aten::where", "aten::full", "aten::arange", "aten::scalar_tensor",
    "lowtide::dropout_mask", "lowtide::batchnorm_activation",
))  # fmt: skip
_READERS = frozenset(("aten::native_layer_norm_backward", "aten::native_group_norm_backward", "aten::sum",
                      "aten::native_batch_norm_backward", "aten::_softmax_backward_data"))  # fmt: skip


def is_fused(node: fx.Node) -> bool:
    """Whether a compiler computes an op inside the kernel that reads its result."""
    return node.op == "call_function" and (is_elementwise(node) or name_of(node.target) in _FUSED)


def fused_seconds(joint: Joint, seconds: Callable[[fx.Node], float]) -> Callable[[fx.Node], float]:
    """Seconds of each op in compiled code, from its seconds alone.

    A fused op whose readers are all fused writes nothing. Any other op takes as long as alone.
    """
    return lambda node: 0.0 if is_fused(node) and all(map(_fuses_inputs, readers(node))) else seconds(node)


def is_free(joint: Joint, node: fx.Node) -> bool:
    """Whether recomputing a result for backward costs nothing: only fused ops read it there."""
    return is_fused(node) and all(map(_fuses_inputs, (each for each in readers(node) if not joint.is_forward(each))))


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Ops that read a result, also through views."""
    for user in node.users:
        if viewed(user) is not None:
            yield from readers(user)
        else:
            yield user


def _fuses_inputs(node: fx.Node) -> bool:
    return is_fused(node) or (node.op == "call_function" and name_of(node.target) in _READERS)
