"""The variance of sketched gradients, by formula: E‖(S·Y)ᵀ(S·X) − YᵀX‖² for one seed's S."""

import math

import torch


def variance(kind, x, y, sketch):
    """Over the blocks that a sketch cuts the rows into, which are independent of each other."""
    rows, saved, blocks = len(x), sketch.sketch_rows(len(x)), sketch.blocks(len(x))
    total = 0.0
    for b in range(blocks):
        own = slice(b * rows // blocks, (b + 1) * rows // blocks)
        k = (b + 1) * saved // blocks - b * saved // blocks
        total += OF_ONE_BLOCK[kind](x[own].double(), y[own].double(), k)
    return total


def gaussian(x, y, k):
    return float(x.square().sum() * y.square().sum() + (x.T @ y).square().sum()) / k


def rademacher(x, y, k):
    return gaussian(x, y, k) - 2 * float(_products(x, y).sum()) / k


def rows(x, y, k):
    """Without replacement."""
    n = len(x)
    with_replacement = (n * float(_products(x, y).sum()) - float((x.T @ y).square().sum())) / k
    return with_replacement * (n - k) / max(1, n - 1)


def dct(x, y, k):
    """Rows of C·D·x, C the transform and D random signs: by the formula of rows, with its expectation over D."""
    n = len(x)
    i, j = torch.arange(n).double(), torch.arange(n).double()
    c = (math.pi * (2 * j + 1) * i.unsqueeze(1) / (2 * n)).cos().square() * 2 / n
    c[0] = 1 / n
    expected = 0.0
    for a in c:  # of |Σ a_j d_j x_j|² |Σ a_j d_j y_j|²: signs must meet in pairs
        mixed = (a.unsqueeze(1) * x).T @ y
        expected += float((a @ x.square().sum(1)) * (a @ y.square().sum(1)) + 2 * mixed.square().sum())
        expected -= 2 * float(a.square() @ _products(x, y))
    return (n * expected - float((x.T @ y).square().sum())) / k * (n - k) / max(1, n - 1)


def _products(x, y):
    return x.square().sum(1) * y.square().sum(1)


OF_ONE_BLOCK = {"gaussian": gaussian, "rademacher": rademacher, "rows": rows, "dct": dct}
