"""Few-bit storage: the kernel in Triton against the formulas over ATen, and both against what they promise."""

from itertools import product

import pytest
import torch

from lowtide.kernels import compress as chosen
from lowtide.kernels.compress import Draws
from lowtide.kernels.reference import compress as reference
from lowtide.kernels.reference.compress import PARTS, PHILOX_ROUNDS
from lowtide.kernels.reference.randomized import philox
from tests.kernels.devices import DEVICE
from tests.refusals import refused
from tests.soak import each_value, in_soak

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BITS = [2, 4, 8]
SIZES = {"one": 1, "short": 100, "group": 256, "odd": 1543, "programs": 4500}
SEED = 1_234_567_890_123_456  # more than 32 bits


def values(kind: str, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(numel)
    x = torch.randn(numel) * 3 + 1
    if kind == "relu":
        x = x.relu()
    elif kind == "constant":
        x = torch.full((numel,), 0.3)
    elif kind == "mask":
        x = torch.bernoulli(torch.full((numel,), 0.7)) / 0.7
    return x.to(dtype).to(DEVICE)


def there_and_back(x: torch.Tensor, bits: int, seed: int = 0, group: int = 256) -> torch.Tensor:
    stored = chosen.compress(x, Draws(seed), bits=bits, group=group)
    return chosen.decompress(stored, x.numel(), x.dtype, bits=bits, group=group)


def bound(x: torch.Tensor, bits: int, group: int = 256) -> torch.Tensor:
    """For each value: (max - min) / (2^bits - 2) of its group, and half a unit of its dtype."""
    wide = x.double()
    padded = torch.cat([wide, wide[-1:].expand(-len(x) % group)]).view(-1, group)
    step = (padded.amax(1) - padded.amin(1)) / (2**bits - 2)
    unit = torch.finfo(x.dtype).eps * padded.abs().amax(1)
    return (step + unit).repeat_interleave(group)[: len(x)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "bits"), each_value([*DTYPES, torch.float64], BITS), ids=str)
def test_every_value_comes_back_within_the_bound(dtype, size, bits):
    for kind in ("normal", "relu"):
        x = values(kind, SIZES[size], dtype)
        assert bool(((there_and_back(x, bits).double() - x.double()).abs() <= bound(x, bits)).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_value_leaves_the_range_of_its_group(dtype, bits):
    """Not by a unit: 1 - p of a stored probability would be negative."""
    for kind in ("normal", "relu"):
        groups = values(kind, 256 * 200, dtype).sigmoid().view(-1, 256)
        back = there_and_back(groups.view(-1), bits).view(-1, 256)
        assert bool((back.amax(1) <= groups.amax(1)).all())
        assert bool((back.amin(1) >= groups.amin(1)).all())


@pytest.mark.parametrize("bits", BITS)
def test_the_mean_and_the_variance_of_many_draws_are_those_of_the_theory(bits):
    draws, numel = 3000, 512
    x = values("normal", numel)
    many = there_and_back(x.repeat(draws), bits).view(draws, numel).double()
    groups = x.double().view(-1, 256)
    low = groups.amin(1, keepdim=True)
    step = (groups.amax(1, keepdim=True) - low) / (2**bits - 1)
    fraction = ((groups - low) / step).frac().view(-1)
    variance = (step**2).expand(-1, 256).reshape(-1) * fraction * (1 - fraction)
    error = many.mean(0) - x.double()
    drawn = (fraction > 0.01) & (fraction < 0.99)  # the others hardly vary: the ends of a group are exact
    deviation = (error / (variance / draws).sqrt())[drawn]
    assert float(deviation.sum().abs()) < 3 * len(deviation) ** 0.5
    assert float((deviation.abs() < 3).double().mean()) > 0.985
    assert float(deviation.abs().max()) < 5  # of 512
    assert float(error[~drawn].abs().max()) < 0.01 * float(step.max())
    actual = (many - x.double()).square().mean()
    torch.testing.assert_close(actual, variance.mean(), rtol=0.1, atol=0)


@pytest.mark.parametrize("bits", BITS)
def test_behind_a_relu_zeros_stay_zeros_and_nothing_else_becomes_one(bits):
    x = values("relu", 5000)
    x[7] = 1e-30  # far below a step
    back = there_and_back(x, bits)
    assert torch.equal(back == 0, x == 0)
    many = there_and_back(x[:256].repeat(2000), bits).view(2000, 256).double()
    step = (x[:256].amax() - x[:256][x[:256] > 0].amin()) / (2**bits - 2)
    assert float((many.mean(0) - x[:256].double()).abs().max()) < 5 * float(step) / 2 / 2000**0.5


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["constant", "mask"])
def test_one_value_or_one_value_and_zero_are_exact(kind, dtype, bits):
    x = values(kind, 1000, dtype)
    assert torch.equal(there_and_back(x, bits), x)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("kind", ["normal", "relu"])
def test_a_group_with_a_value_that_is_not_finite_is_nan_and_no_other(kind, bad, dtype):
    x = values(kind, 1000, dtype)
    x[300] = bad
    back = there_and_back(x, 4)
    assert bool(back[256:512].isnan().all())
    rest = torch.cat([torch.arange(256), torch.arange(512, 1000)])
    assert bool(back[rest].isfinite().all())


def test_a_range_that_overflows_is_nan_and_a_tiny_one_is_constant():
    x = torch.tensor([-3e38, 3e38] * 128, device=DEVICE)
    assert bool(there_and_back(x, 8).isnan().all())
    tiny = torch.tensor([1e-38, 2e-38] * 128, device=DEVICE)
    assert bool((there_and_back(tiny, 8) - tiny).abs().max() <= 1.01e-38)


