"""What a page shows of its runs: numbers, samples, data, plans and cost, and what it leaves out."""

import pytest

from tests.evaluation.test_results import facts as calibration_facts
from tests.support.report_examples import (
    SERVED_CHECK,
    add_gguf,
    add_original,
    add_subject,
    edit,
    write_run,
)
from tests.support.report_pages import Page, change_evaluations, read, rendered
from workflow.lib.evaluation.results import summarize
from workflow.lib.report.html_page import render_page
from workflow.lib.settings.config import ReportConfig
from workflow.lib.system.files import write_checked_json


def test_numbers_shown_are_those_of_the_files(tmp_path):
    write_run(tmp_path, "demo", num_steps=13)
    (run,) = read(tmp_path, "demo")
    numbers = Page(rendered(tmp_path, "demo")).numbers
    base, tuned = run.measured.reference.heldout, run.measured.served.heldout
    comparison = run.measured.comparison
    assert base is not None
    assert tuned is not None
    assert comparison.loss_difference_ci95 is not None
    shown = {
        *(base.loss, *base.loss_ci95, base.perplexity),
        *(tuned.loss, *tuned.loss_ci95, tuned.perplexity),
        *(comparison.loss_difference, *comparison.loss_difference_ci95, comparison.p_value),
        *(score.after.value for score in run.measured.scores),
        *(run.summary.elapsed_s, run.summary.peak_bytes.measured, run.summary.peak_bytes.predicted),
        *(term.bytes for term in run.preflight.terms),
        *(run.manifest.splits.train.rows_dropped, run.manifest.splits.train.fill),
        *(run.steps[0].loss, run.steps[-1].grad_norm),
    }
    assert shown <= numbers


def test_loss_of_the_served_model_stands_first(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=3)
    write_checked_json(folder / "check_served" / "served.json", SERVED_CHECK.as_json())
    runs = read(tmp_path, "demo", served=True)
    page = render_page(runs, report=ReportConfig(), settings={"demo": {"lora": {"r": 16}}})
    text = "".join(Page(page).text)
    assert text.index("loss as vLLM 9.9 serves it1.5200") < text.index("tuned, served")
    assert "cost of serving against what was trained+0.0200" in text


def test_predicted_step_stands_beside_the_measured_one_and_the_parts_of_the_time(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=3)
    parts = {"steps": 31.7, "held-out losses": 4.25}
    times = {"predicted_step_s": 0.123, "measured_step_s": 0.246, "parts_s": parts}
    edit(folder / "finetune" / "summary.json", lambda d: d.update(times=times))
    edit(
        folder / "preflight_run" / "preflight.json",
        lambda d: d["time"].update(step_range_s=[0.117, 0.289]),
    )
    page = Page(rendered(tmp_path, "demo"))
    assert {0.123, 0.117, 0.289, 0.246, 31.7, 4.25, 2.0} <= page.numbers


TUNED, BASE = "evaluate_run/tuned.json", "evaluate_run/base.json"
P_VALUE = {"p_value": 0.0123, "test": "exact McNemar", "gained": 131, "lost": 11}


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (BASE, lambda d: d.update(quantized_by="absmax (73 minutes)"), "Quantizedabsmax (73 min"),
        ("preflight_run/preflight.json", lambda d: d["time"].update(total_h=None), "no prediction"),
        ("consolidate/parity.json", lambda d: d.update(passed=False), "1 of 5 failed"),
        (
            "finetune/summary.json",
            lambda d: d.update(graphs_off="operation not permitted"),
            "CUDA graphs were off (operation not permitted)",
        ),
        (
            TUNED,
            lambda d: d["comparisons"]["base"]["tasks"]["pydocs_mc"]["acc"].update(P_VALUE),
            "p = 0.012exact McNemar131, 11",
        ),
    ],
)
def test_page_says_what_a_file_says(tmp_path, file, change, words):
    folder = write_run(tmp_path, "demo", num_steps=3)
    assert words not in "".join(Page(rendered(tmp_path, "demo")).text)
    edit(folder / file, change)
    assert words in "".join(Page(rendered(tmp_path, "demo")).text)


def test_what_was_not_measured_is_said(tmp_path):
    nothing = {"loss_difference": None, "loss_difference_ci95": None, "p_value": None}
    for name in ("demo", "other"):
        folder = write_run(tmp_path, name, num_steps=3)
        change_evaluations(folder, lambda d: d.update(heldout=None, tasks={}, samples=[]))
        edit(
            folder / TUNED,
            lambda d: d["comparisons"]["base"].update(tasks={}, documents=0, **nothing),
        )
    text = "".join(Page(rendered(tmp_path, "demo", "other")).text)
    for said in ("Held-out loss was not measured", "No task was eval", "No sample was generated"):
        assert said in text, said


