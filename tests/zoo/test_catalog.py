from __future__ import annotations

from lowtide import zoo


def test_families_have_their_usual_optimizer():
    usual = {name: type(zoo.small(name).optimizer).__name__ for name in ("resnet18", "gpt2", "roberta-base", "lstm")}
    assert usual == {"resnet18": "SGD", "gpt2": "AdamW", "roberta-base": "AdamW", "lstm": "SGD"}
    assert zoo.small("resnet18").optimizer.defaults["momentum"] == 0.9


def test_small_models_have_the_structure_of_the_large_ones():
    for name in ("resnet18", "gpt2", "roberta-base", "lstm", "unet"):
        large, small = zoo.workload(name, device="meta", batch=1), zoo.small(name, device="meta")
        assert {type(m) for m in large.model.modules()} == {type(m) for m in small.model.modules()}
        assert sum(p.numel() for p in small.model.parameters()) < sum(p.numel() for p in large.model.parameters()) / 9
