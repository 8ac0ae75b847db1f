"""The pages are true: commands are run, links lead to files and headings, tables are today's."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.page_commands import MARK, ROOT, RUN, blocks, pages, text_of, tracked
from workflow.importing.guide import table
from workflow.lib.settings.config import load_config
from workflow.scripts import write_settings_pages

DOCS = "workflow/docs"
MOST_WORDS = {"README.md": 700, "all": 32_000}
RUN_SHARE = 0.9
# Where commands are told to users.
TOLD = ("README.md", "workflow/*.md", "workflow/*.py", "workflow/*.smk", "workflow/report")


def page(name):
    return text_of(f"{DOCS}/{name}.md")


@pytest.mark.parametrize("name", pages())
def test_each_block_of_commands_is_run_or_says_why_not(name):
    marked = [block for block in blocks(name) if block.not_run or block.run_by]
    assert len(re.findall(r"<!-- (?:not run: |run by )", text_of(name))) == len(marked)
    missing = [path for block in marked for path in block.run_by if not (ROOT / path).is_file()]
    assert missing == []
    assert [block for block in marked if block.language not in RUN] == []
    assert [block.text for block in blocks(name) if not block.language] == []


def test_most_commands_of_the_pages_are_run_by_a_test():
    of_pages = [b for name in pages() for b in blocks(name) if b.language in RUN]
    count = {True: 0, False: 0}
    for block in of_pages:
        count[block.not_run is None] += len(block.commands())
    assert count[True] / sum(count.values()) >= RUN_SHARE, count


def test_pages_are_short():
    words = {name: len(text_of(name).split()) for name in [*pages(), "CHANGELOG.md"]}
    counted = {"README.md": words["README.md"], "all": sum(words.values())}
    assert {n: count for n, count in counted.items() if count > MOST_WORDS[n]} == {}


def test_marks_stand_right_before_a_block():
    assert MARK.search("<!-- not run: needs a GPU -->\n")
    assert not MARK.search("<!-- not run: needs a GPU -->\n\n")


@pytest.mark.parametrize("name", pages())
def test_settings_of_a_page_load(name):
    for block in blocks(name):
        if block.language == "yaml":
            load_config(yaml.safe_load(block.text))


def test_guide_of_new_config_stands_on_the_page():
    assert f"\n{table()}\n" in page("choose-settings")


def test_every_page_of_the_documents_stands_in_the_readme_or_in_a_page_that_does():
    written = {path.name for path in (ROOT / DOCS).glob("*.md")}
    linked = set(re.findall(rf"\]\({DOCS}/([\w.-]+\.md)", text_of("README.md")))
    linked |= {
        link for name in linked for link in re.findall(r"\]\(([\w.-]+\.md)", page(name[:-3]))
    }
    assert sorted(written - linked) == []


def test_links_of_every_document_lead_to_files_and_headings():
    wrong = []
    for name in (name for name in tracked(".") if name.endswith(".md")):
        plain = re.sub(r"```.*?```|`[^`\n]*`", "", text_of(name), flags=re.S)
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", plain):
            if "://" in target:
                continue
            path = (ROOT / name).parent / target if target else ROOT / name
            if not path.exists() or (anchor and anchor not in anchors(path)):
                wrong.append((name, target, anchor))
    assert wrong == []


def anchors(path):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def test_every_command_gives_the_number_of_cores_without_which_snakemake_stops():
    rules = "".join(text_of(name) for name in tracked("Snakefile", "*.smk"))
    targets = "|".join(re.findall(r"^rule (\w+):", rules, re.MULTILINE))
    command = re.compile(rf"snakemake (?:{targets})\b")
    told = {name: text_of(name) for name in tracked(*TOLD) if Path(name).suffix != ".png"}
    assert {n: command.findall(text) for n, text in told.items() if command.search(text)} == {}


def test_every_package_of_the_library_is_described_in_the_order_of_imports():
    listing = page("architecture").split("\n| package | holds |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)[.`]", listing, re.MULTILINE)
    listed = list(dict.fromkeys(rows))  # of some packages, their parts stand in rows of their own
    document = tomllib.loads(text_of("pyproject.toml"))
    contracts = document["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if "workflow.scripts" in c.get("layers", ()))
    highest_first = [set(re.findall(r"workflow\.lib\.(\w+)", layer)) for layer in layers[1:]]
    levels = {name: -level for level, names in enumerate(highest_first) for name in names}
    assert set(listed) == set(levels)
    assert [levels[name] for name in listed] == sorted(levels.values())


def test_scripts_that_the_pages_name_exist():
    named = {n for name in pages() for n in re.findall(r"workflow\.scripts\.(\w+)", text_of(name))}
    scripts = Path(write_settings_pages.__file__).parent
    assert {name for name in named if not (scripts / f"{name}.py").is_file()} <= {"NAME"}
