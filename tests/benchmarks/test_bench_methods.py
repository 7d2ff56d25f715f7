"""The benchmark of methods: its count of operations is PyTorch's, and it chooses options that can go together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.bench_methods import best_options, flops
from benchmarks.harness import read
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import bench_methods
from lowtide import Workload, profile, zoo
from lowtide.planning.prediction import apply_options
from lowtide.profiling import Profile
from lowtide.techniques import techniques


@pytest.mark.parametrize("name", ["roberta-base", "gpt2", "resnet18", "lenet"])
def test_operations_are_counted_as_pytorch_counts_them(name: str):
    work = zoo.small(name)
    counter = FlopCounterMode(display=False)
    with counter:
        work.compute_loss().backward()
    assert sum(map(flops, profile(zoo.small(name)).graph.ops)) == counter.get_total_flops() > 0


def chunked_gpt2() -> Workload:
    """A loss of several chunks."""
    return zoo.small("gpt2", layers=2, batch=8, seq=64, vocab=4096)


@pytest.fixture(scope="module")
def plain() -> Profile:
    return profile(chunked_gpt2(), fake=True)


@pytest.mark.filterwarnings("ignore:The logits of head are read:RuntimeWarning")  # torch's counter reads all outputs
@pytest.mark.parametrize("name", [name for name in techniques() if name != "batchnorm"])
def test_operations_of_a_technique_are_counted_as_pytorch_counts_them(name: str, plain: Profile):
    """Techniques call the same products in other forms: with out=, in place."""
    options = best_options(techniques()[name], plain)
    assert options, f"{name} offers nothing for this model"
    counter = FlopCounterMode(display=False)
    with apply_options(chunked_gpt2(), options) as applied:
        counted = sum(map(flops, profile(applied.work, fake=True).graph.ops))
        with counter:
            applied.work.compute_loss().backward()
    assert counted == counter.get_total_flops() > 0


def test_an_option_is_the_one_with_the_lowest_peak():
    work = zoo.small("gpt2", layers=6)
    plain = profile(work)
    (chosen,) = best_options(techniques()["sqrt"], plain)
    assert chosen in techniques()["sqrt"].options(plain)
    assert not best_options(techniques()["batchnorm"], plain)


def test_a_case_has_a_row_of_the_plain_step_and_of_each_technique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = {"name": "gpt2", "layers": 3, "width": 16, "heads": 2, "vocab": 64, "batch": 4, "seq": 16}
    monkeypatch.setitem(bench_methods.CASES, "cpu", {"tiny": settings})
    threads = torch.get_num_threads()
    try:
        bench_methods.main(device="cpu", only="sqrt (", repeats=1, results=tmp_path)
    finally:
        torch.set_num_threads(threads)
    entries = read(tmp_path / "methods.csv")
    rows = {(row["subject"].partition(" ")[0], row["metric"]): float(row["value"]) for row in entries}
    assert {subject for subject, _ in rows} == {"plain", "sqrt"}
    assert rows["plain", "FLOPs"] == 1 < rows["sqrt", "FLOPs"] < 4 / 3
    assert rows["sqrt", "peak"] < rows["plain", "peak"]
    assert rows["plain", "batch in plain's peak"] == 1 < rows["sqrt", "batch in plain's peak"]
