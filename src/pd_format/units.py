"""Rates and sizes as people write them: bits and bytes told apart, anything that could be either refused.

Decimal prefixes (k, m, g, t, in either case) are powers of 1000, binary ones (Ki, Mi, Gi, Ti) of 1024.
"""

from __future__ import annotations

import re

from pd_format.errors import UserError

__all__ = ["format_bandwidth", "format_bytes", "format_ms", "parse_bandwidth", "parse_size"]

_EXAMPLES = "Write bits as 10gbps or 25 Gbit/s, bytes as 1.25GB/s."

_SIZE_EXAMPLES = "Write 16GB (powers of 1000), 16GiB (of 1024) or 512MB."

_RATE = re.compile(
    r"""
    (?P<number> [+-]? (?: \d+ \.? \d* | \. \d+ ) (?: [eE] [+-]? \d+ )? )
    \s*
    (?P<unit>
        (?P<prefix> [kKmMgGtT] [iI]? )?
        (?P<what> [bB][iI][tT][sS]? | [bB][yY][tT][eE][sS]? | [bB] )?
        (?P<second> \s*/\s*[sS](?:ec|econd)? | [pP][sS] )?
    )
    """,
    re.VERBOSE,
)

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

_LEAST_BPS = 1.0
_MOST_BPS = 1e18
_MOST_BYTES = 1e15


def parse_bandwidth(text: str) -> float:
    """Read a rate such as `10gbps`, `25 Gbit/s`, `1.25GB/s` or `100mbit`.

    `b` and `bit` are bits, `B` and `byte` are bytes; `bit` may stand without `/s`, since nobody gives a size
    in bits.

    Returns:
        bits per second, above 0 and finite.

    Raises:
        UserError: the text is no rate, not above 0, or may mean more than one thing; the message says what to
        write.
    """

    def refuse(reason: str) -> UserError:
        return UserError(f"{text!r} {reason} {_EXAMPLES}")

    match = _RATE.fullmatch(text.strip())
    if match is None:
        if re.fullmatch(r"[+-]?(nan|inf|infinity)\D*", text.strip(), re.IGNORECASE):
            raise refuse("is not a finite number; expected a rate above 0.")
        if re.match(r"\d+,\d", text.strip()):
            raise refuse("has a comma; decimals take a point.")
        raise refuse("is not a rate: expected a number and a unit.")
    number, unit = float(match["number"]), match["unit"]
    what, second = match["what"] or "", match["second"] or ""
    short = f"{match['number']}{(match['prefix'] or '').lower()}"
    if not unit:
        raise refuse(f"has no unit: it could be {short}gbps or {short}mbps, bits or bytes.")
    if not what:
        raise refuse("does not say of what: bits (b) or bytes (B).")
    bits = what.lower().startswith("bi") or what == "b"
    spelled = len(what) > 1
    if not spelled and unit.isupper() and second:
        raise refuse("is in capitals throughout, so B may be bits or bytes.")
    if not second and not (spelled and bits):
        raise refuse("is a size, not a rate; a rate ends in ps or /s.")
    prefix = (match["prefix"] or "").lower()
    power = _POWERS[prefix[:1]]
    bps = number * (1024.0 if prefix.endswith("i") else 1000.0) ** power * (1.0 if bits else 8.0)
    if not number > 0:
        raise refuse("is not above 0.")
    if not _LEAST_BPS <= bps <= _MOST_BPS:
        raise refuse(f"comes to {bps:g} bits a second; expected {_LEAST_BPS:g} to {_MOST_BPS:g}.")
    return bps


def parse_size(text: str) -> int:
    """Read a size such as `16GB`, `16 GiB`, `512MB` or `800 kbytes`; `16gb`, too, is bytes, as nobody counts
    memory in bits.

    Returns:
        bytes, 1 or more; a fraction of a byte is dropped.

    Raises:
        UserError: the text is no size, not above 0, has no unit, or counts bits; the message says what to write.
    """

    def refuse(reason: str) -> UserError:
        return UserError(f"{text!r} {reason} {_SIZE_EXAMPLES}")

    match = _RATE.fullmatch(text.strip())
    if match is None:
        if re.fullmatch(r"[+-]?(nan|inf|infinity)\D*", text.strip(), re.IGNORECASE):
            raise refuse("is not a finite number; expected a size above 0.")
        if re.match(r"\d+,\d", text.strip()):
            raise refuse("has a comma; decimals take a point.")
        raise refuse("is not a size: expected a number and a unit.")
    number, unit = float(match["number"]), match["unit"]
    what = match["what"] or ""
    short = f"{match['number']}{(match['prefix'] or '').upper()[:1]}"
    if not unit:
        raise refuse(f"has no unit: it could be {short}GB or {short}MB.")
    if match["second"]:
        raise refuse("is a rate, not a size.")
    if not what:
        raise refuse(f"does not say of what: bytes are written {short}B.")
    if what.lower().startswith("bi") or (what == "b" and not unit.islower()):
        raise refuse("counts bits; memory is counted in bytes (B).")
    prefix = (match["prefix"] or "").lower()
    size = number * (1024.0 if prefix.endswith("i") else 1000.0) ** _POWERS[prefix[:1]]
    if not number > 0:
        raise refuse("is not above 0.")
    if not 1 <= size <= _MOST_BYTES:
        raise refuse(f"comes to {size:g} bytes; expected 1 to {_MOST_BYTES:g}.")
    return int(size)


def format_bandwidth(bps: float) -> str:
    """A rate in bits and in bytes: `25 Gbit/s (3.125 GB/s)`. Takes bits per second."""
    return f"{_scaled(bps, 'bit', 4)}/s ({_scaled(bps / 8, 'B', 4)}/s)"


def format_bytes(size: float) -> str:
    """A size with three digits and a decimal prefix: `1.25 GB`. Takes bytes."""
    return _scaled(size, "B")


def format_ms(ms: float) -> str:
    """A time with its unit, short enough for a table: `0.004 ms`, `12.34 ms`, `1,234 ms`, `250 s`. Takes
    milliseconds."""
    if ms == 0:
        return "0 ms"
    if ms < 0.001:
        return "<0.001 ms"
    if ms < 1:
        return f"{ms:.3f} ms"
    if ms < 100:
        return f"{ms:.2f} ms"
    if ms < 1000:
        return f"{ms:.1f} ms"
    if ms < 99_999.5:
        return f"{ms:,.0f} ms"
    return f"{ms / 1000:,.0f} s" if ms < 1e8 else f"{ms / 1000:.3g} s"


def _scaled(value: float, unit: str, digits: int = 3) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.{digits}g} {prefix}{unit}"
        value /= 1000
    return f"{value:.{digits}g} P{unit}"
