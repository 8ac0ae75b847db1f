"""The table of families says what the engine makes of each family's tiny model now."""

from tests.support.families import FAMILIES
from tests.support.families_page import TABLE, measured_families, table
from tests.support.measurements import all_lines


def test_table_is_what_the_engine_gives():
    written = TABLE.read_text(encoding="utf-8")
    assert table() == written, "`python -m tests.support.families_page` writes it again"


def test_measured_families_are_those_with_measurements_of_gpus():
    measured = measured_families(all_lines())
    assert measured <= {*FAMILIES}
    assert "llama" in measured
    assert "deepseek_v3" not in measured


def test_family_that_only_a_peer_has_trained_on_a_gpu_is_not_called_measured():
    by_peer = [line for line in all_lines() if line["case"] == "qwen3_5_trl"]
    assert by_peer
    assert not measured_families(by_peer)
