"""A network of two batch norms with activations, and how many full-size buffers a step keeps.

They are counted twice: by lowtide's profiler, and from the allocator's events, where nothing of lowtide is used.
"""

import copy

import torch
from torch import nn

from lowtide import Workload, profile
from lowtide.nn import BatchNormAct2d

CHANNELS = 8
LARGE = (16, 8, 16, 16)
FULL = 4 * 16 * 8 * 16 * 16


def convolution():
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)


def network(activation, strategy=None):
    """conv-bn-act-conv-bn-act-conv, where bn-act is torch's or lowtide's."""

    def norm_act():
        act = copy.deepcopy(activation)
        return [nn.BatchNorm2d(CHANNELS), act] if strategy is None else [BatchNormAct2d(CHANNELS, act, strategy)]

    torch.manual_seed(0)
    return nn.Sequential(convolution(), *norm_act(), convolution(), *norm_act(), convolution())


def mean_loss(model, batch):
    return model(batch).mean()


def kept_by_profile(model, x, loss=mean_loss):
    shown = profile(Workload(model, loss, x))
    sizes = {s.id: s.bytes for s in shown.graph.storages}
    return len({s.storage for s in shown.saved if s.category == "activation" and sizes[s.storage] == FULL})


def kept_by_allocator(model, x, loss=mean_loss):
    """Allocations of full size that live when the forward has run and nothing but the loss is held."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        held = loss(model, x)
    events = profiler.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert held.requires_grad
    return sizes.count(FULL) - sizes.count(-FULL)
