# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false
"""The programs of batch norm + activation. ``batchnorm`` launches them.

Names in capitals are constants at compile time, or sizes. ``at`` are offsets of a block [rows, channels] in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lowtide.kernels.triton.activations import inverse, phi, slope

# -- what the kernels share ----------------------------------------------------------------------------------


@triton.jit
def _offsets(rows, channels, C, L: tl.constexpr, NHWC: tl.constexpr, WIDE: tl.constexpr):
    """Offset of row e (of N·L) of a channel."""
    if WIDE:
        rows = rows.to(tl.int64)
        channels = channels.to(tl.int64)
    if NHWC:
        return rows[:, None] * C + channels[None, :]
    else:
        return ((rows // L) * (C * L) + rows % L)[:, None] + channels[None, :] * L


@triton.jit
def _cells(rows, channels, known, C, ROWS, L: tl.constexpr, NHWC: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of a block, and which of them exist."""
    return _offsets(rows, channels, C, L, NHWC, WIDE), (rows < ROWS)[:, None] & known[None, :]


@triton.jit
def _load(pointer, at, mask):
    return tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _per_channel(pointer, channels, known, default, HAS: tl.constexpr):
    if HAS:
        return tl.load(pointer + channels, mask=known, other=default).to(tl.float32)
    else:
        return tl.full(channels.shape, default, tl.float32)


@triton.jit
def _learned(slopes_ptr, a, channels, known, ACT: tl.constexpr, ONE_SLOPE: tl.constexpr):
    """The activation's first number: a PReLU's slope."""
    if ACT == 12:
        if ONE_SLOPE:
            return tl.load(slopes_ptr).to(tl.float32)
        else:
            return tl.load(slopes_ptr + channels, mask=known, other=0.0).to(tl.float32)[None, :]
    else:
        return a


@triton.jit
def _vectors(
    mean_ptr, invstd_ptr, weight_ptr, bias_ptr, slopes_ptr, a, channels, known,
    ACT: tl.constexpr, AFFINE: tl.constexpr, BIAS: tl.constexpr, ONE_SLOPE: tl.constexpr,
):  # fmt: skip
    """μ, 1/σ, γ, β and the activation's first number."""
    mean = _per_channel(mean_ptr, channels, known, 0.0, True)
    invstd = _per_channel(invstd_ptr, channels, known, 1.0, True)
    gamma = _per_channel(weight_ptr, channels, known, 1.0, AFFINE)
    beta = _per_channel(bias_ptr, channels, known, 0.0, BIAS)
    return mean, invstd, gamma, beta, _learned(slopes_ptr, a, channels, known, ACT, ONE_SLOPE)


@triton.jit
def _sum_parts(partial, kind, channels, known, C, PARTS, BP: tl.constexpr):
    """Add the sums of the parts of a tile in order, ``BP`` parts at a time."""
    total = tl.zeros([BP, channels.shape[0]], tl.float32)
    for first in range(0, PARTS, BP):
        parts = first + tl.arange(0, BP)
        at = (kind * PARTS + parts[:, None]) * C + channels[None, :]
        total += tl.load(partial + at, mask=(parts[:, None] < PARTS) & known[None, :], other=0.0, volatile=True)
    return tl.sum(total, 0)


@triton.jit
def _merge(partial, channels, known, C, PARTS, BP: tl.constexpr):
    """The mean and the variance of a tile from the count, the mean and the squares of its parts (Chan's formula)."""
    count = tl.zeros([BP, channels.shape[0]], tl.float32)
    mean = tl.zeros([BP, channels.shape[0]], tl.float32)
    squares = tl.zeros([BP, channels.shape[0]], tl.float32)
    for first in range(0, PARTS, BP):
        parts = first + tl.arange(0, BP)
        at = parts[:, None] * C + channels[None, :]
        mask = (parts[:, None] < PARTS) & known[None, :]
        more = tl.load(partial + at, mask=mask, other=0.0, volatile=True)
        apart = tl.load(partial + PARTS * C + at, mask=mask, other=0.0, volatile=True) - mean
        squares += tl.load(partial + 2 * PARTS * C + at, mask=mask, other=0.0, volatile=True)
        share = more / tl.maximum(count + more, 1.0)
        mean += apart * share
        squares += apart * apart * count * share
        count += more
    return _merge_lanes(count, mean, squares)


