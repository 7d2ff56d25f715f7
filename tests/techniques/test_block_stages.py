"""A model's chains of blocks as one chain of stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide import Workload, zoo
from lowtide.chains import OptimalSchedules, keep_all, recursive, simulate
from lowtide.planning import estimate_peak
from lowtide.profiling import profile
from lowtide.techniques import Option
from lowtide.techniques.block_chains import BlockChains
from lowtide.techniques.block_stages import BlockStages
from lowtide.techniques.optimal import Optimal
from lowtide.techniques.segments import SegmentConfig
from tests.contract.workloads import chain
from tests.models import Call, blocks


def test_the_chain_says_of_its_schedules_what_their_price_says() -> None:
    work = chain(8, batch=64)
    plain = profile(work, fake=True)
    stages = BlockStages(BlockChains(plain))
    stage_chain = stages.chain
    assert [stage.positions for stage in stages.stages] == [*((i,) for i in range(8)), ()]
    whole = simulate(stage_chain, keep_all(stage_chain)).peak_bytes
    for schedule in (
        recursive(stage_chain, stages.segment_ends),
        OptimalSchedules(stage_chain, 500, stages.segment_ends).schedule(whole // 2),
    ):
        option = Option("optimal", ("",), SegmentConfig(tuple(stages.trees(schedule).values())))
        price = Optimal().price(option, plain)
        assert price.seconds == pytest.approx(
            schedule.forward_seconds(stage_chain) - sum(stage_chain.forward_seconds), rel=1e-6
        )
        saved = plain.peak_bytes - estimate_peak(plain.graph, [price])
        assert saved == pytest.approx(whole - simulate(stage_chain, schedule).peak_bytes, rel=0.1)


def test_several_chains_share_one_budget() -> None:
    parts = {name: blocks(4, 16) for name in ("first", "second", "third")}
    model = Call(lambda m, x: m.third(m.second(m.first(x).sin()).sin()), **parts)  # chains with other ops between
    plain = profile(Workload(model, lambda m, x: m(x).sum(), torch.randn(64, 16)), fake=True)
    sites = [set(option.site) for option in Optimal().options(plain)]
    assert max(map(len, sites)) > 2
    assert min(map(len, sites)) == 1


def test_blocks_of_a_list_are_segments_by_themselves() -> None:
    work = zoo.small("unet")
    for option in Optimal().options(profile(work, fake=True)):
        for path, tree in zip(option.site, option.config.trees, strict=True):
            if isinstance(work.model.get_submodule(path), nn.ModuleList):
                assert all(len(node) == 1 for node in tree)