def test_what_the_manifest_tells_of_the_data_is_shown(tmp_path):
    write_run(tmp_path, "demo", num_steps=3)
    page = Page(rendered(tmp_path, "demo"))
    text = "".join(page.text)
    # overlaps with the held-out rows, the longest row, and the GPU hours: 4021.7 s on two
    assert {3, 2, 313, 2 * 4021.7 / 3600} <= page.numbers
    assert "prompt_completionprompt, completionlang (2,001), id (message) (40,123)" in text
    assert "that spell special tokens: 17." in text
    assert "Held-out rows that equal a training row: 3; that nearly repeat one: 2." in text


def test_different_heldout_documents_forbid_a_comparison(tmp_path):
    for name in ("demo", "other"):
        write_run(tmp_path, name, num_steps=3)
    edit(
        tmp_path / "tokens" / "other-data" / "manifest.json",
        lambda d: d["files"].update({"heldout.input_ids.npy": "ee" * 32}),
    )
    assert "their losses cannot be compared" in rendered(tmp_path, "demo", "other")


def test_cost_of_4_bits_is_shown_where_the_base_was_calibrated(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=3)
    plain = "".join(Page(rendered(tmp_path, "demo")).text)
    assert "The model before its quantization was not measured." in plain
    bits = summarize(calibration_facts())
    edit(
        folder / "evaluate_run" / "base.json",
        lambda d: d.update(four_bits=bits.model_dump(mode="json")),
    )
    text = "".join(Page(rendered(tmp_path, "demo")).text)
    assert "Cost of 4 bits+0.1000" in text
    assert "original), as its calibration measured" in text
    assert "What 4 bits cost" in text
    for shown in ("+0.1000", "+0.2000", "+0.3000"):
        assert shown in text, shown


def test_trained_text_alone_is_marked(tmp_path):
    write_run(tmp_path, "demo", num_steps=3)
    page = rendered(tmp_path, "demo")
    assert "&lt;assistant&gt;\n<mark>Return the first item of x.</mark></pre>" in page


def test_max_samples_limits_the_samples_and_says_so(tmp_path):
    write_run(tmp_path, "demo", num_steps=3)
    page = rendered(tmp_path, "demo", max_samples=1)
    assert page.count('<details class="sample"') == 1
    assert "1 of 3 samples shown" in page


def test_plans_that_preflight_tried_say_why_they_were_not_taken(tmp_path):
    write_run(tmp_path, "demo", num_steps=3)
    page = rendered(tmp_path, "demo")
    assert "<dt>targets</dt><dd>q_proj v_proj</dd>" in page
    assert "document lengths" not in page  # records of a forecast, not for people
    rows = [row.split("</tr>")[0] for row in page.split("<tr>")]
    (tried,) = [row for row in rows if "3.10 GiB too much" in row]
    assert '<data value="7">7</data> over 2 processes' in tried
    assert '<td class="text">no layers</td>' in tried
    assert '<data value="0.7">70.0 %</data>' in tried


def test_heldout_loss_of_every_source_is_shown(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=3)
    part = {"loss_ci95": None, "perplexity": 3.5, "documents": 7, "trained_tokens": 71}
    change_evaluations(
        folder,
        lambda d: d["heldout"].update(
            sources={"a": part | {"loss": 1.25}, "b": part | {"loss": 2.75}}
        ),
    )
    page = Page(rendered(tmp_path, "demo"))
    assert {1.25, 2.75} <= page.numbers
    assert "Held-out loss by source" in "".join(page.text)


def test_every_form_of_the_model_is_shown_beside_the_original(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=3)
    assert "Every form of the model" not in rendered(tmp_path, "demo")
    add_original(folder, loss=2.5)
    add_subject(folder, "merged", loss=1.5625)
    page = Page(rendered(tmp_path, "demo"))
    text = " ".join("".join(page.text).split())
    # the merged model's loss, and what 4 bits cost: 2.9876543211 - 2.5
    assert {1.5625, 2.5 - 1.5625, 2.9876543211 - 2.5} <= page.numbers
    assert "Cost of 4 bits+0.4877" in text
    assert "Merged: one model with the adapter in its weights, in 16 bits." in text


def with_gguf(root, *, exports):
    runs = read(root, "demo", exports=exports)
    return Page(render_page(runs, report=ReportConfig(), settings={"demo": {}}))


def test_numbers_of_every_gguf_file_are_shown(tmp_path):
    run = write_run(tmp_path, "demo", num_steps=3)
    add_gguf(run)
    edit(run / "convert_gguf" / "gguf.json", lambda d: d["files"][0].update(loss=1.53125))
    shown = with_gguf(tmp_path, exports=("gguf",))
    assert {1.53125, 0.03125, 1.5625, 0.0625, 96, 3 * 2**20, 4 * 2**20} <= shown.numbers
    assert "demo-adapter.gguf" in "".join(shown.text)


def test_gguf_files_of_a_run_that_exports_none_any_more_are_not_shown(tmp_path):
    add_gguf(write_run(tmp_path, "demo", num_steps=3))
    assert "demo-q4_k_m.gguf" not in "".join(with_gguf(tmp_path, exports=()).text)
