"""Recomputation against plain PyTorch: the state of modules is touched once, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import lowtide.optim
from lowtide import Workload
from lowtide.errors import LowtideError, ModifiedError
from lowtide.nn import BatchRenormAct1d
from lowtide.planning import apply_options
from lowtide.techniques import Option, recompute
from lowtide.techniques.sqrt import SqrtConfig
from tests.models import Call


def step(model: nn.Module, x: Tensor, *, levels: int) -> dict[str, Tensor]:
    """One forward and backward pass with the model inside ``levels`` recomputations."""
    torch.manual_seed(0)
    model.zero_grad()

    def run(y: Tensor, left: int = levels) -> Tensor:
        return model(y) if left == 0 else recompute(run, y, left - 1, modules=[model])

    loss = run(x).square().mean()
    loss.backward()
    actual = {"loss": loss.detach(), "rng": torch.get_rng_state()}
    actual |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return actual | {n: b.clone() for n, b in model.named_buffers()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


class Moving(nn.Module):
    """A buffer that every forward pass replaces, and one that it changes in place; both are used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("replaced", torch.ones(3))
        self.register_buffer("added", torch.ones(3))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = 0.9 * self.replaced + x.detach().mean(0)
        self.added.add_(x.detach().mean(0))
        return (x * self.weight * self.replaced * self.added).sin()


def renormed() -> Call:
    """An embedding that writes into its weight on the way."""
    embedding = nn.Embedding(5, 3, max_norm=1.0)
    return Call(lambda m, x: m.embedding(x.argsort(0)).sin() * x.sum(), embedding=embedding)


MODELS: dict[str, Any] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2)),
    "cumulative batch norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Tanh()),
    "no statistics": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Tanh()),
    "frozen batch norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.Tanh()),
    "dropout": lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2), nn.Dropout(0.5)),
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(3, 4)), nn.Tanh()),
    "moving buffers": Moving,
    "randomized relu": lambda: nn.Sequential(nn.Linear(3, 4), nn.RReLU(), nn.Linear(4, 64), nn.RReLU()),
    "an embedding that renorms": renormed,
    "batch renormalization": lambda: nn.Sequential(nn.Linear(3, 3), BatchRenormAct1d(3, "silu"), nn.Linear(3, 1)),
}


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_state_is_as_after_one_plain_pass(name: str, levels: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(5, 3)
    state = MODELS[name]().state_dict()
    plain, again = MODELS[name](), MODELS[name]()
    plain.load_state_dict(state)
    again.load_state_dict(state)
    for _ in range(2):
        assert_same(step(again, x, levels=levels), step(plain, x, levels=0))


@pytest.mark.parametrize("inner", [False, True])
def test_a_weight_changed_before_backward_raises_as_in_plain_pytorch(inner: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())

    def run(x: Tensor) -> Tensor:
        return recompute(model, x, modules=[model], path="blocks 2 to 5")

    x = torch.randn(4, 3, requires_grad=True)
    for forward in (model, (lambda x: recompute(run, x, modules=[model])) if inner else run):
        loss = forward(x).sum()
        with torch.no_grad():
            model[2].weight.mul_(1.5)
        with pytest.raises(RuntimeError) as refusal:
            loss.backward()
        assert "version" in str(refusal.value)
    loss = run(x).sum()
    with torch.no_grad():
        model[2].bias.add_(1)  # plain PyTorch has no need of it; run again, it would give other activations
    with pytest.raises(ModifiedError) as refusal:
        loss.backward()
    assert all(name in str(refusal.value) for name in ("Linear.bias", "blocks 2 to 5"))
    run(x).sum().backward()  # nothing is left behind


def test_the_mode_of_the_first_run_is_replayed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    x = torch.randn(6, 3)

    def gradients(run: Any) -> list[Tensor]:
        model.train()
        model.zero_grad()
        torch.manual_seed(2)
        loss = run(x).sum()
        model.eval()  # between forward and backward, as loops that evaluate do
        loss.backward()
        assert not model.training
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients(model)
    assert all(map(torch.equal, plain, gradients(lambda x: recompute(model, x, modules=[model]))))


def test_tuples_and_keywords_pass_through() -> None:
    def function(pair: tuple[Tensor, Tensor], *, scale: Tensor, name: str) -> dict[str, Tensor]:
        return {name: pair[0] * pair[1].exp() * scale}

    a, b, scale = (torch.randn(3, requires_grad=True) for _ in range(3))
    recompute(function, (a, b), scale=scale, name="out", modules=[])["out"].sum().backward()
    assert torch.equal(a.grad, b.exp() * scale)
    assert torch.equal(scale.grad, a * b.exp())


def test_without_gradients_the_function_just_runs() -> None:
    model = nn.BatchNorm1d(3)
    with torch.no_grad():
        recompute(model, torch.randn(4, 3), modules=[model])
    assert int(model.num_batches_tracked) == 1


def test_a_part_that_writes_into_its_input_is_refused_with_its_place() -> None:
    layer = nn.ReLU(inplace=True)
    x = torch.randn(3, requires_grad=True) * 2
    with pytest.raises(LowtideError) as refusal:
        recompute(layer, x, modules=[layer], path="layers.3")
    assert "layers.3" in str(refusal.value)


def test_backward_twice_over_one_graph_updates_the_statistics_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
    loss = recompute(model, torch.randn(4, 3), modules=[model]).sum()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), first, strict=True))
    assert int(model[1].num_batches_tracked) == 1
    with torch.no_grad():
        model[0].weight.mul_(2)  # after backward, as an optimizer does
    recompute(model, torch.randn(4, 3), modules=[model]).sum().backward()