@triton.jit
def _merge_lanes(count, mean, squares):
    """Count, mean and squares of lanes as those of all: the mean and the variance. Means far from 0 lose nothing."""
    total = tl.maximum(tl.sum(count, 0), 1.0)
    origin = tl.sum(tl.where((tl.arange(0, mean.shape[0]) == 0)[:, None], mean, 0.0), 0)
    whole = origin + tl.sum(count * (mean - origin[None, :]), 0) / total
    apart = mean - whole[None, :]
    return whole, tl.sum(squares + count * apart * apart, 0) / total


@triton.jit
def _put_statistics(
    mean, var, mean_ptr, invstd_ptr, running_mean_ptr, running_var_ptr, batches_ptr, tile, channels, mine, ROWS, eps,
    momentum, RUNNING: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    tl.store(mean_ptr + channels, mean, mask=mine)
    tl.store(invstd_ptr + channels, 1.0 / tl.sqrt_rn(var + eps), mask=mine)
    if RUNNING:
        unbiased = var * (ROWS / (ROWS - 1.0))
        old_mean = tl.load(running_mean_ptr + channels, mask=mine, other=0.0).to(tl.float32)
        old_var = tl.load(running_var_ptr + channels, mask=mine, other=0.0).to(tl.float32)
        tl.store(running_mean_ptr + channels, old_mean + momentum * (mean - old_mean), mask=mine)
        tl.store(running_var_ptr + channels, old_var + momentum * (unbiased - old_var), mask=mine)
    if COUNTED:  # noqa: SIM102 - known when compiled, the other not
        if tile == 0:
            tl.store(batches_ptr, tl.load(batches_ptr) + 1)


@triton.jit
def _is_last(counters, tile, PARTS):
    """Tell whether all other programs of the tile have stored their sums. The last one clears the counter."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel") + 1
    tl.debug_barrier()
    if arrived == PARTS:
        tl.store(counters + tile, 0)
    return arrived == PARTS


@triton.jit
def _block(TILES, BM: tl.constexpr):
    """The tile and the first row of a program of a second sweep: from the end, where the first one came last."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    return program % TILES, (program // TILES) * BM


# -- forward -------------------------------------------------------------------------------------------------


@triton.jit
def _activated(
    x, at, mask, mean, invstd, gamma, beta, a, b, z_ptr, xhat_ptr, residual_ptr,
    ACT: tl.constexpr, KEEP_XHAT: tl.constexpr, FROM_XHAT: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Store z. One place for the formula, so that a rebuilt z has the bits of the first."""
    if KEEP_XHAT:
        xhat = ((x - mean[None, :]) * invstd[None, :]).to(xhat_ptr.dtype.element_ty)
        tl.store(xhat_ptr + at, xhat, mask=mask)
        y = xhat.to(tl.float32) * gamma[None, :] + beta[None, :]  # from the rounded x̂, which is what backward has
    elif FROM_XHAT:
        y = x * gamma[None, :] + beta[None, :]
    else:
        y = (x - mean[None, :]) * (gamma * invstd)[None, :] + beta[None, :]
    if RESIDUAL:
        y += _load(residual_ptr, at, mask)
    tl.store(z_ptr + at, phi(y, a, b, ACT).to(z_ptr.dtype.element_ty), mask=mask)


@triton.jit
def forward_whole(
    x_ptr, z_ptr, xhat_ptr, residual_ptr, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, slopes_ptr,
    running_mean_ptr, running_var_ptr, batches_ptr, C, ROWS, eps, momentum, a, b,
    L: tl.constexpr, NHWC: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, ACT: tl.constexpr,
    KEEP_XHAT: tl.constexpr, RESIDUAL: tl.constexpr, AFFINE: tl.constexpr, BIAS: tl.constexpr, RUNNING: tl.constexpr,
    COUNTED: tl.constexpr, ONE_SLOPE: tl.constexpr,
):  # fmt: skip
    """Z = φ(γ(x - μ)/σ + β + residual), μ and σ measured. 2 passes."""
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    known = channels < C
    rows = tl.arange(0, BM)
    at, mask = _cells(rows, channels, known, C, ROWS, L, NHWC, WIDE)
    x = _load(x_ptr, at, mask)
    mean = tl.sum(x, 0) / ROWS
    # A sum of x is rounded to the size of x, that of the differences is not: a mean far from 0 gains digits.
    mean += tl.sum(tl.where(mask, x - mean[None, :], 0.0), 0) / ROWS
    apart = tl.where(mask, x - mean[None, :], 0.0)
    var = tl.sum(apart * apart, 0) / ROWS
    _put_statistics(
        mean, var, mean_ptr, invstd_ptr, running_mean_ptr, running_var_ptr, batches_ptr, tl.program_id(0), channels,
        known, ROWS, eps, momentum, RUNNING, COUNTED,
    )  # fmt: skip
    gamma = _per_channel(weight_ptr, channels, known, 1.0, AFFINE)
    beta = _per_channel(bias_ptr, channels, known, 0.0, BIAS)
    a = _learned(slopes_ptr, a, channels, known, ACT, ONE_SLOPE)
    _activated(
        x, at, mask, mean, 1.0 / tl.sqrt_rn(var + eps), gamma, beta, a, b, z_ptr, xhat_ptr, residual_ptr,
        ACT, KEEP_XHAT, False, RESIDUAL,
    )  # fmt: skip


@triton.jit
def measure(
    x_ptr, mean_ptr, invstd_ptr, running_mean_ptr, running_var_ptr, batches_ptr, partial, counters,
    C, ROWS, PARTS, eps, momentum,
    L: tl.constexpr, NHWC: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
    STAGES: tl.constexpr, RUNNING: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """μ and 1/σ. One pass.

    Sums are of differences from the mean of a part's first block. A mean far from 0 then costs nothing, nor does an
    odd value in that block. Chan's formula merges the parts.
    """
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    channels = tile * BC + tl.arange(0, BC)
    known = channels < C
    lanes = tl.arange(0, BM)
    last = ROWS // BM  # the block that may not be full
    full = (last - part + PARTS - 1) // PARTS  # blocks of this part that are
    rows = part * BM + lanes
    first, mask = _cells(rows, channels, known, C, ROWS, L, NHWC, WIDE)
    x = _load(x_ptr, first, mask)
    origin = (tl.sum(x, 0) / tl.minimum(ROWS - part * BM, BM))[None, :]
    sums = tl.zeros([BM, BC], tl.float32)
    squares = tl.zeros([BM, BC], tl.float32)
    for i in tl.range(0, full, num_stages=STAGES):
        at = _offsets((part + i * PARTS) * BM + lanes, channels, C, L, NHWC, WIDE)
        apart = tl.load(x_ptr + at, mask=known[None, :], other=0.0).to(tl.float32) - origin
        sums += apart
        squares += apart * apart
    count = full * BM
    if last % PARTS == part:
        rows = last * BM + lanes
        ends, mask = _cells(rows, channels, known, C, ROWS, L, NHWC, WIDE)
        x = _load(x_ptr, ends, mask)
        apart = tl.where(mask, x - origin, 0.0)
        sums += apart
        squares += apart * apart
        count += ROWS - last * BM
    total = count.to(tl.float32)
    shift = tl.sum(sums, 0) / total
    slot = part * C + channels
    size = PARTS * C
    tl.store(partial + slot, tl.zeros([BC], tl.float32) + total, mask=known)
    tl.store(partial + size + slot, tl.sum(origin, 0) + shift, mask=known)
    tl.store(partial + 2 * size + slot, tl.maximum(tl.sum(squares, 0) - total * shift * shift, 0.0), mask=known)
    if _is_last(counters, tile, PARTS):
        mean, var = _merge(partial, channels, known, C, PARTS, BP)
        _put_statistics(
            mean, var, mean_ptr, invstd_ptr, running_mean_ptr, running_var_ptr, batches_ptr, tile, channels, known,
            ROWS, eps, momentum, RUNNING, COUNTED,
        )  # fmt: skip


@triton.jit
def normalize(
    x_ptr, z_ptr, xhat_ptr, residual_ptr, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, slopes_ptr,
    C, ROWS, TILES, a, b,
    L: tl.constexpr, NHWC: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, ACT: tl.constexpr,
    KEEP_XHAT: tl.constexpr, FROM_XHAT: tl.constexpr, RESIDUAL: tl.constexpr, AFFINE: tl.constexpr,
    BIAS: tl.constexpr, ONE_SLOPE: tl.constexpr,
):  # fmt: skip
    """Z = φ(γ(x - μ)/σ + β + residual), μ and σ given. 2 passes."""
    tile, first = _block(TILES, BM)
    channels = tile * BC + tl.arange(0, BC)
    known = channels < C
    rows = first + tl.arange(0, BM)
    at, mask = _cells(rows, channels, known, C, ROWS, L, NHWC, WIDE)
    x = _load(x_ptr, at, mask)
    mean, invstd, gamma, beta, a = _vectors(
        mean_ptr, invstd_ptr, weight_ptr, bias_ptr, slopes_ptr, a, channels, known, ACT, AFFINE, BIAS, ONE_SLOPE
    )
    _activated(
        x, at, mask, mean, invstd, gamma, beta, a, b, z_ptr, xhat_ptr, residual_ptr, ACT, KEEP_XHAT, FROM_XHAT, RESIDUAL
    )


# -- backward ------------------------------------------------------------------------------------------------


@triton.jit
def _gradients(
    dz_ptr, saved_ptr, at, mask, mean, invstd, gamma, beta, a, b, unit, residual_ptr,
    ACT: tl.constexpr, KEEPS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """dy, x̂ and, for a PReLU's slope, dz·y where y < 0."""
    dz = _load(dz_ptr, at, mask)
    saved = _load(saved_ptr, at, mask)
    if KEEPS == 0:
        apart = saved - mean[None, :]
        xhat = apart * invstd[None, :]
        y = apart * (gamma * invstd)[None, :] + beta[None, :]
    elif KEEPS == 1:
        xhat = saved
        y = saved * gamma[None, :] + beta[None, :]
    else:
        y = inverse(saved, a, b, unit, ACT)
        xhat = (y - beta[None, :]) * (1.0 / gamma)[None, :]
    if RESIDUAL == 1:
        y += _load(residual_ptr, at, mask)
    elif RESIDUAL == 2:  # z stands for y, which has its sign
        y = _load(residual_ptr, at, mask)
    dy = dz * slope(y, a, b, ACT)
    return dy, xhat, tl.where(y > 0.0, 0.0, dz * y)


@triton.jit
def _put_dx(
    dy, xhat, at, mask, scale, mean_dy, mean_dy_xhat, dx_ptr, dy_ptr, TRAINING: tl.constexpr, RESIDUAL: tl.constexpr
):
    if RESIDUAL:
        tl.store(dy_ptr + at, dy.to(dy_ptr.dtype.element_ty), mask=mask)
    if TRAINING:
        dy -= mean_dy[None, :] + xhat * mean_dy_xhat[None, :]
    tl.store(dx_ptr + at, (scale[None, :] * dy).to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_whole(
    dz_ptr, saved_ptr, residual_ptr, dx_ptr, dy_ptr, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, slopes_ptr,
    dbias_ptr, dweight_ptr, dslopes_ptr,
    C, ROWS, a, b, unit,
    L: tl.constexpr, NHWC: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, ACT: tl.constexpr,
    KEEPS: tl.constexpr, TRAINING: tl.constexpr, RESIDUAL: tl.constexpr, AFFINE: tl.constexpr, BIAS: tl.constexpr,
    ONE_SLOPE: tl.constexpr,
):  # fmt: skip
    """dβ = Σ dy, dγ = Σ dy·x̂, dx = (γ/σ)(dy - dβ/m - x̂·dγ/m) with dy = dz·φ'(y). 3 passes."""
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    known = channels < C
    rows = tl.arange(0, BM)
    at, mask = _cells(rows, channels, known, C, ROWS, L, NHWC, WIDE)
    mean, invstd, gamma, beta, a = _vectors(
        mean_ptr, invstd_ptr, weight_ptr, bias_ptr, slopes_ptr, a, channels, known, ACT, AFFINE, BIAS, ONE_SLOPE
    )
    dy, xhat, dslope = _gradients(
        dz_ptr, saved_ptr, at, mask, mean, invstd, gamma, beta, a, b, unit, residual_ptr, ACT, KEEPS, RESIDUAL
    )
    sum_dy = tl.sum(dy, 0)
    sum_dy_xhat = tl.sum(dy * xhat, 0)
    tl.store(dbias_ptr + channels, sum_dy, mask=known)
    tl.store(dweight_ptr + channels, sum_dy_xhat, mask=known)
    if ACT == 12:
        tl.store(dslopes_ptr + channels, tl.sum(dslope, 0), mask=known)
    _put_dx(dy, xhat, at, mask, gamma * invstd, sum_dy / ROWS, sum_dy_xhat / ROWS, dx_ptr, dy_ptr, TRAINING, RESIDUAL)


@triton.jit
def reduce(
    dz_ptr, saved_ptr, residual_ptr, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, slopes_ptr,
    dbias_ptr, dweight_ptr, dslopes_ptr, partial, counters,
    C, ROWS, PARTS, a, b, unit,
    L: tl.constexpr, NHWC: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
    STAGES: tl.constexpr, ACT: tl.constexpr, KEEPS: tl.constexpr, RESIDUAL: tl.constexpr, AFFINE: tl.constexpr,
    BIAS: tl.constexpr, ONE_SLOPE: tl.constexpr,
):  # fmt: skip
    """Σ dy, Σ dy·x̂ and, for a PReLU, the gradient of its slope. 2 passes."""
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    channels = tile * BC + tl.arange(0, BC)
    known = channels < C
    mean, invstd, gamma, beta, a = _vectors(
        mean_ptr, invstd_ptr, weight_ptr, bias_ptr, slopes_ptr, a, channels, known, ACT, AFFINE, BIAS, ONE_SLOPE
    )
    sum_dy = tl.zeros([BM, BC], tl.float32)
    sum_dy_xhat = tl.zeros([BM, BC], tl.float32)
    sum_slope = tl.zeros([BM, BC], tl.float32)
    for first in tl.range(part * BM, ROWS, PARTS * BM, num_stages=STAGES):
        rows = first + tl.arange(0, BM)
        at, mask = _cells(rows, channels, known, C, ROWS, L, NHWC, WIDE)
        dy, xhat, dslope = _gradients(
            dz_ptr, saved_ptr, at, mask, mean, invstd, gamma, beta, a, b, unit, residual_ptr, ACT, KEEPS, RESIDUAL
        )
        sum_dy += dy
        sum_dy_xhat += dy * xhat
        if ACT == 12:
            sum_slope += dslope
    slot = part * C + channels
    size = PARTS * C
    tl.store(partial + slot, tl.sum(sum_dy, 0), mask=known)
    tl.store(partial + size + slot, tl.sum(sum_dy_xhat, 0), mask=known)
    if ACT == 12:
        tl.store(partial + 2 * size + slot, tl.sum(sum_slope, 0), mask=known)
    if _is_last(counters, tile, PARTS):
        total_dy = _sum_parts(partial, 0, channels, known, C, PARTS, BP)
        tl.store(dbias_ptr + channels, total_dy, mask=known)
        total_dy_xhat = _sum_parts(partial, 1, channels, known, C, PARTS, BP)
        tl.store(dweight_ptr + channels, total_dy_xhat, mask=known)
        if ACT == 12:
            total_slope = _sum_parts(partial, 2, channels, known, C, PARTS, BP)
            tl.store(dslopes_ptr + channels, total_slope, mask=known)


@triton.jit
def apply(
    dz_ptr, saved_ptr, residual_ptr, dx_ptr, dy_ptr, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, slopes_ptr,
    mean_dy_ptr, mean_dy_xhat_ptr,
    C, ROWS, TILES, count, a, b, unit,
    L: tl.constexpr, NHWC: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, ACT: tl.constexpr,
    KEEPS: tl.constexpr, TRAINING: tl.constexpr, RESIDUAL: tl.constexpr, AFFINE: tl.constexpr, BIAS: tl.constexpr,
    ONE_SLOPE: tl.constexpr,
):  # fmt: skip
    """Dx = (γ/σ)(dy - Σ dy/m - x̂·Σ dy·x̂/m) with the sums given. 3 passes."""
    tile, first = _block(TILES, BM)
    channels = tile * BC + tl.arange(0, BC)
    known = channels < C
    rows = first + tl.arange(0, BM)
    at, mask = _cells(rows, channels, known, C, ROWS, L, NHWC, WIDE)
    mean, invstd, gamma, beta, a = _vectors(
        mean_ptr, invstd_ptr, weight_ptr, bias_ptr, slopes_ptr, a, channels, known, ACT, AFFINE, BIAS, ONE_SLOPE
    )
    dy, xhat, _ = _gradients(
        dz_ptr, saved_ptr, at, mask, mean, invstd, gamma, beta, a, b, unit, residual_ptr, ACT, KEEPS, RESIDUAL
    )
    mean_dy = _per_channel(mean_dy_ptr, channels, known, 0.0, TRAINING) / count
    mean_dy_xhat = _per_channel(mean_dy_xhat_ptr, channels, known, 0.0, TRAINING) / count
    _put_dx(dy, xhat, at, mask, gamma * invstd, mean_dy, mean_dy_xhat, dx_ptr, dy_ptr, TRAINING, RESIDUAL)
