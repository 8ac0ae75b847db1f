"""What `preview` shows of a tokens folder."""

import io

import pytest
from rich.console import Console

from tests.support.tiny import tiny_tokenizer
from tests.support.tokenizing import NUM_TRAIN, Stage, save_rows
from workflow.lib.data.tokens.manifest_log import show_samples
from workflow.lib.data.tokens.token_store import MANIFEST
from workflow.lib.system.files import read_checked_json


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preview")
    tiny_tokenizer(folder / "tokenizer")
    stage = Stage(folder, folder / "tokenizer")
    more = save_rows(folder / "more.jsonl", [{"prompt": "a\x1b[31m\nb", "completion": "c"}])
    named = [{"path": str(stage.train), "name": "first"}, {"path": str(more), "name": "more"}]
    stage.run(train=named, seq_len=256)
    return stage.output / MANIFEST


def shown(manifest, *, terminal):
    file = io.StringIO()
    colours = "standard" if terminal else None
    console = Console(file=file, force_terminal=terminal, color_system=colours, width=60)
    show_samples(read_checked_json(manifest), console)
    return file.getvalue()


def test_three_documents_of_each_source_are_shown_with_their_rows(manifest):
    titles = [line for line in shown(manifest, terminal=False).splitlines() if ": row " in line]
    assert [title.split(" of ")[0] for title in titles] == [
        "first: row 1",
        f"first: row {NUM_TRAIN // 2 + 1}",
        f"first: row {NUM_TRAIN}",
        "more: row 1",
    ]


def test_trained_text_is_coloured_on_a_terminal_and_bracketed_elsewhere(manifest):
    assert "\x1b[1;32mThe answer is 0." in shown(manifest, terminal=True)
    plain = shown(manifest, terminal=False)
    assert "\u27e6The answer is 0." in plain
    assert "\x1b" not in plain


def test_control_characters_of_the_data_are_spelled_out(manifest):
    text = shown(manifest, terminal=True)
    assert "a\\x1b[31m\nb" in text


def test_answers_of_a_pair_are_shown_one_after_the_other(tmp_path):
    tiny_tokenizer(tmp_path / "tokenizer")
    stage = Stage(tmp_path, tmp_path / "tokenizer")
    stage.examples = "pairs"
    for path, first in ((stage.train, 0), (stage.heldout, 50)):
        numbers = range(first, first + 3)
        save_rows(path, [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in numbers])
    stage.run()
    text = shown(stage.output / MANIFEST, terminal=False)
    chosen, rejected = f"row 1 of {stage.train} (chosen)", f"row 1 of {stage.train} (rejected)"
    answers = [chosen, "\u27e6yes<|end|>\u27e7", rejected, "\u27e6no<|end|>\u27e7"]
    places = [text.index(part) for part in answers]
    assert places == sorted(places)
