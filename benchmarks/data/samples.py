"""Parts that loaders share: their result, their folders, and their errors for missing or damaged data sets."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.errors import LowtideError


class Samples(NamedTuple):
    """Inputs (float32, normalised, the batch first) and their labels (int64), in the order of the files."""

    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Source:
    """A data set as its makers publish it: what to download, from which page, and how it is laid out."""

    name: str
    download: str
    page: str
    layout: str

    def folder(self, path: str | os.PathLike[str] | None) -> Path:
        """The folder from the argument or from ``LOWTIDE_DATA``, if it is one."""
        named = os.environ.get("LOWTIDE_DATA", "") if path is None else path
        if not os.fspath(named):
            raise self.missing(f"No folder is given for {self.name}")
        folder = Path(named).expanduser()
        if not folder.is_dir():
            raise self.missing(f"There is no folder {folder}")
        return folder

    def missing(self, what: str) -> LowtideError:
        """The error that tells a stranger how to get the data set."""
        return LowtideError(
            what,
            hint=f"Download {self.download} from {self.page}, so that the folder has {self.layout}; "
            "then give the folder as the argument or in LOWTIDE_DATA.",
        )

    def damaged(self, path: Path, why: object) -> LowtideError:
        """The error for a file that exists and is damaged, or is another."""
        return LowtideError(
            f"{path.name} is not a file of {self.name}: {why}",
            where=str(path),
            hint=f"Download {self.download} again from {self.page}.",
        )

    @contextmanager
    def reading(self, path: Path, *errors: type[Exception]) -> Generator[None]:
        """Turn what a damaged file makes readers raise into an error that names the file."""
        try:
            yield
        except (OSError, EOFError, ValueError, KeyError, IndexError, *errors) as error:
            raise self.damaged(path, f"{type(error).__name__}: {error}") from error


def images(pixels: NDArray[np.uint8], *, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Pixels (count, channels, height, width) as floats with about mean 0 and variance 1 in each channel."""
    shape = (1, -1, 1, 1)
    # In place: the float copy of CIFAR-10 alone is 700 MB.
    scaled = torch.from_numpy(pixels).to(torch.float32).div_(255)
    return scaled.sub_(torch.tensor(mean).view(shape)).div_(torch.tensor(std).view(shape))


def labels(values: NDArray[np.generic], *, classes: int) -> Tensor:
    """Class numbers as int64; ValueError for one that is no class."""
    loaded = torch.from_numpy(values.astype(np.int64))
    if len(loaded) and not 0 <= int(loaded.min()) <= int(loaded.max()) < classes:
        raise ValueError(f"labels from {int(loaded.min())} to {int(loaded.max())}, for {classes} classes")
    return loaded
