from __future__ import annotations

import pickle
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import zoo
from lowtide.errors import WorkloadError
from lowtide.workload import Workload
from lowtide.zoo.batches import classification_loss, next_token_loss
from lowtide.zoo.roberta import Attention
from tests.zoo.families import EVERY

# torchvision's ResNets and DenseNet, transformers' GPT-2 and RoBERTa, FACTS' WRN, the usual batch-norm U-Net.
PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnext50": 25_028_904,
    "resnext101": 88_791_336,
    "wrn28-2": 1_467_610,
    "densenet121": 7_978_856,
    "unet": 31_037_698,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "roberta-base": 124_647_170,
}


def build(name: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return zoo.model(name, **options)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def saved_by_part(work: Workload) -> dict[str, list[Tensor]]:
    """What the forward pass saves, one tensor per storage, without parameters and buffers.

    A part is a module path of at most two names; what the loss saves belongs to the last part that ran.
    """
    owned = {t.untyped_storage()._cdata for t in (*work.model.parameters(), *work.model.buffers())}
    saved: dict[str, list[Tensor]] = defaultdict(list)
    part = ""

    def pack(tensor: Tensor) -> Tensor:
        # The list below holds every tensor seen, so no storage dies and its address is not used again.
        if (storage := tensor.untyped_storage()._cdata) not in owned:
            owned.add(storage)
            saved[part].append(tensor)
        return tensor

    def entered(name: str):
        def hook(_module: nn.Module, _args: object) -> None:
            nonlocal part
            part = name

        return hook

    for name, module in work.model.named_modules():
        module.register_forward_pre_hook(entered(".".join(name.split(".")[:2])))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work.compute_loss()
    return saved


def total_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str):
    assert count(build(name)) == PUBLISHED[name]


def test_lenet_without_batch_norm_is_lenet_5():
    assert count(build("lenet", norm=False)) == 61_706
    assert count(build("lenet")) == 61_706 + 2 * (6 + 16 + 120 + 84)


def test_unet_of_one_class_has_the_other_published_count():
    assert count(build("unet", classes=1)) == 31_037_633


def test_resnext152_is_counted_by_hand():
    total, wide_in = 3 * 64 * 49 + 2 * 64, 64
    for blocks, inner in ((3, 128), (8, 256), (36, 512), (3, 1024)):
        wide_out = 2 * inner
        total += wide_in * wide_out + 2 * wide_out  # the shortcut
        for _ in range(blocks):
            total += wide_in * inner + 9 * inner * inner // 32 + inner * wide_out + 2 * (2 * inner + wide_out)
            wide_in = wide_out
    assert count(build("resnext152")) == total + 2048 * 1000 + 1000


def test_wrn38_is_counted_by_hand():
    """No published count is at hand, so this one is arithmetic over the paper's table of widths."""
    total, wide_in = 3 * 64 * 9, 64
    for blocks, inner, wide_out in ((3, 128, 128), (3, 256, 256), (6, 512, 512), (3, 512, 1024)):
        total += wide_in * wide_out  # the shortcut of the first block; the shape stays in the others
        for _ in range(blocks):
            total += 9 * (wide_in * inner + inner * wide_out) + 2 * (wide_in + inner)
            wide_in = wide_out
    for first, second, wide_out in ((512, 1024, 2048), (1024, 2048, 4096)):
        total += wide_in * wide_out
        total += wide_in * first + 9 * first * second + second * wide_out + 2 * (wide_in + first + second)
        wide_in = wide_out
    total += 2 * 4096 + 4096 * 1000 + 1000
    assert count(build("wrn38")) == total == 109_167_912


def test_wrn38_halves_the_image_before_every_stage_but_the_last():
    model, x = build("wrn38"), torch.empty(2, 3, 224, 224, device="meta")
    seen = [x := model.stem(x)] + [x := stage(x) for stage in model.stages]
    assert [tuple(t.shape[1:3]) for t in seen] == [
        (64, 224),
        (128, 112),
        (256, 56),
        (512, 28),
        (1024, 14),
        (2048, 7),
        (4096, 7),
    ]
    convolutions = sum(isinstance(m, nn.Conv2d) for m in model.modules())
    assert convolutions + 1 - 6 == 38  # with the linear layer, without the shortcuts


