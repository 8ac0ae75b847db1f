"""The page itself: its elements, hostile text shown as text, no request to any network."""

import base64
import hashlib
import json
import re

import pytest

from tests.support.report_examples import HOSTILE, edit, write_run
from tests.support.report_pages import Page, rendered
from workflow.lib.report.html_page import TEMPLATES
from workflow.lib.system.number_formats import visible

ADDRESSES = {"src", "href", "srcset", "action", "poster", "data", "formaction", "background"}


def poison(value, *, keep):
    """Return `value` with every text but those in `keep` made hostile; keys stay."""
    if isinstance(value, dict):
        return {key: poison(item, keep=keep) for key, item in value.items()}
    if isinstance(value, list):
        return [poison(item, keep=keep) for item in value]
    return HOSTILE if isinstance(value, str) and value not in keep else value


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """The page of one plain run and one whose every text is hostile."""
    root = tmp_path_factory.mktemp("report")
    write_run(root, "demo", num_steps=13)
    folder = write_run(root, "hostile", num_steps=11)
    keep = frozenset(
        {"hostile", "base", "tuned", "fits", "replay", "cuda_allocated", "sft", "dd" * 32}
    )
    written = [path for path in folder.rglob("*.json") if path.name != "adapter_config.json"]
    for path in [*written, root / "tokens" / "hostile-data" / "manifest.json"]:
        edit(path, lambda d: d.update(poison(d, keep=keep)))
    edit(
        root / "tokens" / "hostile-data" / "manifest.json",
        lambda d: d.update(dropped_by_reason={HOSTILE: 3}),
    )
    return rendered(root, "demo", "hostile", title=f"Report {HOSTILE}")


def test_every_element_is_closed_in_order(two_runs):
    assert Page(two_runs).open == []


def test_hostile_text_adds_no_element(two_runs, tmp_path):
    names = {tag for tag, _ in Page(two_runs).elements}
    write_run(tmp_path, "demo", num_steps=13)
    write_run(tmp_path, "other", num_steps=13)
    assert names == {tag for tag, _ in Page(rendered(tmp_path, "demo", "other")).elements}
    assert sum(tag == "script" for tag, _ in Page(two_runs).elements) == 3


def test_hostile_text_is_shown_as_text(two_runs):
    text = "".join(Page(two_runs).text)
    # title, heading, model, two answers, prompt, reference, check, reason, term, and more
    assert text.count(visible(HOSTILE)) > 20


def test_no_acting_character_reaches_the_page(two_runs):
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", "".join(Page(two_runs).text))


def test_page_names_no_network_address(two_runs):
    addresses = [
        address for name in sorted(ADDRESSES) for address in Page(two_runs).attributes(name)
    ]
    assert addresses
    assert all(address.startswith(("#", "data:")) for address in addresses)
    style = (TEMPLATES / "style.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


def test_policy_allows_the_two_scripts_and_no_request(two_runs):
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


def test_figure_data_is_json_that_cannot_close_its_element(two_runs):
    island = Page(two_runs).scripts[0]
    assert set(json.loads(island)) == {
        *("heldout", "loss", "grad_norm", "learning_rate", "tokens_per_s"),
        *("peak_bytes", "memory"),
    }
    assert "<" not in island


def test_every_reference_inside_the_page_has_its_target(two_runs):
    page = Page(two_runs)
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    wanted = {address[1:] for address in page.attributes("href") if address.startswith("#")}
    assert wanted | set(page.attributes("aria-labelledby")) <= set(ids)


def test_command_that_makes_the_page_again_is_shown_with_its_settings(two_runs):
    assert "--configfile settings.json</code>" in two_runs
    text = "".join(Page(two_runs).text)
    document = json.loads(text[text.index('{\n  "report"') : text.index("}\n}\n") + 3])
    assert document["runs"] == {name: {"lora": {"r": 16}} for name in ("demo", "hostile")}


def test_page_names_the_one_commit_that_made_everything(two_runs, tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=3)
    at = "At commit <code>0123456789abcdef0123456789abcdef01234567</code>"
    assert at in rendered(tmp_path, "demo")
    edit(folder / "finetune" / "summary.json", lambda d: d["provenance"].update(commit="fedcba98"))
    assert "At the same state of the workflow" in rendered(tmp_path, "demo")
