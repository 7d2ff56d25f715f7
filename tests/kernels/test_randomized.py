"""Sketches: the reference against what S must be, and the kernels in Triton against the reference."""

from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.kernels import randomized as chooser
from lowtide.kernels.reference import randomized as reference
from lowtide.kernels.reference.randomized import KINDS, Sketch, philox
from tests.kernels.devices import DEVICE, GPU, TOLERANCE, assert_near
from tests.refusals import refused

from ..nn.variance import variance
from ..soak import SOAK, count, in_soak

SEED = 2**62 + 987654321
CUTS = [(200, 128, 0.2), (24, 128, 0.3), (300, 77, 0.5), (301, 32, 0.1), (90, None, 0.2), (3, 2, 0.4), (5, 2, 1.0)]


def matrix(kind, rows, block, ratio, seed=SEED):
    """S as a matrix, by sketching the identity."""
    return reference.project(torch.eye(rows, dtype=torch.float64), torch.tensor(seed), Sketch(kind, ratio, block))


def bounds(rows, block, ratio):
    sketch = Sketch("rows", ratio, block)
    saved, blocks = sketch.sketch_rows(rows), sketch.blocks(rows)
    for b in range(blocks):
        yield slice(b * saved // blocks, (b + 1) * saved // blocks), slice(b * rows // blocks, (b + 1) * rows // blocks)


def test_philox_gives_the_published_numbers():
    """Known answers of Random123."""
    zeros = philox(torch.tensor(0), 0, 0, 0, 0)
    ones = philox(torch.tensor(-1), *3 * [0xFFFFFFFF], 0xFFFFFFFF)
    digits = philox(torch.tensor(0x299F31D0A4093822), 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert [int(w) for w in zeros] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(w) for w in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert [int(w) for w in digits] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize(("rows", "block", "ratio"), CUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sketch_is_block_diagonal_and_has_its_shape(kind, rows, block, ratio):
    actual = matrix(kind, rows, block, ratio)
    assert actual.shape == (max(1, round(ratio * rows)), rows)
    outside = actual.clone()
    for saved, own in bounds(rows, block, ratio):
        assert saved.stop > saved.start
        assert block is None or own.stop - own.start <= block or saved.stop - saved.start == 1
        part = actual[saved, own]
        size, total = part.shape
        if kind == "rademacher":
            torch.testing.assert_close(part.abs(), torch.full_like(part, size**-0.5))
        elif kind == "gaussian":
            assert part.unique().numel() > 0.99 * part.numel()
        else:  # rows of an orthogonal matrix
            torch.testing.assert_close(part @ part.T, torch.eye(size).double() * total / size)
            if kind == "rows":
                assert ((part != 0).sum(1) == 1).all()
        outside[saved, own] = 0
    assert not outside.any()


@pytest.mark.parametrize("kind", KINDS)
def test_other_seeds_give_other_sketches_and_blocks_differ(kind):
    first, again, other = (matrix(kind, 256, 64, 0.25, seed) for seed in (SEED, SEED, SEED + 1))
    assert torch.equal(first, again)
    parts = [sketch[saved, own] for sketch in (first, other) for saved, own in bounds(256, 64, 0.25)]
    assert all(not torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])


@pytest.mark.parametrize("at_once", [1, 700, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sketch_does_not_depend_on_the_chunks(kind, at_once, monkeypatch):
    expected = [matrix(kind, *cut) for cut in CUTS]
    monkeypatch.setattr(reference, "_AT_ONCE", at_once)
    monkeypatch.setattr(reference, "_AT_LEAST", 1)
    for cut, value in zip(CUTS, expected, strict=True):
        torch.testing.assert_close(matrix(kind, *cut), value)


def test_the_transform_by_fft_is_that_by_its_matrix(monkeypatch):
    cuts = [*CUTS, (64, None, 0.5), (65, None, 1.0), (1, None, 1.0)]
    direct = [matrix("dct", *cut) for cut in cuts]
    monkeypatch.setattr(reference, "_DIRECT", 0)
    for cut, value in zip(cuts, direct, strict=True):
        torch.testing.assert_close(matrix("dct", *cut), value)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_right_on_average_with_the_variance_of_theory(kind, blocks):
    """One block is the whole batch at once, by the formulas of the literature; several are their sum over blocks.

    Blocks are independent of each other, so a batch that is there a hundred times has a hundred draws.
    """
    torch.manual_seed(3)
    rows, times, seeds = 45, 100, count(12, soak=40)
    x = torch.randn(rows, 3) * torch.rand(rows, 1).exp()  # rows of unlike size
    y = torch.randn(rows, 4) + 0.5 * x[:, :1]
    sketch, both = Sketch(kind, 0.2, rows // blocks), torch.cat([x, y], 1).repeat(times, 1)
    actual = []
    for seed in torch.randint(2**63 - 1, (seeds,)):
        sketched = reference.project(both, seed, sketch).double().view(times, -1, 7)
        actual.append(sketched[..., :3].transpose(1, 2) @ sketched[..., 3:])
    expected, theory = x.double().T @ y.double(), variance(kind, x, y, sketch)
    errors = torch.cat(actual) - expected
    assert errors.mean(0).norm() < 3 * (theory / len(errors)) ** 0.5
    assert errors.square().sum((1, 2)).mean() == pytest.approx(theory, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("fft",), "'fft'"),
        (("rows", 0.0), "ratio=0.0"),
        (("rows", 1.5), "ratio=1.5"),
        (("rows", float("nan")), "ratio=nan"),
        (("rows", 0.5, 1), "block=1"),
    ],
)
def test_what_is_no_sketch_is_refused(arguments, named):
    with refused(named):
        Sketch(*arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_runs_on_fake_tensors(kind):
    with FakeTensorMode():
        for rows, block in ((100, 32), (600, None)):
            out = chooser.project(torch.ones(rows, 7), chooser.draw_seed(torch.device("cpu")), Sketch(kind, 0.2, block))
            assert out.shape == (rows // 5, 7)


# -- in Triton ----------------------------------------------------------------------------------------------


@pytest.fixture
def kernels():
    pytest.importorskip("triton")
    from lowtide.kernels.triton import randomized

    return randomized


LAYOUTS = {
    "rows": lambda x: x,
    "transposed": lambda x: x.T.contiguous().T,
    "strided": lambda x: torch.stack([x, x], 2)[..., 0],
    "expanded": lambda x: x[:1].expand_as(x),
}


# Each cut with one kind in float32, and each kind in float16; all on a GPU and under ``make soak``.
GIVEN = [
    *((kind, cut, torch.float32) for kind, cut in zip(KINDS * 2, CUTS, strict=False)),
    *((kind, CUTS[1], torch.float16) for kind in KINDS),
    *(product(KINDS, CUTS, [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]) if GPU or SOAK else ()),
]  # the interpreter has no products of bfloat16


@pytest.mark.parametrize(("kind", "cut", "dtype"), GIVEN, ids=str)
def test_kernels_give_the_sketch_of_the_reference(kernels, kind, cut, dtype):
    rows, block, ratio = cut
    torch.manual_seed(0)
    x, seed = torch.randn(rows, 70).to(DEVICE, dtype), torch.tensor(SEED, device=DEVICE)
    close(kernels.project(x, seed, Sketch(kind, ratio, block)), x, seed, Sketch(kind, ratio, block))


@pytest.mark.parametrize(("kind", "layout"), [*zip(KINDS, LAYOUTS, strict=True), *in_soak(product(KINDS, LAYOUTS))])
def test_kernels_read_any_strides(kernels, kind, layout):
    x, seed = LAYOUTS[layout](torch.randn(60, 131, device=DEVICE)), torch.tensor(SEED, device=DEVICE)
    close(kernels.project(x, seed, Sketch(kind, 0.2, 32)), x, seed, Sketch(kind, 0.2, 32))


def close(actual, x, seed, sketch):
    expected = reference.project(x.double(), seed, sketch)
    assert actual.dtype == x.dtype
    assert_near(actual, expected, TOLERANCE[x.dtype])  # S itself is rounded to the dtype


@pytest.mark.parametrize("kind", ["rademacher", "rows"])
def test_what_is_not_finite_stays_in_its_column(kernels, kind):
    x = torch.randn(40, 9, device=DEVICE)
    x[:, 4] = float("nan")
    seed = torch.tensor(SEED, device=DEVICE)
    for project in (kernels.project, reference.project):
        bad = project(x, seed, Sketch(kind, 0.2, 16)).isnan()
        assert bad[:, 4].all()
        assert bad.sum() == len(bad)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("block", [128, None])
@pytest.mark.parametrize("kind", KINDS)
def test_large_inputs_on_a_gpu(kind, block, dtype):
    x, seed = torch.randn(4000, 520, device="cuda", dtype=dtype), chooser.draw_seed(torch.device("cuda"))
    close(chooser.project(x, seed, Sketch(kind, 0.2, block)), x, seed, Sketch(kind, 0.2, block))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_sketch_takes_no_memory_but_its_result(kind):
    x, seed = torch.randn(16384, 1024, device="cuda", dtype=torch.bfloat16), torch.tensor(1, device="cuda")
    chooser.project(x, seed, Sketch(kind, 0.2))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = chooser.project(x, seed, Sketch(kind, 0.2))
    assert torch.cuda.max_memory_allocated() - before == -(-out.nbytes // 512) * 512
