import pytest

from workflow.lib.system import number_formats


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1536, "1.50 KiB"),
        (int(21.3 * 2**30), "21.30 GiB"),
        (5000 * 2**30, "5,000.00 GiB"),
        (-3 * 2**20, "\N{MINUS SIGN}3.00 MiB"),
    ],
)
def test_size_takes_the_largest_binary_unit_that_fits(value, text):
    assert number_formats.size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.3712, "1.37 s"),
        (59.99, "60 s"),
        (60, "1 min 0 s"),
        (4021.7, "1 h 7 min"),
        (90_211.4, "1 d 1 h"),
    ],
)
def test_duration_names_its_two_largest_units(seconds, text):
    assert number_formats.duration(seconds) == text


def test_small_p_value_is_a_bound_and_not_zero():
    assert [number_formats.probability(p) for p in (0.0, 0.0009, 0.0123)] == [
        "p < 0.001",
        "p < 0.001",
        "p = 0.012",
    ]


def test_negative_numbers_have_a_true_minus_sign():
    assert number_formats.signed(-0.25) == "\N{MINUS SIGN}0.2500"
    assert number_formats.general(2e-5) == "2e\N{MINUS SIGN}05"


@pytest.mark.parametrize(
    "character", ["\x00", "\x1b", "\x7f", "\x9b", "\u202e", "\u2069", "\ud800"]
)
def test_acting_character_is_shown_by_its_code(character):
    assert number_formats.visible(f"a{character}b") == f"a[U+{ord(character):04X}]b"


def test_thinned_curve_keeps_first_last_and_every_spike():
    values = [1.0] * 10_007
    values[4003], values[7001] = 99.0, -99.0
    positions = number_formats.thinned(values, limit=200)
    assert {0, 4003, 7001, 10_006} <= set(positions)
    assert len(positions) <= 200
    assert positions == sorted(positions)
