"""The step without a plan's options, while they act: its profile is that from before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowtide import Workload
from lowtide.compat.autograd import gradient_hooks
from lowtide.engines.plain_step import PlainStep
from lowtide.planning.prediction import apply_options
from lowtide.profiling import Profile, profile
from lowtide.techniques import Option, techniques
from lowtide.techniques.optimizer_state import OptimizerStateConfig
from lowtide.techniques.technique import Config
from tests.models import blocks, squares

OPTIONS = {
    "in backward": (Option("optimizer_in_backward", ("",), Config()),),
    "8-bit states": (Option("optimizer_state", ("",), OptimizerStateConfig("8bit")),),
    "both": (
        Option("optimizer_state", ("",), OptimizerStateConfig("8bit")),
        Option("optimizer_in_backward", ("",), Config()),
    ),
}


def wide() -> Workload:
    model = blocks(4, 128, nn.GELU)
    return Workload(model, squares, torch.randn(64, 128), torch.optim.AdamW(model.parameters()))


def peaks(work: Workload) -> tuple[int, int, int]:
    seen: Profile = profile(work, fake=True)
    return seen.peak_bytes, seen.storage_peak_bytes, seen.static_bytes


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_profile_under_options_is_the_plain_one(options: tuple[Option, ...], stepped: bool) -> None:
    assert {option.technique for option in options} <= set(techniques())
    work = wide()
    if stepped:
        work.compute_loss().backward()
        assert work.optimizer is not None
        work.optimizer.step()
    before = peaks(work)
    plain = PlainStep(work, is_changed=True)
    with apply_options(work, options) as applied:
        changed = profile(applied.work).storage_peak_bytes
        hooks = [list(gradient_hooks(parameter)) for parameter in work.model.parameters()]
        with plain(work.batch) as step:
            assert peaks(step) == before
        assert profile(applied.work).storage_peak_bytes == changed != before[1]
        assert hooks == [list(gradient_hooks(parameter)) for parameter in work.model.parameters()]
    assert peaks(work) == before


def test_hooks_of_users_stay() -> None:
    work = wide()
    seen: list[Tensor] = []
    parameter = next(iter(work.model.parameters()))
    handle = parameter.register_post_accumulate_grad_hook(seen.append)
    plain = PlainStep(work, is_changed=True)
    with plain(work.batch) as step:
        step.compute_loss().backward()
    assert len(seen) == 1
    handle.remove()
