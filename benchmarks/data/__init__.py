"""Public data sets that the benchmarks train on, read from your disk as plain tensors.

    from benchmarks.data import mnist

    (images, labels), test = mnist("~/data")

Nothing is downloaded. The folder is the argument, or else the environment variable ``LOWTIDE_DATA``. The error for a
missing data set says what to download, from which page, and how to lay it out.
"""

from benchmarks.data.cifar10 import cifar10
from benchmarks.data.mnist import mnist
from benchmarks.data.mrpc import Pairs, mrpc
from benchmarks.data.samples import Samples
from benchmarks.data.speech_commands import COMMANDS, speech_commands

__all__ = ["COMMANDS", "Pairs", "Samples", "cifar10", "mnist", "mrpc", "speech_commands"]
