import csv
import io
import re

import pytest

from tests.support.report_examples import add_forgetting, add_original, edit, write_run
from tests.support.report_pages import Page, read, rendered
from workflow.lib.report.comparison import comparison_csv, setting_columns


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path, "demo", num_steps=13)
    folder = write_run(tmp_path, "other", num_steps=13, rate=5e-4)
    edit(folder / "finetune" / "summary.json", lambda d: d["settings"]["lora"].update(r=64))
    edit(
        folder / "finetune" / "summary.json", lambda d: d["settings"]["model"].update(source="=1+1")
    )
    for subject in ("base", "tuned"):
        edit(folder / "evaluate_run" / f"{subject}.json", lambda d: d.update(tasks={}))
    edit(
        folder / "evaluate_run" / "tuned.json", lambda d: d["comparisons"]["base"].update(tasks={})
    )
    return read(tmp_path, "demo", "other")


def test_csv_has_one_line_a_run_with_unrounded_numbers(runs):
    rows = list(csv.DictReader(io.StringIO(comparison_csv(runs))))
    assert [row["run"] for row in rows] == ["demo", "other"]
    assert float(rows[0]["tuned_heldout_loss"]) == 1.5123456789
    assert float(rows[0]["tuned_heldout_loss_ci95_low"]) == 1.4511
    assert float(rows[0]["heldout_p_value"]) == 0.000999
    assert float(rows[0]["train.learning_rate"]) == 2e-4
    assert int(rows[0]["peak_bytes_measured"]) == runs[0].summary.peak_bytes.measured
    assert float(rows[0]["pydocs_mc.acc.difference"]) == 0.3618


def test_columns_of_the_base_say_that_it_is_the_quantized_one(runs):
    (row, _) = csv.DictReader(io.StringIO(comparison_csv(runs)))
    assert float(row["nf4_base_heldout_loss"]) == 2.9876543211
    assert float(row["nf4_base_perplexity"]) == 19.8391
    assert float(row["pydocs_mc.acc.reference"]) == 0.2519
    assert (row["reference"], row["served"]) == ("base", "tuned")
    assert not [name for name in row if re.search(r"(?<!nf4_)\bbase", name) or ".base" in name]


def test_forgetting_is_a_column_of_its_own(tmp_path):
    for name in ("demo", "other"):
        write_run(tmp_path, name, num_steps=3)
    add_forgetting(tmp_path / "runs" / "demo", 0.125)
    rows = list(csv.DictReader(io.StringIO(comparison_csv(read(tmp_path, "demo", "other")))))
    assert [row["forgetting"] for row in rows] == ["0.125", ""]
    assert (rows[0]["forgetting_ci95_low"], rows[0]["tuned_other_text_loss"]) == (
        "0.09375",
        "2.125",
    )


def test_cost_of_4_bits_is_a_column_of_its_own(tmp_path):
    for name in ("demo", "other"):
        write_run(tmp_path, name, num_steps=3)
    add_original(tmp_path / "runs" / "demo", loss=2.5)
    found = read(tmp_path, "demo", "other")
    rows = list(csv.DictReader(io.StringIO(comparison_csv(found))))
    assert float(rows[0]["four_bits_cost"]) == pytest.approx(2.9876543211 - 2.5)
    assert float(rows[0]["four_bits_cost_ci95_low"]) < float(rows[0]["four_bits_cost_ci95_high"])
    assert rows[1]["four_bits_cost"] == "", "the original was not measured"
    table = rendered(tmp_path, "demo", "other").partition('id="comparison-numbers"')[2]
    cells = Page(table.partition("</table>")[0])
    assert "cost of 4 bits" in "".join(cells.text)
    assert "+0.4877" in "".join(cells.text)


def test_text_that_a_spreadsheet_would_run_is_made_text(runs):
    rows = list(csv.DictReader(io.StringIO(comparison_csv(runs))))
    assert rows[1]["model.source"] == "'=1+1"


def test_differing_settings_are_marked(runs):
    different = {column.name for column in setting_columns(runs) if column.differs}
    assert different == {"data", "model.source", "lora.r", "train.learning_rate"}
