import base64
import hashlib
import html.parser
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.report_examples import HOSTILE, edit, write_run
from workflow.lib.report.html_page import TEMPLATES, render_page
from workflow.lib.report.run_results import Run, read_runs
from workflow.lib.settings.config import ReportConfig
from workflow.lib.system.number_formats import visible

VOID = {"meta", "link", "br", "img", "input", "hr"}
ADDRESSES = {"src", "href", "srcset", "action", "poster", "data", "formaction", "background"}


class Page(html.parser.HTMLParser):
    """A parsed page: its elements, its text, the values of its numbers, and what was left open."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.numbers: set[float] = set()
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "data":
            self.numbers.add(float(str(dict(attrs)["value"])))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] != ["style"]:
            self.text.append(data)

    def attributes(self, name: str) -> list[str]:
        return [str(attrs[name]) for _, attrs in self.elements if name in attrs]


def read(root: Path, *names: str) -> list[Run]:
    tokens = {name: root / "tokens" / f"{name}-data" for name in names}
    return read_runs(root / "runs", names=list(names), tokens=tokens)


def rendered(root: Path, *names: str, **report: Any) -> str:
    settings = {name: {"lora": {"r": 16}} for name in names}
    return render_page(read(root, *names), report=ReportConfig(**report), settings=settings)


def change_evaluations(folder: Path, change: Callable[[Any], None]) -> None:
    for subject in ("base", "tuned"):
        edit(folder / "evaluate_run" / f"{subject}.json", change)


def poison(value: Any, *, keep: frozenset[str]) -> Any:
    """Return `value` with every text but those in `keep` made hostile; keys stay."""
    if isinstance(value, dict):
        return {key: poison(item, keep=keep) for key, item in value.items()}
    if isinstance(value, list):
        return [poison(item, keep=keep) for item in value]
    return HOSTILE if isinstance(value, str) and value not in keep else value


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of one plain run and one whose every text is hostile."""
    root = tmp_path_factory.mktemp("report")
    write_run(root, "demo", num_steps=13)
    folder = write_run(root, "hostile", num_steps=11)
    keep = frozenset({"hostile", "base", "tuned", "fits", "cuda_allocated", "dd" * 32})
    for path in [*folder.rglob("*.json"), root / "tokens" / "hostile-data" / "manifest.json"]:
        edit(path, lambda d: d.update(poison(d, keep=keep)))
    edit(
        root / "tokens" / "hostile-data" / "manifest.json",
        lambda d: d.update(dropped_by_reason={HOSTILE: 3}),
    )
    return rendered(root, "demo", "hostile", title=f"Report {HOSTILE}")


UNLABELLED_BASE = re.compile(r"(?<!NF4 )(?<!disk: )\bbase\b(?! model)(?!-8b)", re.IGNORECASE)


def test_every_mention_of_the_base_says_that_it_is_the_quantized_one(tmp_path: Path) -> None:
    for name in ("demo", "other"):
        folder = write_run(tmp_path, name, num_steps=13)
        sources = {"qa": {"loss": 1.5, "loss_ci95": None, "perplexity": 4.5, "documents": 1}}
        sources["qa"]["trained_tokens"] = 47
        edits = {"sources": sources | {"other": sources["qa"]}}
        change_evaluations(folder, lambda d, edits=edits: d["heldout"].update(edits))
        change_evaluations(folder, lambda d: d["samples"][0].update(drawn="Drawn."))
    settings = {
        name: {"evaluate": {"require": {"heldout_loss": 2.0}}} for name in ("demo", "other")
    }
    runs = read(tmp_path, "demo", "other")
    page = Page(render_page(runs, report=ReportConfig(), settings=settings))
    text = " ".join(" ".join(page.text).split())
    assert text.count("NF4 base") > 10
    assert [text[m.start() - 40 : m.end() + 40] for m in UNLABELLED_BASE.finditer(text)] == []
    assert "The base model before its quantization was not measured" in text