@pytest.mark.parametrize(
    ("dtype", "per_group"), [(torch.float32, 8), (torch.bfloat16, 8), (torch.float64, 16)], ids=str
)
@pytest.mark.parametrize("bits", BITS)
def test_the_bytes_are_counted_exactly(bits, dtype, per_group):
    for numel in (1, 256, 257, 10_000):
        groups = (numel + 255) // 256
        header = (groups * per_group + 15) // 16 * 16
        stored = chosen.compress(values("normal", numel, dtype), Draws(0), bits=bits)
        assert stored.untyped_storage().nbytes() == header + groups * 32 * bits
        assert chosen.buffer_bytes(numel, bits, 256, dtype) == stored.nbytes


def test_nothing_is_stored_as_nothing():
    empty = torch.empty(0, device=DEVICE)
    assert chosen.compress(empty, Draws(0), bits=4).nbytes == 0
    assert torch.equal(there_and_back(empty, 4), empty)


def test_the_same_seed_rounds_the_same_way_and_another_call_another_way():
    x = values("normal", 5000)
    assert torch.equal(there_and_back(x, 2, seed=3), there_and_back(x, 2, seed=3))
    assert not torch.equal(there_and_back(x, 2, seed=3), there_and_back(x, 2, seed=4))
    draws = Draws(3)
    assert not torch.equal(chosen.compress(x, draws, bits=2), chosen.compress(x, draws, bits=2))


@pytest.mark.parametrize(("bits", "group"), [(3, 256), (4, 100), (4, 32), (16, 256)])
def test_other_bits_and_groups_are_refused(bits, group):
    with refused(f"bits={bits}", f"group={group}"):
        chosen.compress(values("normal", 1000), Draws(0), bits=bits, group=group)


# -- the kernel in Triton ------------------------------------------------------------------------------


def philox_noise(call: int, group: int):
    """The random numbers of the kernel: 8 of 16 bits from each block of Philox4x32, one for each part of a group."""

    def noise(first: int, count: int) -> torch.Tensor:
        width = group // PARTS
        counter = torch.arange(first * width, (first + count) * width, device=DEVICE)
        seed = torch.tensor(SEED + call, device=DEVICE)
        words = philox(seed, counter & 0xFFFFFFFF, counter >> 32, 0, 0, rounds=PHILOX_ROUNDS)
        halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
        return torch.stack([half.view(count, width) for half in halves], dim=1).view(count, group).int()

    return noise


@pytest.fixture
def kernels():
    pytest.importorskip("triton")
    from lowtide.kernels.triton import compress

    return compress


STORED = [
    *((size, torch.float32, 4, 256) for size in SIZES),
    *(("odd", dtype, bits, 256) for dtype, bits in zip(DTYPES, (8, 2, 4), strict=True)),
    *(("odd", torch.float32, 4, group) for group in (64, 4096)),
    *in_soak(product(SIZES, DTYPES, BITS, (64, 256, 512))),
]


@pytest.mark.parametrize(("size", "dtype", "bits", "group"), STORED, ids=str)
def test_the_kernel_stores_and_reads_what_the_formulas_do(kernels, size, dtype, bits, group):
    numel = SIZES[size]
    for kind in ("normal", "relu", "mask"):
        x = values(kind, numel, dtype)
        seed = torch.tensor(SEED, device=DEVICE)
        stored = kernels.compress(x, bits, group, seed, 7)
        expected = reference.compress(x, bits, group, philox_noise(7, group))
        parts = [reference.split(buffer, numel, bits, group, dtype) for buffer in (stored, expected)]
        for mine, wanted in zip(*parts, strict=True):
            assert torch.equal(mine.view(torch.uint8), wanted.view(torch.uint8))
        back = kernels.decompress(stored, numel, dtype, bits, group)
        torch.testing.assert_close(back, reference.decompress(expected, numel, dtype, bits, group))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3e38], ids=str)
def test_the_kernel_makes_the_same_groups_nan(kernels, bad):
    x = values("normal", 1000)
    x[300], x[301] = bad, -3e38
    stored = kernels.compress(x, 2, 256, torch.tensor(SEED, device=DEVICE), 1)
    back = kernels.decompress(stored, 1000, x.dtype, 2, 256)
    expected = reference.compress(x, 2, 256, philox_noise(1, 256))
    torch.testing.assert_close(back, reference.decompress(expected, 1000, x.dtype, 2, 256), equal_nan=True)
    assert bool(back[256:512].isnan().all())


def test_philox_is_the_published_one():
    """Known answers of Random123 for 7 rounds of Philox4x32 with counter and key 0."""
    words = philox(torch.tensor(0), 0, 0, 0, 0, rounds=PHILOX_ROUNDS)
    assert [int(word) for word in words] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.gpu
def test_more_values_than_32_bits_can_count():
    numel = 2**31 + 300
    x = torch.ones(numel, device="cuda", dtype=torch.bfloat16)
    x[-1] = 3
    back = there_and_back(x, 2)
    assert float(back[-1]) == 3
    assert float(back[: 2**31].max()) == 1


@pytest.mark.gpu
def test_a_captured_graph_draws_anew_each_time_it_is_replayed():
    x = torch.randn(4096, device="cuda")
    there_and_back(x, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        back = there_and_back(x, 2)
    graph.replay()
    first = back.clone()
    graph.replay()
    assert not torch.equal(back, first)
