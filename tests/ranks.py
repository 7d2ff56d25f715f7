"""Checks on two processes, which talk by gloo. One pair runs all checks of a file, since starting it takes seconds."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from tests.fresh import preload_torch

_Check = Callable[[int], None]  # of the rank; a function of a module, since processes are told its name


def on_two_ranks(*checks: _Check) -> Callable[..., None]:
    """A test of each check: ``test_on_two_ranks = on_two_ranks(one, another)``. The first of them runs them all."""
    folder: Path | None = None

    @pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)
    def test_on_two_ranks(check: _Check, tmp_path_factory: pytest.TempPathFactory) -> None:
        nonlocal folder
        if folder is None:
            folder = tmp_path_factory.mktemp("ranks")
            _run(checks, folder)
        _assert_passed(check, folder)

    return test_on_two_ranks


def _run(checks: Sequence[_Check], folder: Path) -> None:
    """Leave in the folder a file per check and rank, which says what went wrong."""
    preload_torch()
    with suppress(ProcessRaisedException, ProcessExitedException):  # the check that failed says so
        start_processes(_rank, args=(checks, str(folder)), nprocs=2, start_method="forkserver")


def _assert_passed(check: _Check, folder: Path) -> None:
    files = [folder / f"{check.__name__}.{rank}" for rank in (0, 1)]
    said = [file.read_text() if file.exists() else "not run" for file in files]
    assert said == ["", ""], "\n".join(said)


def _rank(rank: int, checks: Sequence[_Check], folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for check in checks:
        torch.manual_seed(0)
        said = Path(folder, f"{check.__name__}.{rank}")
        try:
            check(rank)
        except BaseException:
            said.write_text(traceback.format_exc())
            raise  # and end: the other rank may wait for this one
        said.write_text("")
    dist.destroy_process_group()
