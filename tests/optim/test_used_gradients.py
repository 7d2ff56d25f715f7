"""After a step that used gradients in backward, whatever reads their values raises; all else works as without."""

import copy
import pickle

import pytest
import torch
from torch import nn

import lowtide.optim as lo
from lowtide import LowtideError, Workload, profile
from lowtide.engines import Step, apply, plan
from lowtide.optim.used_gradients import UsedGradient, mark_used, remove_marks
from tests.optim.training import BATCHES, OPTIMIZERS, equal, make, train
from tests.refusals import refused

NAME = "optimizer_in_backward"


def loss(model, x):
    return model(x).square().mean()


def planned(only, name=NAME, model=None) -> Step:
    only(name)
    model = model or make()
    work = Workload(model, loss, BATCHES[0], OPTIMIZERS["AdamW fused"](model.parameters()))
    wanted = plan(work, "98%", engine="eager", allow="changed", tune=False)
    assert [option.technique for option in wanted.options] == [name]
    return apply(wanted, work)


READS = {
    "norm": lambda model: model[0].weight.grad.norm(),
    "sum over all": lambda model: sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None),
    "torch.equal": lambda model: torch.equal(model[0].weight.grad, model[0].weight),
    "copy": lambda model: copy.deepcopy(model[0].weight.grad),
    "pickle": lambda model: pickle.dumps(model[0].weight.grad),
    "tolist": lambda model: model[0].bias.grad.tolist(),
    "numpy": lambda model: model[0].bias.grad.numpy(),
    "value": lambda model: float(model[0].bias.grad[0]),
    "total norm": lambda model: nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]),
    "clipping": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "another step": lambda model: torch.optim.SGD(model.parameters(), lr=1.0).step(),
    "unscaling": lambda model: unscaled(torch.optim.SGD(model.parameters(), lr=1.0)),
    "accumulating": lambda model: loss(model, BATCHES[0]).backward(),
}


def unscaled(optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


@pytest.mark.parametrize("read", READS)
def test_a_read_between_steps_raises_and_names_what_to_forbid(read, only):
    step = planned(only)
    step(BATCHES[0])
    with refused(f"forbid=['{NAME}']"):
        READS[read](step.model)


def test_stored_gradients_are_named_too(only):
    step = planned(only, "stored_gradients", nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
    step(BATCHES[0])
    with refused("forbid=['stored_gradients']"):
        step.model[0].weight.grad.norm()


def test_a_parameter_without_a_gradient_has_none(only):
    model = make()
    model.unused = nn.Parameter(torch.ones(3))
    model.forward = lambda x: nn.Sequential.forward(nn.Sequential(*(model[i] for i in range(5))), x)
    step = planned(only, model=model)
    step(BATCHES[0])
    assert isinstance(model[0].weight.grad, UsedGradient)
    assert model.unused.grad is None


def test_training_goes_on_with_the_bits_of_plain_pytorch(only):
    plain = make()
    optimizer = OPTIMIZERS["AdamW fused"](plain.parameters())
    expected = train(plain, optimizer, BATCHES[:4])
    step = planned(only)
    for x in BATCHES[:4]:
        step(x)
        step.work.optimizer.zero_grad(set_to_none=False)  # in place: nothing reads values
    assert equal(list(step.model.parameters()), expected)


def test_copies_saves_moves_and_evaluation_work_between_steps(only):
    step = planned(only)
    step(BATCHES[0])
    model, weight = step.model, step.model[0].weight
    assert isinstance(weight.grad, torch.Tensor)
    assert weight.grad.shape == weight.shape
    assert "used in backward" in repr(weight.grad)
    assert equal(list(copy.deepcopy(model).parameters()), list(model.parameters()))
    assert equal(list(pickle.loads(pickle.dumps(model)).parameters()), list(model.parameters()))
    assert all(map(torch.equal, copy.deepcopy(model.state_dict()).values(), model.state_dict().values()))
    expected = model(BATCHES[1])
    assert torch.equal(torch.compile(model, backend="aot_eager")(BATCHES[1]), expected)
    assert torch.equal(torch.func.functional_call(model, dict(model.named_parameters()), BATCHES[1]), expected)
    model.to(torch.float64)
    assert isinstance(model[0].weight.grad, UsedGradient)
    assert model[0].weight.grad.dtype is torch.float64
    model.to(torch.float32)
    model.share_memory()
    step(BATCHES[1])


def test_compiled_evaluation_is_not_compiled_again_for_marks(only):
    step = planned(only)
    graphs = []

    def backend(module, _):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(step.model, backend=backend)
    for x in BATCHES[:3]:
        with torch.no_grad():
            compiled(x)
        step(x)
    with torch.no_grad():
        compiled(BATCHES[0])
    assert len(graphs) == 1


def test_nothing_is_left_after_undo_and_profiles_are_the_same(only):
    step = planned(only)
    before = profile(step.work, fake=True)
    step(BATCHES[0])
    assert profile(step.work, fake=True).peak_bytes == before.peak_bytes
    assert isinstance(step.model[0].weight.grad, UsedGradient)  # restored with the rest
    step.profile()
    step(BATCHES[0])
    step.undo()
    assert all(p.grad is None for p in step.model.parameters())
    loss(step.model, BATCHES[0]).backward()
    assert all(type(p.grad) is torch.Tensor for p in step.model.parameters())


def test_marks_are_of_the_last_step_alone():
    model = make()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    with lo.step_in_backward(optimizer):
        train(model, optimizer, BATCHES[:1])
        assert all(p.grad is None for p in model.parameters())  # a loop of one's own is left alone
        mark_used(optimizer, [NAME])
        with pytest.raises(LowtideError):
            model[0].weight.grad + 1
        remove_marks(optimizer)
        optimizer.step()
        mark_used(optimizer, [NAME])
        assert all(p.grad is None for p in model.parameters())
