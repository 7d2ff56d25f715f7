"""Several benchmarks at a time on one GPU, each alone while it measures.

    PYTHONPATH=src:. python -m benchmarks.quiet [--jobs N] "bench_budgets --only GPT-2" "bench_budgets --only ResNeXt"

Compiling takes minutes of the host and little of the GPU, so jobs run side by side. ``quiet`` stops all others, with
the processes that they started, for as long as one measures.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from lowtide.engines import tune

_FOLDER = "LOWTIDE_QUIET"  # in the environment of a job: the folder that all jobs share
_SETTLE = 0.3  # seconds until what others queued on the GPU is done


def run_jobs(commands: Sequence[Sequence[str]], most: int) -> list[int]:
    """Run Python commands, at most some at a time, and return their exit codes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        running: dict[int, subprocess.Popen[bytes]] = {}
        codes = [0] * len(commands)
        for index, command in enumerate(commands):
            while len(running) >= most:
                _reap(running, codes, folder)
            # A cache of its own: another job may be stopped while it holds a lock of a shared one.
            caches = {name: f"{folder}/{name}-{index}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
            environment = {**os.environ, **caches, _FOLDER: folder}
            running[index] = subprocess.Popen([sys.executable, *command], env=environment)
            (Path(folder) / str(running[index].pid)).touch()
        while running:
            _reap(running, codes, folder)
    return codes


def _reap(running: dict[int, subprocess.Popen[bytes]], codes: list[int], folder: str) -> None:
    for index, job in list(running.items()):
        if (code := job.poll()) is not None:
            codes[index] = code
            del running[index]
            (Path(folder) / str(job.pid)).unlink()
    time.sleep(0.1)


@contextmanager
def quiet() -> Generator[None]:
    """Stop all other jobs; without jobs, nothing."""
    folder = os.environ.get(_FOLDER)
    if folder is None:
        yield
        return
    with (Path(folder) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        jobs = [_with_children(int(file.name)) for file in Path(folder).glob("[0-9]*")]
        stopped = [pid for job in jobs if os.getpid() not in job for pid in job]
        _signal(stopped, signal.SIGSTOP)
        try:
            time.sleep(_SETTLE)
            yield
        finally:
            _signal(stopped, signal.SIGCONT)


@contextmanager
def quiet_tuning() -> Generator[None]:
    """Have ``lowtide.plan`` time its plans alone."""
    timing = tune.best_seconds

    def alone(*steps: Any, **options: Any) -> list[float]:
        with quiet():
            return timing(*steps, **options)

    with mock.patch.object(tune, "best_seconds", alone):
        yield


def _signal(pids: Sequence[int], which: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, which)


def _with_children(pid: int) -> list[int]:
    """A process and all that it started, directly or not."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    everyone = [pid]
    for each in everyone:
        everyone += parents.get(each, [])
    return everyone


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("benchmarks", nargs="+", help="a benchmark with its options")
    options.add_argument("--jobs", type=int, default=6, help="benchmarks that run at a time")
    given = options.parse_args()
    commands = [["-m", *shlex.split(f"benchmarks.{each}")] for each in given.benchmarks]
    codes = run_jobs(commands, given.jobs)
    for command, code in zip(given.benchmarks, codes, strict=True):
        print(f"{'failed' if code else 'done'}: {command}")
    raise SystemExit(any(codes))


if __name__ == "__main__":
    main()
