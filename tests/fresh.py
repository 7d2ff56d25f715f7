"""Code in a fresh process, which a server forks after it imported torch: each import takes seconds."""

from __future__ import annotations

import traceback
import warnings
from multiprocessing.connection import Connection

import torch
from torch import multiprocessing


def preload_torch() -> None:
    """Have the server import torch before it forks. Nothing runs there, so a fork is clean."""
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch._dynamo", __name__])


def run_fresh(code: str) -> None:
    """Run code in a fresh process, in which torch is imported and lowtide is not."""
    preload_torch()
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(code, sender))
    process.start()
    sender.close()
    try:
        error = receiver.recv() if receiver.poll(300) else "no answer"
    except EOFError:
        error = "the process ended"
    process.join(10)
    assert not error, error


def _run(code: str, sender: Connection) -> None:
    warnings.simplefilter("ignore")
    try:
        exec(code, {"__name__": "__main__", "torch": torch})
        sender.send("")
    except BaseException:
        sender.send(traceback.format_exc())
