"""Byte sizes as people write them (``6GiB``, ``800MB``, ``6442450944``), and durations."""

import math
import re
from numbers import Real

from lowtide.errors import LowtideError

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_LARGEST = 2**63  # no machine addresses as much
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(size: float | str) -> int:
    """Read a size in bytes. GB is 10⁹ and GiB is 2³⁰.

    >>> parse_size("6GiB"), parse_size("800 MB"), parse_size(1024), parse_size(1.5e9)
    (6442450944, 800000000, 1024, 1500000000)
    """
    hint = "Write for example 6GiB, 800MB or a number of bytes."
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        number = float(match[1]) * _UNITS[match[2].lower()] if match and match[2].lower() in _UNITS else math.nan
    else:
        number = size if isinstance(size, Real) and not isinstance(size, bool) else math.nan
    if not -math.inf < number < math.inf:  # works for integers that no float holds, unlike math.isfinite
        raise LowtideError(f"Not a size: {size!r}", hint=hint)
    if number < 0:
        raise LowtideError(f"A size cannot be negative: {size}")
    if number >= _LARGEST:
        raise LowtideError("A size is less than 2⁶³ bytes", hint=hint)
    return int(number)


def format_size(size: float) -> str:
    """Print a size in binary units, three significant digits.

    >>> format_size(6 * 2**30), format_size(1_500_000), format_size(12), format_size(-2048)
    ('6.00 GiB', '1.43 MiB', '12 B', '-2.00 KiB')
    """
    sign, size = ("-", -size) if size < 0 else ("", size)
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{sign}{_three_digits(size / scale)} {unit}"
    return f"{sign}{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """A duration in the unit that suits it, three significant digits; a dash where it is not known.

    >>> format_seconds(0.0123), format_seconds(2.5), format_seconds(-3e-5), format_seconds(float("nan"))
    ('12.3 ms', '2.50 s', '-30.0 µs', '–')
    """
    if math.isnan(seconds):
        return "–"
    if seconds == 0:
        return "0 s"
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    unit, scale = next((each for each in (("s", 1.0), ("ms", 1e-3)) if seconds >= each[1]), ("µs", 1e-6))
    return f"{sign}{_three_digits(seconds / scale)} {unit}"


def _three_digits(number: float) -> str:
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}"
