"""Which layers are offered, what their price says, and what becomes of a model."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lowtide.errors import LowtideError
from lowtide.planning import predict
from lowtide.planning.prediction import estimate_peak
from lowtide.profiling import profile
from lowtide.techniques import Forward, replace_forward
from lowtide.techniques.randomized import Randomized, RandomizedLinears, randomize
from lowtide.workload import Workload
from tests.models import Call, squares
from tests.refusals import refused
from tests.soak import in_soak

TECHNIQUE = RandomizedLinears()
ROWS, WIDTH = 512, 64


def attention():
    """Q, K and V of one normed input, as three layers."""
    layers = {name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v")}
    return Call(lambda m, x: m.q(y := m.norm(x)) * m.k(y) + m.v(y), norm=nn.LayerNorm(WIDTH), **layers)


def work_of(model, **changes):
    torch.manual_seed(0)
    batch = torch.randn(ROWS, WIDTH, requires_grad=False)
    return Workload(model, squares, batch, **changes)


def option_of(work, ratio=0.2):
    options = {option.config.ratio: option for option in TECHNIQUE.options(profile(work))}
    return options.get(ratio)


def test_every_ratio_is_offered_on_layers_that_alone_hold_their_input():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
    options = TECHNIQUE.options(profile(work_of(model)))
    assert [option.config.ratio for option in options] == [0.5, 0.2, 0.1]
    # The first reads the batch, which stays; the last reads what a ReLU keeps anyway.
    assert {option.site for option in options} == {("2",)}


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8).requires_grad_(False)),
        nn.Sequential(nn.Conv1d(1, 1, 1)),
    ],
    ids=["relu", "frozen", "no linear"],
)
def test_nothing_is_offered_where_nothing_would_be_saved(model):
    if isinstance(model[0], nn.Conv1d):
        work = replace(work_of(model), batch=torch.randn(ROWS, 1, WIDTH))
    else:
        work = work_of(model)
    assert TECHNIQUE.options(profile(work)) == []


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_layers_that_share_an_input_keep_one_sketch_and_the_price_knows(autocast):
    work = work_of(nn.Sequential(attention(), attention()), autocast=autocast)
    plain = profile(work)
    option = option_of(work)
    assert option.site == tuple(f"{i}.{name}" for i in range(2) for name in "qkv")
    size = 2 if autocast else 4
    inputs = 4 if autocast else 2  # autocast casts float32 for every layer by itself; the second norm gives bfloat16
    sketch = round(0.2 * ROWS) * WIDTH * size
    price = TECHNIQUE.price(option, plain)
    assert sum(i.bytes for i in price.removed) == inputs * ROWS * WIDTH * size
    assert [i.bytes for i in price.added if "input" in i.why] == 2 * [sketch]
    with TECHNIQUE.apply(work, [option]):
        after = profile(work)
    assert plain.saved_bytes - after.saved_bytes == inputs * ROWS * WIDTH * size - 2 * (sketch + 8)


@pytest.mark.parametrize("ratio", [0.2, *in_soak([0.5, 0.1])])
def test_the_estimate_is_near_the_prediction(ratio):
    blocks = [m for _ in range(4) for m in (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))]
    work = work_of(nn.Sequential(*blocks))
    plain = profile(work)
    option = option_of(work, ratio)
    predicted = predict(work, [option], plain)
    estimate = estimate_peak(plain.graph, [TECHNIQUE.price(option, plain)])
    assert predicted.peak_bytes < plain.peak_bytes
    assert estimate == pytest.approx(predicted.peak_bytes, rel=0.05)


def test_only_weights_of_the_site_have_random_gradients():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8))
    work = work_of(model)
    plain = gradients(work)
    with randomize(model, ["2"], ratio=0.5, sketch="rows", block=None):
        actual = gradients(work)
    assert {name for name in plain if not torch.equal(actual[name], plain[name])} == {"2.weight"}


def gradients(work):
    work.model.zero_grad()
    work.compute_loss().backward()
    return {name: p.grad.clone() for name, p in work.model.named_parameters()}


def test_randomize_takes_all_linear_layers_and_gives_them_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.GELU(), nn.Linear(4, 4)), nn.Bilinear(2, 2, 2))
    undo = randomize(model)
    assert [path for path, m in model.named_modules() if isinstance(vars(m).get("forward"), Randomized)] == ["0", "1.1"]
    with pytest.raises(LowtideError) as twice:
        randomize(model, ["0"])
    assert "Randomized" in str(twice.value)
    undo()
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize(
    ("path", "named"), [("no.such", ["'no.such'"]), ("1", ["GELU", "(1)"]), ("2", ["Forward", "(2)"])]
)
def test_what_cannot_be_randomized_is_refused_and_leaves_the_model(path, named):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    with replace_forward(Forward(model[2])):
        with refused(*named):
            randomize(model, ["0", path])
        assert "forward" not in vars(model[0])
    with refused("no nn.Linear"):
        randomize(nn.Sequential(nn.GELU()))
