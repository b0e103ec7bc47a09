"""`x-retry-count` as any producer may have written it."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.delivery import read_retry_count
from tests.fakes.steps import make_delivery

OVER_ANY_LIMIT = 1_000_000


@pytest.mark.parametrize("value", [None, 0, "0", b"0"])
def test_r27_absent_or_zero_is_0(value: Any) -> None:
    assert read_retry_count(value) == 0


@pytest.mark.parametrize("value", [2, "2", " 2 ", b"2", b" 2\t", 2.0, "002"])
def test_r27_a_number_in_any_dress_is_read(value: Any) -> None:
    assert read_retry_count(value) == 2


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        "abc",
        "",
        -1,
        "-1",
        -2.0,
        "2.5",
        "٢",
        "²",
        b"\xff",
        [1],
        {"a": 1},
        datetime.now(UTC),
        Decimal(2),
        float("nan"),
        float("-inf"),
    ],
)
def test_r27_junk_negative_numbers_and_booleans_are_0(value: Any) -> None:
    assert read_retry_count(value) == 0


@pytest.mark.parametrize("value", [2**40, "9" * 400, 2**200, float("inf"), 1e300, b"9" * 400])
def test_r27_a_huge_number_is_over_any_limit_and_fits_64_bits_with_one_more(value: Any) -> None:
    assert OVER_ANY_LIMIT <= read_retry_count(value) < 2**63 - 1


@given(st.one_of(st.integers(), st.floats(), st.text(), st.binary(), st.booleans(), st.lists(st.integers())))
def test_r27_whatever_comes_it_is_an_int_from_0_on(value: Any) -> None:
    count = read_retry_count(value)
    assert type(count) is int
    assert count >= 0


def test_a_delivery_reads_its_own_header() -> None:
    assert make_delivery(headers={"x-retry-count": "3"}).retry_count == 3
    assert make_delivery(headers={}).retry_count == 0
    assert make_delivery().retry_count == 0
