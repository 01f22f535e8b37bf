"""Rates: what is understood, what is refused and with which words; sizes and times as tables show them."""

from __future__ import annotations

import pytest

from pd_format.errors import UserError
from pd_format.units import format_bandwidth, format_bytes, format_ms, parse_bandwidth, parse_size


@pytest.mark.parametrize(
    ("text", "bps"),
    [
        ("10gbps", 10e9),
        ("10Gbps", 10e9),
        ("10Gbit", 10e9),
        ("10 Gbit/s", 10e9),
        ("10gb/s", 10e9),
        ("10GBIT/S", 10e9),
        ("1.25GB/s", 10e9),
        (" 1.25 GB/s ", 10e9),
        ("1.25GBps", 10e9),
        ("1.25 GBytes/s", 10e9),
        ("25 Gbit/s", 25e9),
        ("10GBps", 80e9),
        ("100mbit", 100e6),
        ("100 Mbit/sec", 100e6),
        ("100 kbps", 100e3),
        (".5tbps", 0.5e12),
        ("1e3 bit/s", 1000.0),
        ("8bps", 8.0),
        ("8 B/s", 64.0),
        ("1GiB/s", 8.0 * 2**30),
        ("1 MiBps", 8.0 * 2**20),
        ("1Kibit/s", 1024.0),
    ],
)
def test_a_rate_is_bits_per_second(text: str, bps: float) -> None:
    assert parse_bandwidth(text) == bps


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10", "has no unit: it could be 10gbps or 10mbps, bits or bytes."),
        ("0", "has no unit"),
        ("-1", "has no unit"),
        ("1.5", "it could be 1.5gbps"),
        ("0gbps", "is not above 0."),
        ("-1gbps", "is not above 0."),
        ("0.1bps", "comes to 0.1 bits a second; expected 1 to 1e+18."),
        ("1e30gbps", "comes to 1e+39 bits a second"),
        ("1e400gbps", "comes to inf bits a second"),
        ("nan", "is not a finite number"),
        ("NaN gbps", "is not a finite number"),
        ("inf", "is not a finite number"),
        ("-infgbps", "is not a finite number"),
        ("10g", "does not say of what: bits (b) or bytes (B)."),
        ("10G/s", "does not say of what"),
        ("10GB", "is a size, not a rate; a rate ends in ps or /s."),
        ("10Gb", "is a size, not a rate"),
        ("10 gigs", "is not a rate"),
        ("1.25 gigabytes/s", "is not a rate"),
        ("10GBPS", "is in capitals throughout, so B may be bits or bytes."),
        ("10GB/S", "is in capitals throughout"),
        ("1,25GB/s", "has a comma; decimals take a point."),
        ("abc", "is not a rate: expected a number and a unit."),
        ("", "is not a rate"),
        ("gbps", "is not a rate"),
        ("10gbps5", "is not a rate"),
        ("10 gb ps x", "is not a rate"),
    ],
)
def test_what_is_ambiguous_or_no_rate_is_refused_with_examples(text: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_bandwidth(text)
    message = str(caught.value)
    assert message.startswith(f"{text!r} ")
    assert reason in message
    assert message.endswith("Write bits as 10gbps or 25 Gbit/s, bytes as 1.25GB/s.")


@pytest.mark.parametrize(
    ("bps", "text"),
    [
        (10e9, "10 Gbit/s (1.25 GB/s)"),
        (25e9, "25 Gbit/s (3.125 GB/s)"),
        (100e6, "100 Mbit/s (12.5 MB/s)"),
        (8.0, "8 bit/s (1 B/s)"),
        (1e18, "1000 Pbit/s (125 PB/s)"),
    ],
)
def test_a_rate_is_shown_in_bits_and_in_bytes(bps: float, text: str) -> None:
    assert format_bandwidth(bps) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_999, "1 MB"), (1_250_000_000, "1.25 GB"), (2**53, "9.01 PB")],
)
def test_a_size_has_a_decimal_prefix(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0.0, "0 ms"),
        (0.0004, "<0.001 ms"),
        (0.0049, "0.005 ms"),
        (12.344, "12.34 ms"),
        (123.44, "123.4 ms"),
        (1234.4, "1,234 ms"),
        (99_999.4, "99,999 ms"),
        (250_000.0, "250 s"),
        (1e15, "1e+12 s"),
    ],
)
def test_a_time_is_short(ms: float, text: str) -> None:
    assert format_ms(ms) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GB", 16 * 10**9),
        ("16 GB", 16 * 10**9),
        ("16gb", 16 * 10**9),
        ("16GiB", 16 * 2**30),
        (" 512MB ", 512 * 10**6),
        ("512 MiB", 512 * 2**20),
        ("1.5 TB", 1_500_000_000_000),
        ("800 kbytes", 800_000),
        ("1e3B", 1000),
        ("1 byte", 1),
    ],
)
def test_a_size_is_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("16", "has no unit: it could be 16GB or 16MB."),
        ("-1", "has no unit"),
        ("16G", "does not say of what: bytes are written 16GB."),
        ("16Gb", "counts bits; memory is counted in bytes (B)."),
        ("16Gbit", "counts bits"),
        ("16GB/s", "is a rate, not a size."),
        ("16gbps", "is a rate, not a size."),
        ("0GB", "is not above 0."),
        ("-16GB", "is not above 0."),
        ("0.1B", "comes to 0.1 bytes; expected 1 to 1e+15."),
        ("1e30GB", "comes to 1e+39 bytes"),
        ("1e400GB", "comes to inf bytes"),
        ("nan", "is not a finite number"),
        ("infGB", "is not a finite number"),
        ("1,5GB", "has a comma"),
        ("lots", "is not a size: expected a number and a unit."),
        ("", "is not a size"),
        ("16GB of memory", "is not a size"),
    ],
)
def test_a_text_that_is_no_size_is_refused_with_what_to_write(text: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_size(text)
    assert str(caught.value).startswith(f"{text!r} {reason}")
    assert str(caught.value).endswith("Write 16GB (powers of 1000), 16GiB (of 1024) or 512MB.")
