from __future__ import annotations

import lzma
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.refusals import refused

from benchmarks.data import COMMANDS, speech_commands

WORDS = ("yes", "no")


def tone(hertz: float, *, seconds: float = 1.0, rate: int = 16_000, size: float = 0.5) -> np.ndarray:
    return size * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def write(path: Path, samples: np.ndarray, *, rate: int = 16_000, channels: int = 1, bits: int = 16) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(bits // 8)
        file.setframerate(rate)
        file.writeframes(np.round(samples * 32767).astype("<i2").tobytes())


def publish(folder: Path) -> Path:
    """Three clips of each of two words, as the archive unpacks; the second is for validation, the third for testing."""
    for word, hertz in zip(WORDS, (440, 660), strict=True):
        for take, name in enumerate(("0a_nohash_0.wav", "0b_nohash_0.wav", "0b_nohash_1.wav")):
            write(folder / word / name, tone(hertz * (take + 1)))
    (folder / "_background_noise_").mkdir(parents=True)
    (folder / "validation_list.txt").write_text("".join(f"{word}/0b_nohash_0.wav\n" for word in WORDS))
    (folder / "testing_list.txt").write_text("".join(f"{word}/0b_nohash_1.wav\n" for word in WORDS))
    return folder


def test_the_official_parts_are_kept(tmp_path: Path):
    parts = speech_commands(publish(tmp_path), words=WORDS)
    for take, (waves, labels) in enumerate(parts):
        assert waves.shape == (2, 1, 8000)
        assert waves.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert labels.tolist() == [0, 1]
        for wave_of_word, hertz in zip(waves, (440, 660), strict=True):
            assert int(torch.fft.rfft(wave_of_word[0]).abs().argmax()) == hertz * (take + 1)  # bins of 1 Hz: a second


@pytest.mark.parametrize("place", ["speech_commands", "SpeechCommands/speech_commands_v0.02"])
def test_usual_places_are_looked_into(tmp_path: Path, place: str):
    publish(tmp_path / place)
    assert len(speech_commands(tmp_path, words=["no"])[0].labels) == 1


def test_a_tone_below_4_khz_stays_and_one_above_goes(tmp_path: Path):
    publish(tmp_path)
    write(tmp_path / "yes" / "0a_nohash_0.wav", tone(1000))
    write(tmp_path / "no" / "0a_nohash_0.wav", tone(6000))
    low, high = speech_commands(tmp_path, words=WORDS)[0].inputs[:, 0, 100:-100]
    wanted = torch.from_numpy(tone(1000, rate=8000)).float()[100:-100]
    # A short filter passes 1 kHz to a few thousandths, and 16-bit samples add 2e-5.
    torch.testing.assert_close(low, wanted, atol=5e-3, rtol=0)
    assert high.abs().max() < 0.01  # without a filter it would come back as 2 kHz, as loud as before


@pytest.mark.parametrize(("seconds", "rate"), [(0.4, 16_000), (1.3, 16_000), (0.4, 8_000), (1.3, 8_000), (0.5, 44_100)])
def test_clips_are_padded_or_cut_to_a_second(tmp_path: Path, seconds: float, rate: int):
    publish(tmp_path)
    write(tmp_path / "yes" / "0a_nohash_0.wav", tone(440, seconds=seconds, rate=rate), rate=rate)
    clips = speech_commands(tmp_path, words=["yes"])[0].inputs[0, 0]
    assert clips.shape == (8000,)
    heard = round(min(seconds, 1) * 8000)
    wanted = torch.from_numpy(tone(440, seconds=min(seconds, 1), rate=8000)).float()
    torch.testing.assert_close(clips[100 : heard - 100], wanted[100:-100], atol=5e-3, rtol=0)  # as above
    assert not clips[heard + 100 :].any()


def test_samples_at_8_khz_are_exact(tmp_path: Path):
    publish(tmp_path)
    write(tmp_path / "yes" / "0a_nohash_0.wav", tone(440, rate=8000), rate=8000)
    clips = speech_commands(tmp_path, words=["yes"])[0].inputs[0, 0]
    wanted = np.round(tone(440, rate=8000) * 32767) / 32768
    assert torch.equal(clips, torch.from_numpy(wanted).float())


def pack(path: Path, codes: np.ndarray, spoken: list[int], parts: list[int]) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 4, "lp": 0, "pb": 0}]
    differences = np.diff(codes.astype(int), axis=1, prepend=0) % 256
    stream = lzma.compress(differences.astype(np.uint8).tobytes(), lzma.FORMAT_RAW, filters=filters)
    np.savez(path, big_lzma=np.frombuffer(stream, np.uint8), y=np.array(spoken), split=np.array(parts))