def test_numbers_shown_are_those_of_the_files(tmp_path: Path) -> None:
    write_run(tmp_path, "demo", num_steps=13)
    (run,) = read(tmp_path, "demo")
    numbers = Page(rendered(tmp_path, "demo")).numbers
    base, tuned, comparison = run.base.heldout, run.tuned.heldout, run.tuned.comparison
    assert base is not None
    assert tuned is not None
    assert comparison.loss_difference_ci95 is not None
    shown = {
        *(base.loss, *base.loss_ci95, base.perplexity),
        *(tuned.loss, *tuned.loss_ci95, tuned.perplexity),
        *(comparison.loss_difference, *comparison.loss_difference_ci95, comparison.p_value),
        *(score.tuned.value for score in run.scores),
        *(run.summary.elapsed_s, run.summary.peak_bytes.measured, run.summary.peak_bytes.predicted),
        *(term.bytes for term in run.preflight.terms),
        *(run.manifest.splits.train.rows_dropped, run.manifest.splits.train.fill),
        *(run.steps[0].loss, run.steps[-1].grad_norm),
    }
    assert shown <= numbers


def test_every_element_is_closed_in_order(two_runs: str) -> None:
    assert Page(two_runs).open == []


def test_hostile_text_adds_no_element(two_runs: str, tmp_path: Path) -> None:
    names = {tag for tag, _ in Page(two_runs).elements}
    write_run(tmp_path, "demo", num_steps=13)
    write_run(tmp_path, "other", num_steps=13)
    assert names == {tag for tag, _ in Page(rendered(tmp_path, "demo", "other")).elements}
    assert sum(tag == "script" for tag, _ in Page(two_runs).elements) == 3


def test_hostile_text_is_shown_as_text(two_runs: str) -> None:
    text = "".join(Page(two_runs).text)
    # title, heading, model, two answers, prompt, reference, check, reason, term, and more
    assert text.count(visible(HOSTILE)) > 20


def test_no_acting_character_reaches_the_page(two_runs: str) -> None:
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", "".join(Page(two_runs).text))


def test_page_names_no_network_address(two_runs: str) -> None:
    addresses = [
        address for name in sorted(ADDRESSES) for address in Page(two_runs).attributes(name)
    ]
    assert addresses
    assert all(address.startswith(("#", "data:")) for address in addresses)
    style = (TEMPLATES / "style.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


def test_policy_allows_the_two_scripts_and_no_request(two_runs: str) -> None:
    page = Page(two_runs)
    (policy,) = [value for value in page.attributes("content") if "default-src" in value]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    digests = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in page.scripts[1:]  # the first one is data
    ]
    assert set(digests) == allowed


def test_figure_data_is_json_that_cannot_close_its_element(two_runs: str) -> None:
    island = Page(two_runs).scripts[0]
    assert set(json.loads(island)) == {
        *("heldout", "parallel", "loss", "grad_norm", "learning_rate", "tokens_per_s"),
        *("peak_bytes", "memory", "lengths-1", "lengths-2"),
    }
    assert "<" not in island


def test_plotly_is_there_once(two_runs: str) -> None:
    assert len(re.findall(r"\* plotly\.js v\d", two_runs)) == 1


def test_every_reference_inside_the_page_has_its_target(two_runs: str) -> None:
    page = Page(two_runs)
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    wanted = {address[1:] for address in page.attributes("href") if address.startswith("#")}
    assert wanted | set(page.attributes("aria-labelledby")) <= set(ids)


def test_tables_have_captions_and_headers_have_scopes(two_runs: str) -> None:
    elements = Page(two_runs).elements
    assert sum(tag == "table" for tag, _ in elements) == sum(
        tag == "caption" for tag, _ in elements
    )
    assert all("scope" in attrs for tag, attrs in elements if tag == "th")


