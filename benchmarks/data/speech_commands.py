"""Speech Commands: a second of one spoken word (Warden, 2018), here at 8 kHz."""

from __future__ import annotations

import lzma
import os
import wave
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.data.samples import Samples, Source, labels
from lowtide.errors import LowtideError

SPEECH_COMMANDS = Source(
    "Speech Commands",
    download="speech_commands_v0.02.tar.gz (or v0.01)",
    page="https://www.tensorflow.org/datasets/catalog/speech_commands "
    "(http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz)",
    layout="validation_list.txt, testing_list.txt and a folder of wav files for each word, in it, "
    "in speech_commands/ or in SpeechCommands/speech_commands_v0.02/",
)
COMMANDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
RATE = 8000  # samples in a second, and in a clip

Waves = NDArray[np.float32]


def speech_commands(
    folder: str | os.PathLike[str] | None = None, *, words: Sequence[str] = COMMANDS
) -> tuple[Samples, Samples, Samples]:
    """Training, validation and test clips: waves (count, 1, 8000) from -1 to 1, labels as indices into ``words``.

    The parts are the official ones, by speaker. Reads the published folders of 16-bit mono wav files, or compact
    copies ``speech_*.npz`` (8-bit mu-law). Files are resampled to 8 kHz through a low-pass filter, and padded or cut to
    a second. Clips of words that are not asked for are left out.
    """
    home = SPEECH_COMMANDS.folder(folder)
    for place in (home, home / "speech_commands", *sorted((home / "SpeechCommands").glob("speech_commands_v*"))):
        if (place / "testing_list.txt").exists():
            return _read(place, words)
    if packed := sorted(home.glob("speech_*.npz")):
        return _unpack(packed, words)
    raise SPEECH_COMMANDS.missing(f"Speech Commands is not in {home}")


def _join(clips: list[tuple[int, int, Waves]]) -> tuple[Samples, Samples, Samples]:
    """Clips as (part, label, wave) to the three parts."""

    def part(number: int) -> Samples:
        mine = [(label, wave) for part_number, label, wave in clips if part_number == number]
        waves: Tensor = torch.from_numpy(np.stack([wave for _, wave in mine])) if mine else torch.empty(0, RATE)
        return Samples(waves[:, None], torch.tensor([label for label, _ in mine], dtype=torch.int64))

    return part(0), part(1), part(2)


# -- The published folders -----------------------------------------------------------------------------


def _read(place: Path, words: Sequence[str]) -> tuple[Samples, Samples, Samples]:
    parts: dict[str, int] = {}
    for name, part in (("validation_list.txt", 1), ("testing_list.txt", 2)):
        path = place / name
        if not path.exists():
            raise SPEECH_COMMANDS.missing(f"{name} is not in {place}")
        with SPEECH_COMMANDS.reading(path):
            parts |= dict.fromkeys(path.read_text(encoding="utf-8").split(), part)
    clips: list[tuple[int, int, Waves]] = []
    for label, word in enumerate(words):
        paths = sorted((place / word).glob("*.wav"))
        if not paths:
            raise SPEECH_COMMANDS.missing(f"{place} has no clips of {word!r}")
        clips += [(parts.get(f"{word}/{path.name}", 0), label, _clip(path)) for path in paths]
    return _join(clips)


def _clip(path: Path) -> Waves:
    # Here, since nothing else of the loaders needs it and it takes a moment to import.
    from scipy.signal import resample_poly

    with SPEECH_COMMANDS.reading(path, wave.Error), wave.open(str(path), "rb") as file:
        rate, kind = file.getframerate(), (8 * file.getsampwidth(), file.getnchannels())
        if kind != (16, 1):
            raise ValueError(f"{kind[0]} bits in {kind[1]} channels; 16 bits in one are expected")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    second = np.zeros(rate, np.float32)
    second[: len(samples)] = samples[:rate] / np.float32(32768)
    if rate == RATE:
        return second
    # The filter rings a little beyond the largest sample.
    return np.clip(np.asarray(resample_poly(second, RATE, rate), np.float32)[:RATE], -1, 1)


# -- Compact copies ------------------------------------------------------------------------------------


def _unpack(paths: Sequence[Path], words: Sequence[str]) -> tuple[Samples, Samples, Samples]:
    """Codes of mu-law as differences along time in one LZMA stream; words and parts as arrays beside it."""
    for word in words:
        if word not in _PACKED_WORDS:
            raise LowtideError(f"The compact copies have no word {word!r}", hint=f"They have {_PACKED_WORDS}.")
    clips: list[tuple[int, int, Waves]] = []
    for path in paths:
        with (
            SPEECH_COMMANDS.reading(path, lzma.LZMAError, zipfile.BadZipFile, zlib.error),
            path.open("rb") as file,  # by hand: np.load leaves a file open that is no archive
            np.load(file) as arrays,
        ):
            stream = lzma.decompress(arrays["big_lzma"].tobytes(), lzma.FORMAT_RAW, filters=_FILTERS)
            codes = np.frombuffer(stream, np.uint8).reshape(-1, RATE).cumsum(axis=1, dtype=np.uint8)
            spoken, parts = arrays["y"], arrays["split"]
            if not len(codes) == len(spoken) == len(parts):
                raise ValueError(f"{len(codes)} clips, {len(spoken)} words, {len(parts)} parts")
            labels(spoken, classes=len(_PACKED_WORDS))
        table = _mu_law()
        for code, word, part in zip(codes, (_PACKED_WORDS[index] for index in spoken), parts, strict=True):
            if word in words:
                clips.append((int(part), words.index(word), table[code]))
    return _join(clips)


def _mu_law() -> Waves:
    """Map codes to levels: 128 is zero, and the levels to both sides are spaced by mu-law with mu = 255."""
    level = (np.arange(256) - 128) / 127
    return (np.sign(level) * (256 ** np.abs(level) - 1) / 255).astype(np.float32)


_PACKED_WORDS = (*COMMANDS, "one", "two", "three", "bed", "cat", "happy")
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 4, "lp": 0, "pb": 0}]
