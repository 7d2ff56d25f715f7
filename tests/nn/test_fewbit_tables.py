"""Tables of few slopes are the best there are, for a density or for samples."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from lowtide.errors import LowtideError
from lowtide.kernels.activations import CURVES, Activation
from lowtide.nn.fewbit_tables import BITS, DATA, Normal, Samples, Uniform, find_table, find_tables, table_of
from tests.nn.raising import raises
from tests.soak import in_soak


def density(x):
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize(("bits", "rmse"), [(1, 0.1961), (2, 0.0894), (3, 0.0437), (4, 0.0243)])
def test_gelu_is_as_near_as_can_be(bits, rmse):
    table = table_of(Activation.pointwise("gelu"), bits)
    assert round(table.rmse, 4) == rmse
    # The error that the table really has, by a plain sum over a fine grid.
    x = torch.linspace(-12, 12, 2_000_001, dtype=torch.float64)
    q = torch.tensor(table.levels, dtype=torch.float64)[torch.bucketize(x, torch.tensor(table.boundaries).double())]
    error = (Activation.pointwise("gelu").slope(x) - q).numpy() ** 2 * density(x.numpy())
    assert math.sqrt(error.sum() * 24 / 2_000_000) == pytest.approx(table.rmse, rel=1e-3)


@pytest.mark.parametrize("name", CURVES)
def test_shipped_tables_are_those_that_the_program_makes(name):
    stored = json.loads(DATA.read_text())
    for bits, built in zip((1, 3), find_tables(Activation.pointwise(name), (1, 3), Normal()), strict=True):
        entry = stored[f"{name}/{bits}"]
        assert entry["rmse"] == pytest.approx(built.rmse, rel=1e-5)
        np.testing.assert_allclose(entry["levels"], built.levels, atol=1e-4)
        np.testing.assert_allclose(entry["boundaries"], built.boundaries, atol=1e-3)  # an optimum is flat there


@pytest.mark.parametrize("name", CURVES)
def test_every_bit_more_is_nearer(name):
    errors = [table_of(Activation.pointwise(name), bits).rmse for bits in BITS]
    assert all(after < 0.62 * before for before, after in itertools.pairwise(errors))


@pytest.mark.parametrize("name", ["gelu", "selu", *in_soak(["hardswish", "tanhshrink"])])
def test_no_other_boundaries_are_better(name):
    """Against scipy's own search from the table, and from places around it."""
    from scipy.optimize import minimize

    curve, table = Activation.pointwise(name), table_of(Activation.pointwise(name), 2)
    x = np.linspace(-9, 9, 18_001)
    slope, w = curve.slope(torch.from_numpy(x)).numpy(), density(x) * (x[1] - x[0])

    def error(boundaries):
        step = np.searchsorted(np.sort(boundaries), x)
        total = 0.0
        for i in range(4):
            mine = step == i
            if w[mine].sum() > 0:
                mean = (slope * w)[mine].sum() / w[mine].sum()
                total += ((slope[mine] - mean) ** 2 * w[mine]).sum()
        return total

    rng = np.random.default_rng(0)
    for _ in range(3):
        start = np.asarray(table.boundaries) + rng.normal(size=3) * 0.7
        actual = minimize(error, start, method="Nelder-Mead")
        assert math.sqrt(actual.fun) >= table.rmse * (1 - 2e-3)


def test_samples_give_the_table_of_their_density():
    torch.manual_seed(0)
    actual = find_table(Activation.pointwise("gelu"), 2, Samples(torch.randn(400_000)))
    np.testing.assert_allclose(actual.boundaries, table_of(Activation.pointwise("gelu"), 2).boundaries, atol=0.03)
    few = find_table(Activation.pointwise("gelu"), 3, Samples([1.0, 2.0, float("nan")]))
    assert few.rmse == 0
    with raises(LowtideError, "samples"):
        Samples(torch.tensor([math.nan]))


def test_other_densities_have_other_tables():
    wide = table_of(Activation.pointwise("tanh"), 2, Normal(1.0, 3.0))
    assert wide.boundaries != table_of(Activation.pointwise("tanh"), 2).boundaries
    # Sigmoid's slope over an interval so short that it is a straight line: steps of equal length.
    low, high = 1.0, 1.0 + 1e-3
    assert np.allclose(
        table_of(Activation.pointwise("sigmoid"), 2, Uniform(low, high)).boundaries, [1.00025, 1.0005, 1.00075]
    )
    assert (
        table_of(Activation("softplus", (3.0, 20.0)), 3).boundaries
        != table_of(Activation.pointwise("softplus"), 3).boundaries
    )
    assert table_of(Activation("elu", (0.5,)), 3) is table_of(Activation("elu", (0.5,)), 3)
