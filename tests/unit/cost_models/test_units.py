"""Human units in, SI out, and back without loss."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.errors import UsageError
from cost_models.units import (
    UnitError,
    bandwidth_text,
    bytes_between,
    bytes_text,
    counted,
    flops_text,
    format_bandwidth,
    format_bytes,
    format_flops,
    format_flops_rate,
    format_seconds,
    listed,
    parse_bandwidth,
    parse_bytes,
    parse_flops,
    parse_seconds,
    percent,
    seconds_between,
    seconds_text,
    show,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("80GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("80 GB", 80 * 10**9),
        ("1.5kB", 1500),
        ("79.1GiB", 84932978278),
        ("512B", 512),
        (4096, 4096),
        ("80e9", 80 * 10**9),
        ("0", 0),
    ],
)
def test_bytes(text: str | int, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("400Gb/s", 50e9),
        ("50GB/s", 50e9),
        ("25Gbit/s", 3.125e9),
        ("100Gbps", 12.5e9),
        ("1GiB/s", 2.0**30),
        ("0.1TB/s", 1e11),
        (3.5e9, 3.5e9),
    ],
)
def test_bandwidth_tells_bits_from_bytes(text: str | float, bytes_per_second: float) -> None:
    assert parse_bandwidth(text) == bytes_per_second


def test_seconds_and_rates() -> None:
    assert parse_seconds("5us") == parse_seconds("5µs") == 5e-6
    assert parse_seconds("1.5ms") == 1.5e-3
    assert parse_seconds("300ns") == 3e-7
    assert parse_flops("989TFLOPS") == parse_flops("989T") == parse_flops("0.989 PFLOP/s") == 989e12


@pytest.mark.parametrize(
    "value",
    [
        "",
        "eighty",
        "80",
        "80Gb",
        "80G",
        "80gib",
        "-1GB",
        "nan",
        "inf",
        "1e999GB",
        "GB",
        "8 0GB",
        "80GB/s",
        "1" * 100,
    ],
)
def test_what_is_no_size(value: str) -> None:
    if value == "80":  # a bare number is in base units, text or not
        assert parse_bytes(value) == 80
        return
    with pytest.raises(UnitError) as caught:
        parse_bytes(value)
    assert caught.value.what.startswith('expected a size such as "80GiB", got "')


@pytest.mark.parametrize("value", [True, None, [1], {"a": 1}, math.nan, math.inf, -1])
def test_what_is_no_number(value: object) -> None:
    for parse in (parse_bytes, parse_bandwidth, parse_seconds, parse_flops):
        with pytest.raises(UnitError):
            parse(value)  # type: ignore[operator]


def test_an_error_is_a_usage_error_and_a_value_error() -> None:
    with pytest.raises(UsageError) as caught:
        parse_bandwidth("4GB")
    assert caught.value.exit_code == 2
    assert caught.value.render() == (
        'error[usage]: expected a bandwidth such as "400Gb/s" or "50GB/s", got "4GB"'
    )
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), ValueError)  # noqa: S301 - our own bytes


def test_formats() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(512) == "512 B"
    assert format_bytes(80 * 2**30) == "80.0 GiB"
    assert format_bytes(1.5 * 2**40) == "1.50 TiB"
    assert format_bandwidth(50e9) == "50.0 GB/s"
    assert format_flops(2.5e12) == "2.50 TFLOP"
    assert format_flops_rate(989.4e12) == "989 TFLOP/s"
    assert format_seconds(0) == "0 ns"
    assert format_seconds(1.23e-3) == "1.23 ms"
    assert format_seconds(999.99e-6) == "1.00 ms"
    assert format_seconds(71.5) == "71.5 s"
    assert format_seconds(7200) == "2.00 h"
    assert format_seconds(-2e-3) == "-2.00 ms"
    assert format_bandwidth(math.inf) == "inf B/s"


def test_exact_texts() -> None:
    assert bytes_text(80 * 2**30) == "80GiB"
    assert bytes_text(80 * 10**9) == "80GB"
    assert bytes_text(0) == 0
    assert bandwidth_text(50e9) == "50GB/s"
    assert seconds_text(3.4e-6) == "3.4us"
    assert flops_text(989.4e12) == "989.4TFLOPS"
    assert bandwidth_text(1e10 / 3) == 1e10 / 3  # no unit says it exactly


@given(st.integers(min_value=0, max_value=10**18))
def test_sizes_survive_being_written(size_bytes: int) -> None:
    assert parse_bytes(bytes_text(size_bytes)) == size_bytes


@given(st.floats(min_value=1e-12, max_value=1e20))
def test_rates_survive_being_written(value: float) -> None:
    assert parse_bandwidth(bandwidth_text(value)) == value
    assert parse_seconds(seconds_text(value)) == value
    assert parse_flops(flops_text(value)) == value


def test_show_is_short() -> None:
    assert show(None) == "nothing"
    assert show(True) == "true"
    assert show("a\nb") == '"a\\nb"'
    assert show({"a": 1, "b": 2}) == "a mapping with a, b"
    assert show([]) == "an empty list"
    assert len(show("x" * 1000)) == 60


def test_counts_and_lists_read_well() -> None:
    assert counted(1, "stage") == "1 stage"
    assert counted(0, "process") == "0 processes"
    assert counted(2000, "micro-batch") == "2,000 micro-batches"
    assert listed([3, 4, 5]) == listed(iter([3, 4, 5]), 3) == "3, 4, 5"
    assert listed(["a", "b", "c"], 2) == "a, b, …"
    assert listed(["a", "b", "c"], 2, count_rest=True) == "a, b, and 1 more"
    assert listed([]) == ""
    assert [percent(part) for part in (0, 0.0004, 0.123, -0.5)] == ["0%", "0.04%", "12.3%", "-50.0%"]


def test_ranges_have_the_unit_of_their_value_and_few_digits() -> None:
    assert seconds_between(0.584, 0.5204, 0.6682) == "584 ms (520–670)"
    assert seconds_between(0.95, 0.8249, 1.2345) == "950 ms (820–1230)"
    assert seconds_between(1.02, 0.0973, 1.1) == "1.02 s (0.097–1.10)"
    assert seconds_between(7200, 6000, 9000) == "2.00 h (1.67–2.5)"
    assert bytes_between(71 * 2**30, 68 * 2**30, 74.4 * 2**30) == "71.0 GiB (68–74)"
    assert bytes_between(1000, 999, 1001) == "1000 B (1000–1000)"
    assert bytes_between(1000, 949, 1999) == "1000 B (950–2000)"
    assert bytes_between(0, 0, 0) == "0 B"