@pytest.mark.parametrize("depth", [18, 34, 50, 101, 152])
def test_the_1d_resnet_is_the_2d_one_with_thin_kernels(depth: int):
    plain = build(f"resnet{depth}", channels=1, classes=35)
    thin = sum(p.numel() // p.shape[-1] if p.dim() == 4 else p.numel() for p in plain.parameters())
    assert count(build(f"resnet{depth}-1d")) == thin


@pytest.mark.parametrize(("tied", "heads"), [(False, 2), (True, 1)])
def test_lstm_is_counted_by_hand(tied: bool, heads: int):
    layer = 4 * 650 * (650 + 650 + 2)
    assert count(build("lstm", tied=tied)) == heads * 10_000 * 650 + 2 * layer + 10_000


def test_wrn_saves_what_the_table_says():
    work = zoo.workload("wrn28-2", device="meta")
    parts = saved_by_part(work)
    maps = {part: total_bytes([t for t in saved if t.dim() == 4]) for part, saved in parts.items()}
    by_group: dict[str, int] = defaultdict(int)
    for part, size in maps.items():
        by_group["head" if part.startswith("head") else part] += size
    assert by_group == {
        "stem": 1_228_800,
        "stages.0": 196_608_000,
        "stages.1": 117_964_800,
        "stages.2": 58_982_400,
        "head": 6_553_600,
    }
    # Beside the feature maps: batch statistics, pooled features, probabilities, labels.
    everything = sum(total_bytes(saved) for saved in parts.values())
    assert 381_337_600 < everything < 381_337_600 + 100_000


@pytest.mark.parametrize(
    ("name", "batch", "dtype", "gib"),
    [
        ("resnext101", 64, torch.float32, 14.70),
        ("resnext101", 64, torch.bfloat16, 7.40),
        ("resnet50", 256, torch.bfloat16, 10.43),
    ],
)
def test_resnets_save_what_the_facts_say(name: str, batch: int, dtype: torch.dtype, gib: float):
    work = zoo.workload(name, batch=batch, device="meta", optimizer="none")
    x, target = work.batch
    work.model.to(dtype)
    parts = saved_by_part(replace(work, batch=(x.to(dtype), target)))
    assert round(sum(total_bytes(saved) for saved in parts.values()) / 2**30, 2) == gib


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
    before = torch.get_rng_state()
    first = zoo.small(name, seed=3)
    torch.rand(7)  # the second build starts from another global state
    moved = torch.get_rng_state()
    second = zoo.small(name, seed=3)
    assert torch.equal(torch.get_rng_state(), moved)
    torch.set_rng_state(before)
    other = zoo.small(name, seed=4)
    assert torch.equal(torch.get_rng_state(), before)

    pairs = zip(first.model.state_dict().items(), second.model.state_dict().values(), strict=True)
    for (key, mine), theirs in pairs:
        assert torch.equal(mine, theirs), key
    for mine, theirs in zip(first.tensors(), second.tensors(), strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(first.tensors()[0], other.tensors()[0])
    assert not torch.equal(next(first.model.parameters()), next(other.model.parameters()))


@pytest.mark.parametrize("name", EVERY)
def test_the_meta_device_gives_the_same_shapes(name: str):
    real, meta = zoo.small(name), zoo.small(name, device="meta")
    assert meta.device.type == "meta"
    assert [(t.shape, t.dtype) for t in real.tensors()] == [(t.shape, t.dtype) for t in meta.tensors()]
    assert meta.compute_loss().shape == ()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet5", {}, "no model 'resnet5'.*resnet50"),
        ("zzz", {}, "no model 'zzz'.*lenet, resnet18"),
        ("resnet18", {"depths": 50}, "no option 'depths'.*zoo:resnet18.*depth"),
        ("resnet18", {"batch_size": 4}, "no option 'batch_size'.*batch"),
        ("resnet18", {"depth": 19}, "no ResNet of depth 19.*18, 34"),
        ("resnet18", {"dims": 3}, "dims=3"),
        ("resnet18", {"groups": 32}, "no groups"),
        ("resnet18", {"seq": 128}, "resnet18 takes image .*not seq"),
        ("resnet18", {"batch": 0}, "batch of 0 is empty"),
        ("resnet18", {"optimizer": "adamx"}, "no optimizer 'adamx'.*adam"),
        ("gpt2", {"image": 224}, "gpt2 takes seq, not image"),
        ("gpt2", {"seq": 0}, "gpt2 does not take seq=0"),
        ("gpt2", {"seq": 64, "block_size": 32}, "seq=64 is longer than block_size=32"),
        ("gpt2", {"heads": 7}, "768 does not divide into 7 heads"),
        ("gpt2", {"channels_last": True}, "channels_last is for images"),
        ("resnet18-1d", {"channels_last": True}, "channels_last is for images"),
        ("resnet18-1d", {"image": 224}, "resnet18-1d takes seq, not image"),
        ("roberta-base", {"heads": 7}, "768 does not divide into 7 heads"),
        ("lenet", {"image": 32}, "lenet does not take image=32.*It takes 28"),
        ("unet", {"image": 100}, "unet does not take image=100.*16, 32, 48"),
        ("wrn28-2", {"depth": 27}, "no WideResNet of depth 27"),
        ("wrn38", {"blocks": (3, 3, 6, 3)}, "does not fit a WRN-38.*six counts"),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: dict[str, object], message: str):
    with pytest.raises(WorkloadError, match=message):
        zoo.workload(name, device="meta", **arguments)


@pytest.mark.parametrize("name", ["gpt2", "roberta-base"])
def test_block_size_follows_a_longer_sequence(name: str):
    work = zoo.small(name, seq=1100, device="meta")
    assert work.compute_loss().shape == ()
    with pytest.raises(WorkloadError, match="1101 tokens and the model takes 1100"):
        work.model(torch.zeros(1, 1101, dtype=torch.long, device="meta"))


def test_gpt2_reads_no_later_token_and_shares_its_embedding():
    model = zoo.small("gpt2").model.eval()
    ids = torch.arange(16).reshape(1, 16)
    changed = ids.clone()
    changed[0, 10:] = 200
    torch.testing.assert_close(model(ids)[:, :10], model(changed)[:, :10])
    assert model.head.weight is model.tokens.weight


def test_next_token_targets_are_the_ids_one_step_later():
    ids, target = zoo.small("gpt2").batch
    assert torch.equal(ids[:, 1:], target[:, :-1])
    assert ids.untyped_storage().nbytes() == ids.nbytes


def test_roberta_attention_is_scaled_dot_product_attention():
    torch.manual_seed(0)
    attention = Attention(width=32, heads=4, dropout=0.1).eval()
    x = torch.randn(2, 5, 32)
    q, k, v = (f(x).view(2, 5, 4, 8).transpose(1, 2) for f in (attention.query, attention.key, attention.value))
    expected = attention.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected)


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("none", type(None)),
    ],
)
def test_optimizers_go_by_name(optimizer: str, kind: type):
    assert type(zoo.small("lenet", optimizer=optimizer).optimizer) is kind


def test_families_have_their_usual_optimizer():
    usual = {name: type(zoo.small(name).optimizer).__name__ for name in ("resnet18", "gpt2", "roberta-base", "lstm")}
    assert usual == {"resnet18": "SGD", "gpt2": "AdamW", "roberta-base": "AdamW", "lstm": "SGD"}
    assert zoo.small("resnet18").optimizer.defaults["momentum"] == 0.9


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


def test_losses_can_be_pickled():
    for loss in (classification_loss, next_token_loss):
        assert pickle.loads(pickle.dumps(loss)) is loss


def test_importing_the_zoo_imports_no_model():
    code = "import sys, lowtide.zoo; print(*(m for m in sys.modules if m.startswith('lowtide.zoo.')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(found.split()) == {"lowtide.zoo.batches", "lowtide.zoo.catalog"}
