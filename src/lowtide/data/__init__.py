"""Public data sets that the benchmarks and examples train on, read from your disk as plain tensors.

    from lowtide.data import mnist

    (images, labels), test = mnist("~/data")

Nothing is downloaded. The folder is the argument, or else the environment variable ``LOWTIDE_DATA``; where a data
set is not there, the error says what to download, from which page, and how to lay it out.
"""

from lowtide.data.cifar10 import cifar10
from lowtide.data.mnist import mnist
from lowtide.data.mrpc import Pairs, mrpc
from lowtide.data.samples import Samples
from lowtide.data.speech_commands import COMMANDS, speech_commands

__all__ = ["COMMANDS", "Pairs", "Samples", "cifar10", "mnist", "mrpc", "speech_commands"]
