"""The page of families says what the engine makes of each family's tiny model now."""

from tests.support.families import FAMILIES
from tests.support.families_page import PAGE, measured_families, written
from tests.support.measurements import all_lines


def test_table_is_what_the_engine_gives() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "`python -m tests.support.families_page` writes it again"


def test_measured_families_are_those_with_measurements_of_gpus() -> None:
    assert measured_families() <= {*FAMILIES}
    assert "llama" in measured_families()
    assert "apertus" not in measured_families()


def test_family_that_only_a_peer_has_trained_on_a_gpu_is_not_called_measured() -> None:
    assert any(line["case"] == "qwen3_5_trl" for line in all_lines())
    assert not {"qwen3_5", "qwen3_5_text"} & measured_families()