def test_a_compact_file_holds_mu_law(tmp_path: Path):
    codes = np.random.default_rng(0).integers(1, 256, (4, 8000), dtype=np.uint8)
    codes[0, :3] = (128, 255, 1)  # zero, the loudest, the loudest below zero
    pack(tmp_path / "speech_a.npz", codes, spoken=[0, 1, 9, 10], parts=[0, 1, 2, 0])
    train, validation, test = speech_commands(tmp_path)
    assert train.inputs[0, 0, :3].tolist() == [0.0, 1.0, -1.0]
    level = (codes[1].astype(float) - 128) / 127
    wanted = np.sign(level) * np.expm1(np.abs(level) * np.log1p(255)) / 255
    torch.testing.assert_close(validation.inputs[0, 0], torch.from_numpy(wanted).float())
    assert (train.labels.tolist(), validation.labels.tolist(), test.labels.tolist()) == ([0], [1], [9])
    assert COMMANDS[9] == "go"
    more = speech_commands(tmp_path, words=["one", "yes"])
    assert [part.labels.tolist() for part in more] == [[1, 0], [], []]
    assert more[1].inputs.shape == (0, 1, 8000)


def test_a_word_that_is_not_there_is_named(tmp_path: Path):
    pack(tmp_path / "speech_a.npz", np.zeros((1, 8000), np.uint8), spoken=[0], parts=[0])
    with refused("'marvin'", "'yes', 'no'"):
        speech_commands(tmp_path, words=["marvin"])
    publish(tmp_path / "speech_commands")
    with refused("'marvin'", "Download"):
        speech_commands(tmp_path, words=["yes", "marvin"])


def test_a_missing_list_is_named(tmp_path: Path):
    (publish(tmp_path) / "validation_list.txt").unlink()
    with refused("validation_list.txt"):
        speech_commands(tmp_path, words=WORDS)


@pytest.mark.parametrize("content", [b"", b"RIFF", b"not a wav at all"])
def test_a_damaged_clip_is_refused(tmp_path: Path, content: bytes):
    (publish(tmp_path) / "no" / "0b_nohash_1.wav").write_bytes(content)
    with refused("0b_nohash_1.wav", "Speech Commands"):
        speech_commands(tmp_path, words=WORDS)


@pytest.mark.parametrize(("channels", "bits"), [(2, 16), (1, 8)])
def test_other_kinds_of_wav_are_refused(tmp_path: Path, channels: int, bits: int):
    write(publish(tmp_path) / "yes" / "0a_nohash_0.wav", tone(440), channels=channels, bits=bits)
    with refused(f"{bits} bits in {channels} channels"):
        speech_commands(tmp_path, words=WORDS)


@pytest.mark.parametrize("damage", ["cut", "stream", "counts", "words"])
def test_a_damaged_compact_file_is_refused(tmp_path: Path, damage: str):
    path = tmp_path / "speech_a.npz"
    pack(path, np.zeros((2, 8000), np.uint8), spoken=[0, 99 if damage == "words" else 1], parts=[0, 1])
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    elif damage in ("stream", "counts"):
        with np.load(path) as file:
            arrays = dict(file)
        name, end = ("big_lzma", -4) if damage == "stream" else ("split", 1)
        np.savez(path, **arrays | {name: arrays[name][:end]})
    with refused("speech_a.npz", "Speech Commands"):
        speech_commands(tmp_path)