def test_run_without_tasks_and_samples_renders(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "demo", num_steps=3)
    change_evaluations(folder, lambda d: d.update(tasks={}, samples=[]))
    edit(folder / "evaluate_run" / "tuned.json", lambda d: d["comparison"].update(tasks={}))
    text = "".join(Page(rendered(tmp_path, "demo")).text)
    assert "No task was evaluated" in text
    assert "No sample was generated" in text


def test_run_without_heldout_loss_renders(tmp_path: Path) -> None:
    for name in ("demo", "other"):
        folder = write_run(tmp_path, name, num_steps=3)
        change_evaluations(folder, lambda d: d.update(heldout=None))
        edit(
            folder / "evaluate_run" / "tuned.json",
            lambda d: d["comparison"].update(
                loss_difference=None, loss_difference_ci95=None, p_value=None, documents=0
            ),
        )
    assert "Held-out loss was not measured" in rendered(tmp_path, "demo", "other")


def test_gpu_of_unknown_speed_has_no_predicted_time(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "demo", num_steps=3)
    edit(
        folder / "preflight_run" / "preflight.json",
        lambda d: d.update(time={"total_h": None, "basis": "unknown: no speed is recorded"}),
    )
    assert "no prediction" in rendered(tmp_path, "demo")


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([0.1, 0.3], "Held-out loss is lower than the NF4 base&#39;s"),
        ([-0.1, 0.3], "Held-out loss is not clearly different from the NF4 base&#39;s"),
        ([-0.3, -0.1], "Held-out loss is higher than the NF4 base&#39;s"),
    ],
)
def test_verdict_follows_the_interval_of_the_difference(
    tmp_path: Path, ends: list[float], words: str
) -> None:
    folder = write_run(tmp_path, "demo", num_steps=3)
    edit(
        folder / "evaluate_run" / "tuned.json",
        lambda d: d["comparison"].update(loss_difference_ci95=ends),
    )
    assert f"<h3>{words}</h3>" in rendered(tmp_path, "demo")


def test_trained_text_alone_is_marked(tmp_path: Path) -> None:
    write_run(tmp_path, "demo", num_steps=3)
    page = rendered(tmp_path, "demo")
    assert "&lt;assistant&gt;\n<mark>Return the first item of x.</mark></pre>" in page


def test_max_samples_limits_the_samples_and_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, "demo", num_steps=3)
    page = rendered(tmp_path, "demo", max_samples=1)
    assert page.count('<details class="sample"') == 1
    assert "1 of 3 samples shown" in page


def test_failed_check_is_counted_in_the_verdict(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "demo", num_steps=3)
    edit(folder / "consolidate" / "parity.json", lambda d: d.update(passed=False))
    assert "1 of 5 failed" in rendered(tmp_path, "demo")


def test_different_heldout_documents_forbid_a_comparison(tmp_path: Path) -> None:
    for name in ("demo", "other"):
        write_run(tmp_path, name, num_steps=3)
    edit(
        tmp_path / "tokens" / "other-data" / "manifest.json",
        lambda d: d["files"].update({"heldout.input_ids.npy": "ee" * 32}),
    )
    assert "their losses cannot be compared" in rendered(tmp_path, "demo", "other")


def test_command_that_makes_the_page_again_is_shown_with_its_settings(two_runs: str) -> None:
    assert "--replace-workflow-config --configfile settings.json</code>" in two_runs
    text = "".join(Page(two_runs).text)
    document = json.loads(text[text.index('{\n  "report"') : text.index("}\n}\n") + 3])
    assert document["runs"] == {name: {"lora": {"r": 16}} for name in ("demo", "hostile")}


def test_page_names_the_one_commit_that_made_everything(two_runs: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path, "demo", num_steps=3)
    at = "At commit <code>0123456789abcdef0123456789abcdef01234567</code>"
    assert at in rendered(tmp_path, "demo")
    edit(folder / "finetune" / "summary.json", lambda d: d["provenance"].update(commit="fedcba98"))
    assert "At the same state of the workflow" in rendered(tmp_path, "demo")


