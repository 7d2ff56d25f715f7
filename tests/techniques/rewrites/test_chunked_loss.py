"""A linear layer and its cross entropy become one op: plain PyTorch's gradients, and nothing as large as the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lowtide import Workload
from lowtide.nn import chunked_loss
from lowtide.techniques.rewrites.chunked_loss import chunk_losses
from tests.soak import SOAK

from ...engines.lowered import LoweredStep

ROWS, TOKENS, WIDTH, CLASSES = 30, 5, 12, 23
Loss = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Token ids to features, which a head takes to logits."""

    def __init__(self, *, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight

    def features(self, ids: Tensor) -> Tensor:
        return self.body(self.tokens(ids)).tanh()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.features(ids))


def work_of(
    loss: Loss,
    *,
    ignored: int = 7,
    frozen: str = "",
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    **options: bool,
) -> Workload:
    torch.manual_seed(0)
    model = Model(**options).to(dtype)
    for name in filter(None, frozen.split()):
        model.get_parameter(name).requires_grad_(False)
    ids, target = torch.randint(CLASSES, (2, ROWS // TOKENS, TOKENS)).unbind()
    target.view(-1)[:ignored] = -100
    return Workload(model, lambda m, batch: loss(m, *batch), (ids, target), autocast=autocast)


def plain(model: Model, ids: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(model(ids).view(-1, CLASSES), target.flatten(), **options)


def as_in_transformers(model: Model, ids: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """Logits are cast to 32 bits, then flattened; targets are shifted by one."""
    logits = model(ids).float()
    target = F.pad(target, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1), ignore_index=-100, reduction=reduction)


def scaled(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    """The gradient that comes to the loss is not one."""
    return 3.0 * plain(model, ids, target) + model.head.weight.square().mean()


def twice(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    features = model.features(ids).flatten(0, 1)
    other = F.cross_entropy(F.linear(features, model.head.weight), target.flatten().flip(0), reduction="sum")
    return F.cross_entropy(model.head(features), target.flatten()) + 0.1 * other


def shifted(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    logits = model(ids)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), target[..., 1:].contiguous().view(-1))


def shifted_ignoring(index: int, model: Model, ids: Tensor, target: Tensor) -> Tensor:
    logits = model(ids)[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, target[:, 1:].flatten(), ignore_index=index)


def without_prompt(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, 2:-1].reshape(-1, CLASSES), target[:, 3:].reshape(-1), reduction="sum")


def capped(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    """Gemma's head: the cap is small, so that it shows in the gradients."""
    logits = torch.tanh(model(ids) / 0.5) * 0.5
    return F.cross_entropy(logits.float().view(-1, CLASSES), target.flatten())


def capped_and_shifted(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    logits = 0.5 * (model(ids)[:, :-1] / 0.5).tanh()
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), reduction="sum")


def with_final_bias(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    """BART's head: a buffer that is added to the logits."""
    logits = model(ids) + torch.linspace(-2.0, 2.0, CLASSES).unsqueeze(0)
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1))


def with_learned_bias(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    """The bias is a parameter, of the same gradient as the layer's own."""
    features = model.features(ids).flatten(0, 1)
    return F.cross_entropy(F.linear(features, model.tokens.weight) + model.head.bias, target.flatten())


def biased_and_capped(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    logits = torch.tanh((model(ids) + torch.linspace(-2.0, 2.0, CLASSES)) / 0.5) * 0.5
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1), label_smoothing=0.2)


def by_number_of_items(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    """A sum over the tokens, as a trainer divides it that accumulates gradients."""
    items = (target != -100).sum() * 3
    return as_in_transformers(model, ids, target, reduction="sum") / items


def smoothed_and_shifted(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    logits = model(ids)[:, :-1].flatten(0, 1)
    return 2.0 * F.cross_entropy(logits, target[:, 1:].flatten(), label_smoothing=0.1) + model.body.bias.sum()


CHUNKED: dict[str, Callable[[], Workload]] = {
    "mean": lambda: work_of(plain),
    "sum": lambda: work_of(partial(plain, reduction="sum")),
    "no bias": lambda: work_of(plain, bias=False),
    "nothing ignored": lambda: work_of(plain, ignored=0),
    "another class ignored": lambda: work_of(partial(plain, ignore_index=3), ignored=0),
    "tied weights": lambda: work_of(plain, tied=True, bias=False),
    "frozen weight": lambda: work_of(plain, frozen="head.weight"),
    "frozen bias": lambda: work_of(plain, frozen="head.bias"),
    "frozen body": lambda: work_of(plain, frozen="tokens.weight body.weight body.bias"),
    "as in transformers": lambda: work_of(as_in_transformers, bias=False),
    "scaled": lambda: work_of(scaled),
    "shifted": lambda: work_of(shifted),
    "shifted, another class ignored": lambda: work_of(partial(shifted_ignoring, 3), ignored=0),
    "without the prompt": lambda: work_of(without_prompt, tied=True, bias=False),
    "smoothed mean": lambda: work_of(partial(plain, label_smoothing=0.1)),
    "smoothed sum": lambda: work_of(partial(plain, label_smoothing=0.3, reduction="sum"), bias=False),
    "smoothed, nothing ignored": lambda: work_of(partial(plain, label_smoothing=0.1, ignore_index=4), ignored=0),
    "smoothed and shifted": lambda: work_of(smoothed_and_shifted),
    "capped": lambda: work_of(capped),
    "capped and shifted": lambda: work_of(capped_and_shifted, bias=False),
    "final bias": lambda: work_of(with_final_bias, tied=True, bias=False),
    "final bias beside the layer's own": lambda: work_of(with_final_bias),
    "learned bias": lambda: work_of(with_learned_bias),
    "bias, then cap, smoothed": lambda: work_of(biased_and_capped),
    "sum by the number of items": lambda: work_of(by_number_of_items, bias=False),
}
HALF: dict[str, Callable[[], Workload]] = {
    "autocast": lambda: work_of(plain, autocast=torch.bfloat16),
    "autocast, tied weights": lambda: work_of(plain, autocast=torch.bfloat16, tied=True, bias=False),
    "autocast, as in transformers": lambda: work_of(as_in_transformers, autocast=torch.bfloat16),
    "autocast, capped": lambda: work_of(capped, autocast=torch.bfloat16, bias=False),
    "autocast, final bias": lambda: work_of(with_final_bias, autocast=torch.bfloat16, tied=True, bias=False),
    "autocast, smoothed": lambda: work_of(partial(plain, label_smoothing=0.1), autocast=torch.bfloat16),
    "bfloat16, as in transformers": lambda: work_of(as_in_transformers, dtype=torch.bfloat16, bias=False),
}


def chunked(work: Workload) -> LoweredStep:
    return LoweredStep(work, partial(chunk_losses, least_bytes=0))


def has_logits(graph: fx.Graph) -> bool:
    values = [node.meta.get("val") for node in graph.nodes]
    return any(isinstance(each, Tensor) and each.numel() == ROWS * CLASSES for each in values)


COMBINED = {  # of rows that are tested alone
    "shifted, another class ignored",
    "smoothed sum",
    "smoothed, nothing ignored",
    "smoothed and shifted",
    "capped and shifted",
    "final bias beside the layer's own",
    "autocast, tied weights",
    "autocast, as in transformers",
    "autocast, final bias",
}


@pytest.mark.parametrize("name", [each for each in CHUNKED if each not in COMBINED or SOAK])
def test_gradients_are_plain_pytorchs_and_no_logits_are_left(name: str) -> None:
    step = chunked(CHUNKED[name]())
    assert step.rewritten == 1
    assert not has_logits(step.joint.module.graph)
    for program in step.programs.values():
        torch.testing.assert_close(step.results(program), step.plain())


@pytest.mark.parametrize("name", [each for each in HALF if each not in COMBINED or SOAK])
def test_gradients_in_bfloat16_are_plain_pytorchs_to_its_rounding(name: str) -> None:
    step = chunked(HALF[name]())
    assert step.rewritten == 1
    assert not has_logits(step.joint.module.graph)
    *results, state = step.results(step.programs["everything"])
    *expected, plain_state = step.plain()
    assert torch.equal(state, plain_state)
    for result, other in zip(results, expected, strict=True):
        assert result.dtype == other.dtype
        assert (result - other).abs().max() <= 0.02 * other.abs().max()


def test_each_of_two_losses_is_chunked() -> None:
    step = chunked(work_of(twice))
    assert step.rewritten == 2
    torch.testing.assert_close(step.results(step.programs["smallest"]), step.plain())


def test_several_chunks_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "_CHUNK_BYTES", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(chunked_loss, "_FEWEST_ROWS", 8)
    step = chunked(work_of(plain))
    torch.testing.assert_close(step.results(step.programs["everything"]), step.plain())


def test_all_targets_ignored_is_as_undefined_as_in_pytorch() -> None:
    step = chunked(work_of(plain, ignored=ROWS))
    torch.testing.assert_close(step.results(step.programs["everything"]), step.plain(), equal_nan=True)
    assert step.plain()[0].isnan()


# -- what is left alone ----------------------------------------------------------------------------------


def with_penalty(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    """Another reader of the logits."""
    logits = model(ids).view(-1, CLASSES)
    return F.cross_entropy(logits, target.flatten()) + 1e-3 * logits.square().mean()


def with_probabilities(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    """Another reader of the log softmax."""
    logs = model(ids).view(-1, CLASSES).log_softmax(-1)
    return F.nll_loss(logs, target.flatten()) + 1e-3 * logs.square().mean()


def with_class_weights(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    return plain(model, ids, target, weight=torch.linspace(0.5, 2.0, CLASSES))


def squashed(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    """Logits go through another op before the loss."""
    return F.cross_entropy(model(ids).sinh().view(-1, CLASSES), target.flatten())


def capped_by_two_numbers(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(9.0 * (model(ids) / 3.0).tanh().view(-1, CLASSES), target.flatten())


def cap_read_elsewhere(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    tanh = (model(ids) / 9.0).tanh()
    return F.cross_entropy((9.0 * tanh).view(-1, CLASSES), target.flatten()) + tanh.square().mean()


def capped_then_biased(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    logits = 9.0 * (model(ids) / 9.0).tanh() + torch.linspace(-2.0, 2.0, CLASSES)
    return F.cross_entropy(logits.view(-1, CLASSES), target.flatten())


def bias_of_tokens(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    logits = model(ids) + torch.linspace(-2.0, 2.0, ROWS * CLASSES).view(-1, TOKENS, CLASSES)
    return F.cross_entropy(logits.view(-1, CLASSES), target.flatten())


def learned_bias_of_sequences(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    """The gradient of the bias is read off the logits' gradient before it is flat."""
    logits = F.linear(model.features(ids), model.tokens.weight) + model.head.bias
    return F.cross_entropy(logits.view(-1, CLASSES), target.flatten())


def smoothed_by_hand(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    logs = model(ids).view(-1, CLASSES).log_softmax(-1)
    return 0.9 * F.nll_loss(logs, target.flatten()) - 0.1 * logs.mean()


def of_several_heads(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    """A row has the logits of two losses."""
    weight = torch.cat([model.head.weight, model.head.weight.flip(0)])
    logits = F.linear(model.features(ids), weight).view(-1, CLASSES)
    return F.cross_entropy(logits, target.flatten().repeat_interleave(2))


def every_other_position(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, ::2].reshape(-1, CLASSES), target[:, ::2].reshape(-1))


def weighted_sum(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    x, head = model.features(ids).flatten(0, 1), model.head
    return F.cross_entropy(torch.addmm(head.bias, x, head.weight.t(), beta=2.0, alpha=0.5), target.flatten())


def bias_of_rows(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    x, head = model.features(ids).flatten(0, 1), model.head
    return F.cross_entropy(torch.addmm(x @ head.weight.t(), x, head.weight.t()), target.flatten())


def some_classes(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[..., :20].reshape(-1, 20), target.flatten() % 20)


def some_sequences(model: Model, ids: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[1:].reshape(-1, CLASSES), target[1:].flatten())


LEFT: dict[str, Callable[[], Workload]] = {
    "logits read elsewhere": lambda: work_of(with_penalty),
    "log softmax read elsewhere": lambda: work_of(with_probabilities),
    "class weights": lambda: work_of(with_class_weights),
    "label smoothing by hand": lambda: work_of(smoothed_by_hand),
    "smoothed by class weights": lambda: work_of(
        partial(plain, label_smoothing=0.1, weight=torch.linspace(0.5, 2.0, CLASSES))
    ),
    "no reduction": lambda: work_of(lambda m, x, y: plain(m, x, y, reduction="none").square().mean()),
    "squashed": lambda: work_of(squashed),
    "capped by two numbers": lambda: work_of(capped_by_two_numbers),
    "cap read elsewhere": lambda: work_of(cap_read_elsewhere),
    "capped, then biased": lambda: work_of(capped_then_biased),
    "bias of each token": lambda: work_of(bias_of_tokens),
    "learned bias of sequences": lambda: work_of(learned_bias_of_sequences),
    "every other position": lambda: work_of(every_other_position),
    "weighted sum": lambda: work_of(weighted_sum),
    "bias of each row": lambda: work_of(bias_of_rows),
    "some classes": lambda: work_of(some_classes, ignored=0),
    "some sequences": lambda: work_of(some_sequences),
    "several heads": lambda: work_of(of_several_heads),
    "float64": lambda: work_of(plain, dtype=torch.float64),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_losses_are_left_alone(name: str) -> None:
    step = chunked(LEFT[name]())
    assert step.rewritten == 0
    torch.testing.assert_close(step.results(step.programs["everything"]), step.plain())


def test_small_logits_are_left_alone() -> None:
    assert LoweredStep(work_of(plain), chunk_losses).rewritten == 0
    size = ROWS * CLASSES * 4
    assert LoweredStep(work_of(plain), partial(chunk_losses, least_bytes=size + 1)).rewritten == 0
    assert LoweredStep(work_of(plain), partial(chunk_losses, least_bytes=size)).rewritten == 1
