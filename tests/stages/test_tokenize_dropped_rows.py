"""Rows that the stage `tokenize_dataset` drops or cuts: listed, counted, and stopping the run where
they are many."""

import unicodedata

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.encoding import PLAIN_TEMPLATE
from tests.support.tokenizing import (
    LONG,
    NUM_HELDOUT,
    NUM_TRAIN,
    SEQ_LEN,
    documents_of,
    expected_ids,
    rows,
    save_rows,
)
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.system.checksums import read_lines
from workflow.lib.system.errors import UserError


def test_bad_rows_are_listed_by_line_and_counted(stage):
    bad = ["{broken", "[1]", {"prompt": "q"}, {"prompt": "q", "completion": ""}]
    save_rows(stage.train, [*rows(2), *bad, *rows(100, start=2)])
    store = stage.run(max_rejected_share=0.04)
    listed = read_lines(stage.output / "rejects.jsonl")
    assert [line["row"] for line in listed] == [3, 4, 5, 6]
    assert {line["file"] for line in listed} == {str(stage.train)}
    assert listed[0]["preview"] == "{broken"
    assert store.manifest["dropped_by_reason"] == {
        "broken JSON": 1,
        "not an object": 1,
        "missing column": 1,
        "empty": 1,
    }
    train = store.manifest["splits"]["train"]
    assert (train["rows_read"], train["rows_kept"], train["rows_dropped"]) == (106, 102, 4)


def test_turns_marked_as_not_trained_are_dropped_where_every_token_is_trained(stage):
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    marked = [*talk, talk[0], {**talk[1], "train": False}]
    save_rows(stage.train, [{"messages": marked}, *({"messages": talk} for _ in range(20))])
    template = stage.folder / "template.jinja"
    template.write_text(PLAIN_TEMPLATE, encoding="utf-8")
    options = {"chat_template": str(template), "max_rejected_share": 0.5}
    for loss_on, dropped in (("completions", None), ("all", 1)):
        reasons = stage.run(loss_on=loss_on, **options).manifest["dropped_by_reason"]
        assert reasons.get("weights of turns") == dropped


def test_too_many_bad_rows_stop_with_counts_reasons_and_a_list_that_stays(stage):
    save_rows(stage.train, [*rows(20), "{broken"])
    with pytest.raises(UserError) as caught:
        stage.run()
    text = str(caught.value)
    assert "data.max_rejected_share = 0.01: 1 of 21 rows" in text
    assert "row 21: broken JSON: " in text
    assert str(stage.rejects) in text
    assert [line["row"] for line in read_lines(stage.rejects)] == [21]
    assert not stage.output.exists()


def test_file_that_is_not_utf8_is_told_how_to_convert_it(stage):
    text = "prompt;completion\nWie groß?;Größer\n"
    stage.train = stage.folder / "train.csv"
    stage.train.write_text(text, encoding="cp1252")
    with pytest.raises(UserError, match=r"invalid UTF-8(.|\n)*Save the file as UTF-8 \(iconv"):
        stage.run()


def test_the_list_beside_the_output_goes_once_the_run_succeeds(stage):
    save_rows(stage.train, ["{broken"])
    with pytest.raises(UserError):
        stage.run()
    save_rows(stage.train, rows(NUM_TRAIN))
    stage.run()
    assert not stage.rejects.exists()


def test_failure_leaves_a_finished_folder_alone_and_nothing_half_done(stage):
    stage.run()
    save_rows(stage.train, ["{broken"])
    with pytest.raises(UserError):
        stage.run()
    assert TokenStore.open(stage.output).num_rows
    assert not list(stage.folder.glob(".*"))


LONG_PROMPT = {"prompt": "long " * SEQ_LEN, "completion": "a"}


def test_overlong_row_is_cut_at_the_end_and_listed(stage):
    save_rows(stage.train, [*rows(NUM_TRAIN), LONG])
    store = stage.run()
    full = expected_ids(stage, LONG)
    assert tuple(full[:SEQ_LEN]) in documents_of(store)
    assert store.manifest["splits"]["train"]["truncated"] == 1
    assert store.manifest["splits"]["train"]["length_percentiles"]["max"] == len(full)
    (line,) = read_lines(stage.output / "truncated.jsonl")
    assert (line["row"], line["tokens"]) == (NUM_TRAIN + 1, len(full))


