"""Fake kernels are replaced in one thread, and for the time alone."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.tracing.fake.kernel_dispatch import FakeKernels, replaced_kernels
from lowtide.tracing.fake.kernels import FIXES

aten = torch.ops.aten


def fake_storage(op):
    with FakeTensorMode():
        return op(torch.empty(100), torch.empty(100)).untyped_storage().nbytes()


def test_fake_tensors_answer_in_this_thread_alone_and_only_for_the_time():
    loss, answers = aten.mse_loss.default, replaced_kernels({}, FIXES)
    with answers, ThreadPoolExecutor(1) as others:
        assert fake_storage(loss) == 400
        assert others.submit(fake_storage, loss).result() == 4
        with replaced_kernels({}, {}):
            assert fake_storage(loss) == 4
        assert fake_storage(loss) == 400
    assert fake_storage(loss) == 4
    with pytest.raises(KeyError), replaced_kernels({}, FIXES):
        raise KeyError
    assert fake_storage(loss) == 4
    assert FakeTensorMode.dispatch.__module__.startswith("torch")


def test_a_mode_answers_corrects_and_leaves_updates_of_lists_out():
    answers = {aten.exp.default: lambda x: x.new_empty(7)}
    with FakeTensorMode(), FakeKernels(answers, {aten.sin.default: lambda out, x: x.new_empty(8)}):
        x = torch.ones(2)
        assert (x.exp().shape, x.sin().shape, x.cos().shape) == ((7,), (8,), (2,))
        assert torch._foreach_add_([x], 1) is not None
    with FakeTensorMode(), replaced_kernels({aten.exp.default: lambda x: x.exp().new_empty(7)}, {}):
        assert torch.ones(2).exp().shape == (7,)  # an answer may call the op itself
