from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from lowtide import zoo

from .counting import build, count, saved_by_part, total_bytes


def test_parameters_are_as_many_as_published():
    assert count(build("wrn28-2")) == 1_467_610


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


def test_wrn_saves_the_feature_maps_of_the_table():
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