def test_overlong_row_that_is_dropped_counts_but_stops_nothing(stage):
    save_rows(stage.train, [*rows(NUM_TRAIN), LONG])
    store = stage.run(overlong="drop", max_rejected_share=0.0)
    assert store.manifest["dropped_by_reason"] == {"overlong": 1}
    assert store.manifest["splits"]["train"]["rows_dropped"] == 1


def test_overlong_text_that_is_split_becomes_several_documents(stage):
    text = "long " * SEQ_LEN
    save_rows(stage.train, [*({"text": f"Text {n}"} for n in range(NUM_TRAIN)), {"text": text}])
    save_rows(stage.heldout, [{"text": "Another one"}])
    store = stage.run(overlong="split")
    (line,) = read_lines(stage.output / "truncated.jsonl")
    assert line["documents"] > 2
    assert line["tokens"] - line["kept"] <= 1  # a last token alone trains nothing
    train = store.manifest["splits"]["train"]
    assert (train["rows_kept"], train["truncated"]) == (NUM_TRAIN + 1, 1)
    assert train["documents"] == NUM_TRAIN + line["documents"]


def test_source_has_its_own_treatment_of_long_rows(stage):
    other = save_rows(stage.folder / "other.jsonl", [LONG])
    save_rows(stage.train, [*rows(NUM_TRAIN), LONG])
    sources = [str(stage.train), {"path": str(other), "overlong": "drop"}]
    store = stage.run(train=sources)
    assert store.manifest["dropped_by_reason"] == {"overlong": 1}
    assert store.manifest["splits"]["train"]["truncated"] == 1


def test_answer_that_no_cut_makes_shorter_is_no_document_without_its_prompt(stage):
    save_rows(stage.train, [*rows(NUM_TRAIN), LONG])
    store = stage.run(overlong="split", max_rejected_share=0.1)
    assert store.manifest["dropped_by_reason"] == {"no cut between turns": 1}


def test_row_whose_cut_leaves_nothing_trained_is_dropped(stage):
    save_rows(stage.train, [*rows(NUM_TRAIN), LONG_PROMPT])
    with pytest.raises(UserError, match=r"max_rejected_share = 0.01(.|\n)*Set data.seq_len: 250,"):
        stage.run()
    store = stage.run(max_rejected_share=0.1)
    assert store.manifest["dropped_by_reason"] == {"no trained token within seq_len": 1}
    assert store.manifest["splits"]["train"]["truncated"] == 0


def test_rows_that_are_all_too_long_are_told_with_the_reason_and_the_setting(stage):
    save_rows(stage.train, [LONG_PROMPT, LONG_PROMPT])
    with pytest.raises(UserError) as refused:
        stage.run(max_rejected_share=1.0)
    assert "2 of them dropped (2: no trained token within seq_len; all: " in str(refused.value)
    assert str(refused.value).endswith("Give it more rows, or mend those, or raise data.seq_len.")


def test_blank_lines_are_counted_so_that_rows_add_up_to_lines(stage):
    save_rows(stage.train, ["", *rows(NUM_TRAIN), " ", ""])
    (train, heldout) = stage.run().manifest["sources"]
    assert (train["rows"], train["blank_lines"]) == (NUM_TRAIN, 3)
    assert heldout["blank_lines"] == 0


def test_what_is_read_of_a_source_and_what_is_not_is_listed(stage, caplog):
    spoken = [{**row, "lang": "en", "score": n or None} for n, row in enumerate(rows(NUM_TRAIN))]
    save_rows(stage.train, [*spoken, {"prompt": "q", "completion": "a", "weight": -0.5}])
    caplog.set_level("INFO")
    store = stage.run(max_rejected_share=0.5, leave_out=["score", "scroe"])
    (train, _) = store.manifest["sources"]
    assert train["format"] == "prompt_completion"
    assert train["columns"] == ["prompt", "completion", "weight"]
    assert train["not_read"] == {"lang": NUM_TRAIN, "score": NUM_TRAIN - 1}
    assert train["dropped_by_reason"] == {"unknown weight": 1}
    assert "data.leave_out names 'scroe', which holds a value in no row" in caplog.text
    assert f"not read: lang ({NUM_TRAIN:,}), score ({NUM_TRAIN - 1:,})" in caplog.text