def better(root: Path, name: str, loss: float) -> Path:
    """Write a run with this held-out loss."""
    folder = write_run(root, name, num_steps=3, rate=loss / 1000)
    edit(folder / "evaluate_run" / "tuned.json", lambda d: d["heldout"].update(loss=loss))
    return folder


def test_best_run_of_a_sweep_comes_first(tmp_path: Path) -> None:
    for name, loss in (("one", 1.7), ("two", 1.2), ("three", 1.5)):
        better(tmp_path, name, loss)
    page = rendered(tmp_path, "one", "two", "three")
    first, rest = page.split("</article>", 1)
    assert 'Best of 3 runs: <span class="run">two</span>' in first.replace("\n", " ")
    assert "The other 2 runs in the same detail" in rest


def test_run_that_got_worse_or_failed_is_named_before_the_best(tmp_path: Path) -> None:
    for name, loss in (("one", 1.2), ("two", 1.7)):
        better(tmp_path, name, loss)
    edit(
        tmp_path / "runs" / "two" / "evaluate_run" / "tuned.json",
        lambda d: d["comparison"].update(loss_difference_ci95=[-0.3, -0.1]),
    )
    warned = rendered(tmp_path, "one", "two").split("<article")[0].rpartition("Look at")[2]
    assert "two" in warned
    assert "held-out loss is higher than the NF4 base" in warned


def test_cost_is_in_gpu_hours(tmp_path: Path) -> None:
    write_run(tmp_path, "demo", num_steps=3)
    # 4021.7 s on two GPUs
    assert 2 * 4021.7 / 3600 in Page(rendered(tmp_path, "demo")).numbers
    assert "GPU hours" in rendered(tmp_path, "demo")


def test_plans_that_preflight_tried_say_why_they_were_not_taken(tmp_path: Path) -> None:
    write_run(tmp_path, "demo", num_steps=3)
    rows = [row.split("</tr>")[0] for row in rendered(tmp_path, "demo").split("<tr>")]
    (tried,) = [row for row in rows if "3.10 GiB too much" in row]
    assert '<data value="7">7</data>' in tried
    assert '<td class="text">none</td>' in tried
    assert '<data value="0.7">70.0 %</data>' in tried


def test_facts_of_the_data_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path, "demo", num_steps=3)
    page = Page(rendered(tmp_path, "demo"))
    # of the manifest: near duplicates, overlaps with the held-out rows, a bin's documents, the
    # longest row
    assert {13, 3, 2, 802, 313} <= page.numbers
    assert "Held-out rows that equal a training row: 3; that resemble one: 2." in "".join(page.text)


def test_heldout_loss_of_every_source_is_shown(tmp_path: Path) -> None:
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


def test_p_value_of_a_task_is_shown_with_its_test(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "demo", num_steps=3)
    found = {"p_value": 0.0123, "test": "exact McNemar", "gained": 131, "lost": 11}
    edit(
        folder / "evaluate_run" / "tuned.json",
        lambda d: d["comparison"]["tasks"]["pydocs_mc"]["acc"].update(found),
    )
    page = Page(rendered(tmp_path, "demo"))
    assert {0.0123, 131, 11} <= page.numbers
    assert "exact McNemar" in "".join(page.text)


def test_merged_model_is_beside_the_adapter_where_one_is_exported(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "demo", num_steps=3)
    document = json.loads((folder / "evaluate_run" / "tuned.json").read_text())
    document |= {
        "subject": "merged",
        "merging": document["comparison"] | {"loss_difference": -0.0625},
    }
    document["heldout"]["loss"] = 1.5625
    (folder / "evaluate_run" / "merged.json").write_text(json.dumps(document))
    tokens = {"demo": tmp_path / "tokens" / "demo-data"}
    runs = read_runs(tmp_path / "runs", names=["demo"], tokens=tokens, merged=["demo"])
    page = render_page(runs, report=ReportConfig(), settings={"demo": {}})
    assert {1.5625, -0.0625} <= Page(page).numbers
    assert "Merged model" not in rendered(tmp_path, "demo")


