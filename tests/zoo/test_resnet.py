from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowtide import zoo

from .counting import build, count, saved_by_part, total_bytes


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        ("resnext50", 25_028_904),
        ("resnext101", 88_791_336),
    ],
)
def test_parameters_are_as_many_as_torchvisions(name: str, published: int):
    assert count(build(name)) == published


def test_resnext152_is_counted_by_hand():
    total, wide_in = 3 * 64 * 49 + 2 * 64, 64
    for blocks, inner in ((3, 128), (8, 256), (36, 512), (3, 1024)):
        wide_out = 2 * inner
        total += wide_in * wide_out + 2 * wide_out  # the shortcut
        for _ in range(blocks):
            total += wide_in * inner + 9 * inner * inner // 32 + inner * wide_out + 2 * (2 * inner + wide_out)
            wide_in = wide_out
    assert count(build("resnext152")) == total + 2048 * 1000 + 1000


@pytest.mark.parametrize("depth", [18, 34, 50, 101, 152])
def test_the_1d_resnet_is_the_2d_one_with_thin_kernels(depth: int):
    plain = build(f"resnet{depth}", channels=1, classes=35)
    thin = sum(p.numel() // p.shape[-1] if p.dim() == 4 else p.numel() for p in plain.parameters())
    assert count(build(f"resnet{depth}-1d")) == thin


@pytest.mark.parametrize(
    ("name", "batch", "dtype", "gib"),
    [
        ("resnext101", 64, torch.float32, 14.70),
        ("resnext101", 64, torch.bfloat16, 7.40),
        ("resnet50", 256, torch.bfloat16, 10.43),
    ],
)
def test_resnets_save_the_published_bytes(name: str, batch: int, dtype: torch.dtype, gib: float):
    work = zoo.workload(name, batch=batch, device="meta", optimizer="none")
    x, target = work.batch
    work.model.to(dtype)
    parts = saved_by_part(replace(work, batch=(x.to(dtype), target)))
    assert round(sum(total_bytes(saved) for saved in parts.values()) / 2**30, 2) == gib