@pytest.mark.parametrize("column", ["label", "weight"])
def test_rows_that_a_named_column_leaves_out_stop_nothing(stage, column):
    marked = [{**row, f"my_{column}": n % 2} for n, row in enumerate(rows(NUM_TRAIN))]
    save_rows(stage.train, marked)
    save_rows(stage.heldout, [{**row, f"my_{column}": 1} for row in rows(NUM_HELDOUT, start=1000)])
    store = stage.run(columns={column: f"my_{column}"})
    assert store.manifest["dropped_by_reason"] == {"not trained": NUM_TRAIN // 2 + 1}


def test_rows_that_a_guessed_column_leaves_out_stop_the_run(stage):
    save_rows(stage.train, [{**row, "weight": n % 2} for n, row in enumerate(rows(NUM_TRAIN))])
    with pytest.raises(
        UserError, match=r"27 of 53 rows (.|\n)*row 1: not trained: column 'weight'"
    ):
        stage.run()


def spelled(number):
    return {"prompt": f"What is {number}?", "completion": f"It is {number}.<|end|>"}


def test_many_rows_that_spell_special_tokens_stop_the_run_until_the_user_says_what_they_are(stage):
    save_rows(stage.train, [*rows(18), spelled(1), spelled(2)])
    refusal = r"special_tokens_in_text = null: 2 of 20 rows of \S+ spell .*Set it to tokens"
    with pytest.raises(UserError, match=refusal):
        stage.run()
    store = stage.run(special_tokens_in_text="text")
    assert store.manifest["sources"][0]["special_token_texts"] == 2


def test_texts_that_the_template_may_leave_out_are_counted_and_told(stage, caplog):
    reasoned = talk("a?", "A.")
    reasoned["messages"][1]["reasoning_content"] = "Hm."
    save_rows(stage.train, [*(talk(f"{n}?", f"N {n}.") for n in range(NUM_TRAIN)), reasoned])
    template = stage.folder / "plain.jinja"
    template.write_text(PLAIN_TEMPLATE)
    with caplog.at_level("INFO", logger="workflow"):
        store = stage.run(chat_template=str(template), allow_unrendered=["reasoning"])
    assert store.manifest["sources"][0]["unrendered"] == {"reasoning": 1}
    assert "1 rows: the chat template leaves out reasoning" in caplog.text


def test_answers_that_begin_with_their_prompt_are_counted_and_told(stage, caplog):
    repeating = {"prompt": "Name a river.", "completion": "Name a river. The Ebro."}
    save_rows(stage.train, [*rows(NUM_TRAIN), repeating, repeating])
    store = stage.run()
    assert [source["repeat_prompt"] for source in store.manifest["sources"]] == [2, 0]
    assert "2 rows repeat their prompt at the beginning of the answer" in caplog.text


def test_rows_with_characters_that_the_tokenizer_does_not_know_are_counted(stage, caplog):
    folder = stage.folder / "characters"
    core = Tokenizer(
        models.WordLevel({"<unk>": 0, "</s>": 1, "Who": 2, "me": 3}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    stage.tokenizer = folder
    save_rows(stage.train, [{"text": "Who me"}, {"text": "Who me \u4e94"}])
    save_rows(stage.heldout, [{"text": "me Who"}])
    with caplog.at_level("INFO", logger="workflow"):
        store = stage.run()
    assert store.manifest["sources"][0]["unknown_characters"] == 1
    assert "1 rows have characters that the tokenizer does not know" in caplog.text


@pytest.mark.parametrize("chat", [True, False])
def test_composed_and_decomposed_letters_are_one_text(stage, chat):
    template = stage.folder / "plain.jinja"
    template.write_text(PLAIN_TEMPLATE)
    texts = [unicodedata.normalize(form, "Où est l'été ?") for form in ("NFC", "NFD")]
    trained, heldout = (talk("Wo?", text) if chat else {"text": text} for text in texts)
    other = talk("Wann?", "Nie.") if chat else {"text": "Nie."}
    save_rows(stage.train, [other, trained])
    save_rows(stage.heldout, [heldout, talk("Wie?", "So.") if chat else {"text": "So."}])
    store = stage.run(chat_template=str(template))
    assert store.manifest["train_heldout_overlap"] == 1


DATES = {
    "{{ strftime_now('%d %b %Y') }}": "26 Jul 2024",
    "{{ strftime_now('%d.%m.') }}": "2024-07-26",
    "{{ date or 'July 26, 2024' }}": "July 26, 2024",
    "Cutting Knowledge Date: December 2023": None,
}


@pytest.mark.parametrize("written", DATES)
def test_date_that_the_template_writes_is_told(stage, caplog, written):
    template = stage.folder / "dated.jinja"
    template.write_text("<|system|>" + written + PLAIN_TEMPLATE)
    with caplog.at_level("INFO", logger="workflow"):
        store = stage.run(chat_template=str(template))
    assert store.manifest["template_date"] == DATES[written]
    assert ("writes the date" in caplog.text) == (DATES[written] is not None)


def forgetful_template(folder):
    """Write a template that leaves all answers but the last out of a conversation; return its
    path."""
    path = folder / "forgetful.jinja"
    path.write_text(
        "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content if m.role == "
        "'user' or loop.last else '') + eos_token }}{% endfor %}{% if add_generation_prompt %}{{ "
        "'<|assistant|>' }}{% endif %}"
    )
    return str(path)


def talk(*texts):
    turns = zip(["user", "assistant"] * len(texts), texts, strict=False)
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def test_rows_whose_turns_need_prompts_of_their_own_are_counted(stage, caplog):
    talks = [talk(f"a {n}?", f"A {n}.", "And b?", f"B {n}.") for n in range(NUM_TRAIN)]
    save_rows(stage.train, [*talks, talk("c?", "C.")])
    with caplog.at_level("INFO", logger="workflow"):
        store = stage.run(chat_template=forgetful_template(stage.folder), seq_len=64)
    assert [source["rows_by_turns"] for source in store.manifest["sources"]] == [NUM_TRAIN, 0]
    train = store.manifest["splits"]["train"]
    assert (train["rows_kept"], train["documents"]) == (NUM_TRAIN + 1, 2 * NUM_TRAIN + 1)
    assert f"{NUM_TRAIN} rows became several examples" in caplog.text


@pytest.mark.parametrize(("overlong", "documents"), [("truncate", 1), ("drop", 0)])
def test_example_of_a_turn_that_does_not_fit_is_cut_or_drops_its_row(stage, overlong, documents):
    long = talk("a?", "A.", "b " * SEQ_LEN, "B.")
    save_rows(stage.train, [*[talk(f"q {n}?", "A.") for n in range(NUM_TRAIN)], long])
    store = stage.run(chat_template=forgetful_template(stage.folder), overlong=overlong)
    train = store.manifest["splits"]["train"]
    assert train["documents"] == NUM_TRAIN + documents
    assert train["rows_dropped"] == 1 - documents
    cuts = read_lines(stage.output / "truncated.jsonl")
    assert [(cut["row"], cut["documents"]) for cut in cuts] == [(NUM_TRAIN + 1, 1)] * documents


def test_rows_of_several_files_keep_their_file_and_line(stage):
    stage.heldout = None
    folder = stage.folder / "parts"
    folder.mkdir()
    save_rows(folder / "b.jsonl", ["{broken", *rows(20, start=20)])
    save_rows(folder / "a.jsonl", [*rows(20), "{broken"])
    store = stage.run(train=str(folder / "*.jsonl"), max_rejected_share=0.1)
    listed = read_lines(stage.output / "rejects.jsonl")
    assert [(line["file"], line["row"]) for line in listed] == [
        (str(folder / "a.jsonl"), 21),
        (str(folder / "b.jsonl"), 1),
    ]
    assert [(s["file"], s["rows"]) for s in store.manifest["sources"]] == [
        (str(folder / "a.jsonl"), 21),
        (str(folder / "b.jsonl"), 21),
    ]
