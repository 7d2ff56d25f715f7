"""Shapes of batches: what a known peak says about others."""

import torch

from lowtide.engines.shapes import Bounds, Signature, is_within, modes_of, signature
from lowtide.workload import Workload


def shape(*sizes: int, dtype: torch.dtype = torch.float32) -> Signature:
    return signature({"x": torch.empty(sizes, dtype=dtype)})


def test_a_batch_is_within_another_if_no_dimension_is_larger() -> None:
    assert is_within(shape(4, 8), shape(4, 8))
    assert is_within(shape(3, 8), shape(4, 9))
    assert not is_within(shape(5, 8), shape(4, 9))
    assert not is_within(shape(4, 8, 1), shape(4, 8))
    assert not is_within(shape(4, 8), shape(4, 8, dtype=torch.float64))
    assert not is_within(signature([torch.ones(2)]), signature([torch.ones(2), torch.ones(2)]))


def test_bounds_answer_for_smaller_batches_that_fit_and_larger_ones_that_do_not() -> None:
    bounds = Bounds[str]()
    bounds.note(shape(4, 4), "fits", fits=True)
    bounds.note(shape(8, 8), "too large", fits=False)
    assert len(bounds) == 2
    assert [bounds.fit(shape(n, n)) for n in (3, 5, 9)] == ["fits", None, None]
    assert [bounds.excess(shape(n, n)) for n in (3, 5, 9)] == [None, None, "too large"]


def test_modes_and_trained_parameters_make_another_step() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    work = Workload(model, lambda model, x: model(x).sum(), torch.ones(1, 2))
    training = modes_of(work)
    model[1].eval()
    assert modes_of(work) != training
    model[1].train()
    assert modes_of(work) == training
    model[0].bias.requires_grad_(False)
    assert modes_of(work) != training
