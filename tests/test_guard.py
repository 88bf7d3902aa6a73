"""The number guard: what counts as a number, and which pairs of wordings may share KV."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rksc import numbers, same_numbers

F = Fraction


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no number at all", []),
        ("3 cats and 3 dogs", [3, 3]),
        ("12cm, 3kg", [12, 3]),
        ("$1,000 and 1,234,567.50", [1000, F("1234567.5")]),
        ("1, 2, 3", [1, 2, 3]),
        ("0.50 or .5", [F(1, 2), F(1, 2)]),
        ("-3 degrees, 5 - 3, a 4-inch nail, x-4", [-3, 5, 3, 4, 4]),
        ("\N{MINUS SIGN}7", [-7]),
        ("40%, 40 percent, forty per cent", [F(2, 5)] * 3),
        ("3/4 of 1 1/2 cups", [F(3, 4), F(3, 2)]),
        ("½ and 2½ and 1⅓", [F(1, 2), F(5, 2), F(4, 3)]),
        ("1/0", [1]),
        ("5k steps, 5 km", [5000, 5]),
        ("at 7:30 in the 1980s", [7, 30, 1980]),
        ("three", [3]),
        ("one of them", []),
        ("twenty-five", [25]),
        ("twenty five", [25]),
        ("two hundred and ten", [210]),
        ("one hundred", [100]),
        ("a hundred", [100]),
        ("one hundred and one", [101]),
        ("three thousand two hundred", [3200]),
        ("2 million", [2000000]),
        ("two million five hundred thousand", [2500000]),
        ("two, three", [2, 3]),
        ("twenty twenty", [20, 20]),
        ("nineteen ninety", [19, 90]),
        ("half, a quarter, one third", [F(1, 2), F(1, 4), F(1, 3)]),
        ("two thirds", [F(2, 3)]),
        ("two-thirds", [F(2, 3)]),
        ("a third of it", [F(1, 3)]),
        ("the third day", [3]),
        ("20 third graders", [20, 3]),
        ("one half", [F(1, 2)]),
        ("two and a half", [F(5, 2)]),
        ("one and one-half", [F(3, 2)]),
        ("twice, thrice, double, tripled", [2, 3, 2, 3]),
        ("a dozen, two dozen, half a dozen", [12, 24, 6]),
        ("three score, a score of 20", [60, 20]),
        ("NINE Lives", [9]),
    ],
)
def test_numbers(text: str, expected: list[int | Fraction]) -> None:
    assert numbers(text) == Counter(F(value) for value in expected)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("Tom has 3 apples and buys 4.", "Tom buys four apples; three he had.", True),
        ("Half of 12 eggs", "50% of a dozen eggs", True),
        ("Tom has 3 apples.", "Tom has 4 apples.", False),
        ("Tom has 3 apples and 3 pears.", "Tom has 3 apples and pears.", False),
        ("He pays 1.5 dollars", "He pays 15 dollars", False),
        ("It costs 50", "It costs 50%", False),
        # What it cannot see, said here as in the documentation: one word turned round.
        ("Ann has 3 more than Bob's 5.", "Ann has 3 fewer than Bob's 5.", True),
    ],
)
def test_pairs(a: str, b: str, same: bool) -> None:
    assert same_numbers(a, b) is same
    assert same_numbers(b, a) is same


# What a guard once lost: a minus wherever it stands, an exponent's sign, a scale, an order.
DIFFERENT = [
    ("[-5, 3]", "[5, 3]"), ("(3,-5)", "(3,5)"), ("x>-5", "x>5"), ("T:\n-5", "T:\n5"),
    ('"-5"', '"5"'), ("|-5|", "|5|"), ("1e-5", "1e5"), ("10^-5", "10^5"), ("10^{-5}", "10^{5}"),
    ("\u20135 degrees", "5 degrees"), ("\u22125", "5"), ("- 5", "5"), ("minus 5", "5"),
    ("minus five", "five"), ("negative 5", "5"), ("$-5", "$5"), ("-$5", "$5"),
    ("[-five, 5]", "[five, 5]"), ("\u2212twenty", "twenty"), ("- half", "half"),
    ("minus a half", "half"), ("minus a third of it", "a third of it"), ("minus twice", "twice"),
    ("minus a dozen", "a dozen"), ("from negative one to 5", "from one to 5"),
    ("x minus one", "x plus one"), ("[1,500)", "1500"),
    ("word—-5", "word—5"),
    ("$5M", "$5B"), ("5 M", "5 B"), ("$5m", "$5b"), ("5bn", "5mn"), ("5k", "5"), ("10²", "102"),
    ("x₁ and x₂", "x₁ and x₃"), ("2^3", "3^2"), ("3/4", "4/3"), ("3/4", "3 and 4"),
    ("1 3/4", "13/4"),
    (r"\frac{3}{4}", r"\frac{4}{3}"), ("12:30", "30:12"), ("3:5", "5:3"), ("7:30", "7 and 30"),
    ("2024-01-05", "2024-05-01"), ("1/2/2024", "2/1/2024"), ("9{,}500", "9 and 500"),
    ("12,34", "12.34"), ("12,34 m", "12 and 34 m"), ("0,5 l", "5 l"), (".5", "5"), ("50%", "50"),
    ("5 - 3", "5 + 3"), ("5 — 3", "5 + 3"), ("minus\n5", "\n5"), ("x-4", "x+4"),
    ("x - 4 = 0", "x + 4 = 0"),     ("ten minus five", "ten and five"),
    ("twenty - five", "twenty-five"), ("±5", "5"), ("3 am", "3 pm"), ("Chapter Ⅳ", "Chapter Ⅴ"),
    ("1,000", "1 and 000"), ("1.000.000", "1"), ("٣", "٤"), ("①", "②"), ("&minus;5", "5"),
    ("-\u20605", "5"), ("1\u200b000", "1"), ("0.\\overline{3}", "0.3"), ("1e400", "1e401"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_different_numbers_are_never_the_same(a: str, b: str) -> None:
    for before, after in (("", ""), ("It is ", "."), ("How many? (", ")"), ("Is x = ", " right?")):
        one, other = before + a + after, before + b + after
        assert not same_numbers(one, other) and not same_numbers(other, one), (one, other)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("$9{,}500", "9,500 dollars"), ("−5 °C", "minus five degrees"), ("5M", "five million"),
        ("1½ cups", "one and a half cups"), ("1 3/4", "1.75"), ("10^3", "a thousand"),
        (r"\frac{1}{2}", "half"), ("40\\%", "forty per cent"), ("１２", "a dozen"),
        ("10 minus 5", "10 - 5"),
        ("1'000", "1 000"), ("2e6", "two million"), ("Ⅻ", "12"),
    ],
)  # fmt: skip
def test_equal_numbers_are_the_same_however_they_are_written(a: str, b: str) -> None:
    assert same_numbers(f"It was {a} in all", f"{b} it was")


@given(st.integers(0, 10**12))
def test_grouped_digits_are_the_same_value(n: int) -> None:
    assert numbers(f"about {n:,} of them") == numbers(f"about {n} of them") == Counter([F(n)])


@given(st.text(max_size=60))
def test_any_text_is_read(text: str) -> None:
    """No text, however strange, raises or hangs."""
    assert same_numbers(text, text)


def test_endless_digits_are_read_quickly() -> None:
    """int() refuses strings of more than 4,300 digits; here they are a number like others."""
    assert same_numbers("9" * 20000, "9" * 20000)
    assert not same_numbers("9" * 20000, "9" * 19999 + "8")
    assert not same_numbers("12" * 20000, "21" * 20000)
    assert numbers("hundred " * 10**5) == numbers("hundred " * 10**5)
