"""The page of families says what the engine makes of each family's tiny model now."""

from tests.support.families import FAMILIES
from tests.support.families_page import PAGE, measured_families, written


def test_table_is_what_the_engine_gives() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "`python -m tests.support.families_page` writes it again"


def test_measured_families_are_those_with_measurements_of_gpus() -> None:
    assert measured_families() <= {*FAMILIES}
    assert "llama" in measured_families()
    assert "apertus" not in measured_families()