def test_a_block_that_writes_into_its_weights_may_run_twice_before_backward() -> None:
    model = renormed()
    x = torch.randn(5, 3)
    sum(recompute(model, x + i, modules=[model]).sum() for i in range(2)).backward()
    assert model.embedding.weight.grad is not None


def test_second_derivatives_are_those_of_the_plain_function() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1), nn.Tanh())
    x = torch.randn(4, 3, requires_grad=True)

    def second(run: Any) -> Tensor:
        (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    assert torch.equal(second(lambda x: recompute(model, x, modules=[model])), second(model))


def test_an_error_in_the_second_run_leaves_buffers_and_modes_as_they_were() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x = self.norm(x)
            if self.calls > 1:
                raise KeyboardInterrupt
            return x.sin()

    model = Fragile()
    buffers = dict(model.norm._buffers)
    out = recompute(model, torch.randn(4, 3, requires_grad=True), modules=[model]).sum()
    model.eval()
    with pytest.raises(KeyboardInterrupt):
        out.backward()
    assert all(model.norm._buffers[name] is buffer for name, buffer in buffers.items())
    assert not model.norm.training
    assert int(model.norm.num_batches_tracked) == 1


def shifted() -> Call:
    """Its last op saves nothing: the bias has its gradient before the block runs again."""
    return Call(lambda m, x: m.layer(x).tanh() + m.bias, layer=nn.Linear(3, 3), bias=nn.Parameter(torch.ones(3)))


def test_steps_in_backward_may_come_before_a_block_runs_again() -> None:
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(shifted(), shifted())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lowtide.optim.step_in_backward(optimizer):
            for seed in range(2):
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
                for block in model:
                    x = recompute(block, x, modules=[block]) if again else block(x)
                x.square().sum().backward()
        results.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Cache:
    """Keys of each layer, as transformers' caches hold them: in objects within an object."""

    class Layer:
        keys: Tensor | None = None

    def __init__(self, layers: int) -> None:
        self.layers = [Cache.Layer() for _ in range(layers)]
        self.updated: dict[int, bool] = {}


class Attending(nn.Module):
    """A decoder's layer: its keys of the encoder's result are computed once and cached, its own are appended."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.query, self.keys, self.own = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, cache: Cache) -> Tensor:
        layer = cache.layers[self.number]
        if not cache.updated.get(self.number):
            layer.keys = self.keys(memory)
            cache.updated[self.number] = True
        assert layer.keys is not None
        layer.keys = torch.cat([layer.keys, self.own(x)])
        return x + (self.query(x) @ layer.keys.T).softmax(-1) @ layer.keys


@pytest.mark.parametrize("levels", [1, 2])
def test_a_cache_among_the_arguments_is_as_the_first_run_found_it(levels: int) -> None:
    torch.manual_seed(0)
    layer, x, memory = Attending(0), torch.randn(4, 8, requires_grad=True), torch.randn(5, 8)

    def inner(x: Tensor, memory: Tensor, cache: Cache, left: int) -> Tensor:
        if left == 0:
            return layer(x, memory, cache)
        return recompute(inner, x, memory, cache, left - 1, modules=[layer])

    results: list[list[Tensor]] = []
    for left in (0, levels):
        cache = Cache(1)
        y = inner(x, memory, cache, left)
        keys = cache.layers[0].keys
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
        assert cache.layers[0].keys is keys
        assert keys is not None
        assert keys.shape == (9, 8)
    assert all(map(torch.equal, *results))


def test_a_decoder_of_transformers_is_recomputed_with_its_cache() -> None:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(3, 32, (2, 8))
    sizes = {"num_layers": 2, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2}
    config = transformers.T5Config(**sizes, vocab_size=32, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config)
    work = Workload(model, lambda model, ids: model(input_ids=ids, labels=ids).loss, tokens)
    gradients: list[list[Tensor]] = []
    for options in ((), (Option("sqrt", ("decoder.block",), SqrtConfig((((0,), (1,)),))),)):
        model.zero_grad()
        torch.manual_seed(0)
        with apply_options(work, options) as applied:
            applied.work.compute_loss().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *gradients))
