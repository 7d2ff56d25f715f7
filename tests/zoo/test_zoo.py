from __future__ import annotations

import pytest
import torch

from lowtide import zoo
from lowtide.errors import WorkloadError
from tests.refusals import refused
from tests.zoo.families import EVERY


@pytest.mark.parametrize("name", EVERY)
def test_every_small_model_takes_a_step(name: str):
    work = zoo.small(name)
    loss = work.compute_loss()
    loss.backward()
    assert loss.isfinite()
    assert work.name == name
    assert work.optimizer is not None
    for key, parameter in work.model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
    work.optimizer.step()


@pytest.mark.parametrize("name", EVERY)
def test_a_seed_gives_the_same_work_and_leaves_the_generator_alone(name: str):
    with torch.random.fork_rng(devices=[]):
        first = zoo.small(name, seed=3)
        torch.rand(7)  # the second build starts from another global state
        before = torch.get_rng_state()
        second, other = zoo.small(name, seed=3), zoo.small(name, seed=4)
        assert torch.equal(torch.get_rng_state(), before)
    values, again, others = ([*w.model.state_dict().values(), *w.tensors()] for w in (first, second, other))
    assert all(map(torch.equal, values, again))
    assert not torch.equal(values[0], others[0])
    assert not torch.equal(values[-2], others[-2])  # the inputs, before the targets


@pytest.mark.parametrize("name", EVERY)
def test_the_meta_device_gives_the_same_shapes(name: str):
    real, meta = zoo.small(name), zoo.small(name, device="meta")
    assert meta.device.type == "meta"
    assert [(t.shape, t.dtype) for t in real.tensors()] == [(t.shape, t.dtype) for t in meta.tensors()]
    assert meta.compute_loss().shape == ()


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("resnet5", {}, ("'resnet5'", "resnet50")),
        ("zzz", {}, ("zzz", "lenet, resnet18")),
        ("resnet18", {"depths": 50}, ("'depths'", "zoo:resnet18", " depth")),
        ("resnet18", {"batch_size": 4}, ("'batch_size'", " batch")),
        ("resnet18", {"depth": 19}, ("19", "18, 34")),
        ("resnet18", {"dims": 3}, ("dims=3",)),
        ("resnet18", {"groups": 32}, ("no groups",)),
        ("resnet18", {"seq": 128}, ("image",)),
        ("resnet18", {"batch": 0}, ("batch of 0",)),
        ("resnet18", {"optimizer": "adamx"}, ("'adamx'", " adam")),
        ("gpt2", {"image": 224}, ("seq, not image",)),
        ("gpt2", {"seq": 0}, ("seq=0",)),
        ("gpt2", {"seq": 64, "block_size": 32}, ("seq=64", "block_size=32")),
        ("gpt2", {"heads": 7}, ("768", "7 heads")),
        ("gpt2", {"channels_last": True}, ("channels_last",)),
        ("resnet18-1d", {"channels_last": True}, ("channels_last",)),
        ("resnet18-1d", {"image": 224}, ("seq, not image",)),
        ("roberta-base", {"heads": 7}, ("768", "7 heads")),
        ("lenet", {"image": 32}, ("image=32", "28")),
        ("unet", {"image": 100}, ("image=100", "16, 32, 48")),
        ("wrn28-2", {"depth": 27}, ("depth 27",)),
        ("wrn38", {"blocks": (3, 3, 6, 3)}, ("WRN-38",)),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: dict[str, object], words: tuple[str, ...]):
    with refused(*words, kind=WorkloadError):
        zoo.workload(name, device="meta", **arguments)


def test_optimizers_go_by_name():
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "none": type(None)}
    assert {name: type(zoo.small("lenet", optimizer=name).optimizer) for name in kinds} == kinds


def test_channels_last_holds_for_parameters_and_images():
    work = zoo.small("resnet18", channels_last=True)
    assert work.batch[0].is_contiguous(memory_format=torch.channels_last)
    assert work.model.stem[0].weight.is_contiguous(memory_format=torch.channels_last)
    work.compute_loss().backward()


@pytest.mark.parametrize("name", ["resnet18", "gpt2"])
def test_autocast_is_kept_and_runs(name: str):
    work = zoo.small(name, autocast=torch.bfloat16)
    assert work.autocast is torch.bfloat16
    assert work.compute_loss().isfinite()