@pytest.mark.parametrize(
    ("ends", "upwards", "words"),
    [
        ([0.01, 0.2], True, "1 better, 1 not judged"),
        ([0.01, 0.2], False, "1 worse, 1 not judged"),
        ([-0.2, 0.1], True, "1 without a clear change, 1 not judged"),
    ],
)
def test_verdict_says_what_became_of_the_tasks(
    tmp_path: Path, ends: list[float], upwards: bool, words: str
) -> None:
    folder = write_run(tmp_path, "demo", num_steps=3)

    def change(document: Any) -> None:
        document["comparison"]["tasks"]["pydocs_mc"]["acc"]["difference_ci95"] = ends
        document["tasks"]["pydocs_mc"]["metrics"]["acc"]["higher_is_better"] = upwards

    edit(folder / "evaluate_run" / "tuned.json", change)
    text = " ".join("".join(Page(rendered(tmp_path, "demo")).text).split())
    assert f"2 scores: {words}, against the NF4 base by the 95% interval" in text


def with_gate(root: Path, require: dict[str, float], *, by: str = "estimate") -> str:
    """Return the text of the page of a run that gained 1.4753 [1.3711, 1.5802] of held-out loss,
    with this gate.
    """
    write_run(root, "demo", num_steps=3)
    evaluate = {"require": require, "require_by": by, "sample_temperature": 0.7}
    page = render_page(
        read(root, "demo"), report=ReportConfig(), settings={"demo": {"evaluate": evaluate}}
    )
    return " ".join("".join(Page(page).text).split())


@pytest.mark.parametrize(
    ("least", "by", "found"),
    [(1.4, "estimate", "reached"), (1.4, "interval", "missed"), (1.5, "estimate", "missed")],
)
def test_gate_is_in_the_verdict_as_its_stage_will_judge(
    tmp_path: Path, least: float, by: str, found: str
) -> None:
    text = with_gate(tmp_path, {"heldout_loss": least}, by=by)
    asked = (
        f"{found} heldout_loss gained +1.4753 [+1.3711, +1.5802] over the NF4 base; at least "
        f"+{least:.4f} was asked"
    )
    assert asked in text
    assert ("The required gain is missed: the workflow ends" in text) is (found == "missed")


def test_gate_that_cannot_be_judged_says_why(tmp_path: Path) -> None:
    text = with_gate(tmp_path, {"pydocs_mc/f1": 0.1})
    assert "The required gain cannot be judged" in text
    assert "pydocs_mc/f1': it is not measured. Known: pydocs_mc/acc" in text


def test_run_without_gate_shows_none(two_runs: str) -> None:
    assert "<dt>Required</dt>" not in two_runs


def test_drawn_answers_stand_below_the_greedy_ones(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "demo", num_steps=3)
    assert "drawn" not in "".join(Page(rendered(tmp_path, "demo")).text)
    for subject in ("base", "tuned"):
        path = folder / "evaluate_run" / f"{subject}.json"
        edit(path, lambda d: [s.update(drawn=f"luck of {d['subject']}") for s in d["samples"]])
    settings = {"demo": {"evaluate": {"sample_temperature": 0.7}}}
    page = render_page(read(tmp_path, "demo"), report=ReportConfig(), settings=settings)
    text = "".join(Page(page).text)
    for subject in ("base", "tuned"):
        label = {"base": "NF4 base", "tuned": "Tuned"}[subject]
        assert text.count(f"{label}, drawn at 0.7\nluck of {subject}\n") == 3
