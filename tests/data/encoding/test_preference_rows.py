"""Rows of preferences become two conversations with a common prompt, or a judged one, or a reason
says why not.
"""

import json

import pytest

from tests.support.encoding import PLAIN_TEMPLATE
from tests.support.rows import TOOL
from workflow.lib.data.encoding.keys_read import KeyAudit
from workflow.lib.data.encoding.preference_rows import begin_judged, prompt_of, to_judged
from workflow.lib.data.encoding.row_columns import choose_format
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.settings.data import DataColumns


def message(role, content, **more):
    return {"role": role, "content": content, **more}


USER, GOOD, BAD = message("user", "q"), message("assistant", "good"), message("assistant", "bad")
TURNS = [USER, message("assistant", "first"), message("user", "more")]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
HH = "\n\nHuman: q\n\nAssistant: first\n\nHuman: more\n\nAssistant:"


def judged(value, *, rated=False, keys=None, **columns):
    """Read a row by the format that its columns mean."""
    examples = "rated" if rated else "pairs"
    format, names = choose_format(
        list(value),
        format="auto",
        columns=DataColumns(**columns),
        setting="data.train",
        examples=examples,
    )
    return to_judged(value, format=format, columns=names, keys=keys or KeyAudit(), rated=rated)


def shown(value, **options):
    """The shared messages of a pair, and what each side trains."""
    chosen, rejected = judged(value, **options).answers
    first = chosen.trained.index(True)
    assert chosen.messages[:first] == rejected.messages[:first]
    assert not any(rejected.trained[:first])
    tails = [
        [(m["content"], t) for m, t in zip(c.messages[first:], c.trained[first:], strict=True)]
        for c in (chosen, rejected)
    ]
    return chosen.messages[:first], *tails


SIDES = [("good", True)], [("bad", True)]


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "q", "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"question": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": "q", "chosen_response": "good", "rejected_response": "bad"},
        {"input": {"messages": [USER]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
        {"conversations": [{"from": "human", "value": "q"}],
         "chosen": {"from": "gpt", "value": "good"}, "rejected": {"from": "gpt", "value": "bad"}},
        {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
        {"chosen": "\n\nHuman: q\n\nAssistant: good", "rejected": "\n\nHuman: q\n\nAssistant: bad"},
        {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " good", "rejected": " bad"},
        {"messages": [USER, GOOD], "rejected_response": "bad"},
        {"messages": [USER, GOOD], "rejected_response": ["bad", "worse"]},
        {"messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
        {"query": "q", "response": "good", "rejected_response": "bad"},
        {"chosen": "good", "rejected": [USER, BAD]},
        {"context": [USER], "response1": "good", "response2": "bad", "overall_preference": -3},
        {"prompt": "q", "response_1": "bad", "response_2": "good", "preference_strength": 1},
        {"instruction": "q", "completions": [
            {"response": "middle", "overall_score": 5.0},
            {"response": "good", "overall_score": 9.0},
            {"response": "bad", "overall_score": 1.0}]},
        {"prompt": "q", "answers": [
            {"answer": "good", "rank": 1.0}, {"answer": "middle", "rank": 2.0},
            {"answer": "bad", "rank": 7.0}]},
    ],
)  # fmt: skip
def test_every_style_of_pairs_gives_the_same_two_conversations(value):
    prompt, chosen, rejected = shown(value)
    assert prompt == [USER]
    assert [text for text, _ in chosen] == ["good"]
    assert [text for text, _ in rejected] == ["bad"]


def test_what_two_conversations_share_is_the_prompt_and_all_answers_behind_it_are_trained():
    value = {"chosen": [*TURNS, GOOD, USER, GOOD], "rejected": [*TURNS, BAD, USER, BAD]}
    prompt, chosen, rejected = shown(value)
    assert prompt == TURNS
    assert chosen == [("good", True), ("q", False), ("good", True)]
    assert rejected == [("bad", True), ("q", False), ("bad", True)]


def test_transcripts_are_divided_into_turns():
    prompt, *sides = shown({"chosen": f"{HH} good", "rejected": f"{HH} bad"})
    assert prompt == TURNS
    assert tuple(sides) == SIDES


def test_alpaca_input_belongs_to_the_prompt():
    value = {"instruction": "add", "input": "1 2", "chosen": "3", "rejected": "4"}
    assert shown(value)[0] == [message("user", "add\n\n1 2")]


def test_system_text_history_and_tools_are_part_of_both_conversations():
    value = {
        "system": "Be brief.",
        "history": [["a", "b"]],
        "tools": [TOOL],
        "prompt": "q",
        "chosen": [message("assistant", "", tool_calls=[CALL]), message("tool", "7"), GOOD],
        "rejected": [BAD],
    }
    chosen, rejected = judged(value).answers
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [m["role"] for m in rejected.messages] == roles
    assert chosen.trained == [False, False, False, False, True, False, True]
    assert chosen.tools == rejected.tools == [TOOL]


def test_tools_beside_the_messages_of_a_prompt_are_on_offer():
    prompt = {"messages": [USER], "tools": [TOOL], "parallel_tool_calls": True}
    keys = KeyAudit()
    value = {"input": prompt, "preferred_output": [GOOD], "non_preferred_output": [BAD]}
    chosen, _ = judged(value, keys=keys).answers
    assert chosen.tools == [TOOL]
    assert keys.report()[1] == {"parallel_tool_calls (prompt)": 1}


def test_columns_of_pairs_can_be_named():
    value = {"ask": "q", "yes": "good", "no": "bad"}
    assert shown(value, prompt="ask", chosen="yes", rejected="no") == ([USER], *SIDES)


def test_keys_of_ranked_answers_that_are_not_read_are_counted():
    keys = KeyAudit()
    answers = [{"text": str(n), "score": n, "overall_score": -n, "model": "m"} for n in range(3)]
    assert shown({"prompt": "q", "answers": answers}, keys=keys)[1:] == (
        [("2", True)],
        [("0", True)],
    )
    assert keys.report()[1] == {"model (answer)": 3, "overall_score (answer)": 3}


def test_score_of_ranked_answers_can_be_named():
    answers = [{"text": str(n), "score": n, "overall_score": -n} for n in range(3)]
    value = {"prompt": "q", "answers": answers}
    assert shown(value, score="overall_score")[1:] == ([("0", True)], [("2", True)])


PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (PAIR | {"rejected": "good"}, "equal answers: chosen and rejected are the same"),
        (PAIR | {"rejected": None}, "no pair: column 'rejected' is empty"),
        (PAIR | {"rejected": " "}, "empty: column 'rejected'"),
        (PAIR | {"rejected": 3}, "not text: column 'rejected' is int"),
        (PAIR | {"rejected": [message("assistant", "")]}, "empty: content of message 1"),
        (PAIR | {"prompt": None}, "no prompt: chosen and rejected are answers"),
        (PAIR | {"weight": 0.5}, "weights of preferences: .*leave_out: \\[weight\\]"),
        (PAIR | {"score_chosen": 1, "score_rejected": 2}, "contradiction: .* score 1, .* 2; leave"),
        ({"context": [USER], "response1": "a", "response2": "b", "overall_preference": 0}, "tie: "),
        ({"context": [USER], "response1": "a", "response2": "b", "overall_preference": None},
         "no number: column 'overall_preference' is None"),
        (PAIR | {"score_chosen": 1, "score_rejected": None}, "no number: column 'score_rejected'"),
        (PAIR | {"score_chosen": "best", "score_rejected": 1}, "no number: column 'score_chosen'"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}, "beginning of the other"),
        ({"chosen": [USER, GOOD], "rejected": [TURNS[2], BAD]}, "differ first in message 1"),
        ({"chosen": [*TURNS, GOOD], "rejected": [*TURNS[:2], USER, BAD]}, "first in message 3"),
        ({"chosen": f"{HH} good", "rejected": HH}, "empty: turn 4 of the transcript"),
        (PAIR | {"chosen": str([USER, GOOD])}, "broken JSON: column 'chosen' holds text of mess"),
        ({"chosen": "q good", "rejected": "q bad"}, "prompt that is the beginning of two"),
        (PAIR | {"chosen": [TURNS[2], GOOD], "rejected": [TURNS[2], BAD]}, "prompt beside"),
        ({"chosen": [USER, GOOD | {"train": False}], "rejected": [USER, BAD]}, "no trained token"),
        ({"prompt": "q", "answers": [{"text": "a", "rank": 1}]}, "holds 1 answers, and a pair"),
        ({"prompt": "q", "answers": ["a", "b"]}, "'answers' is list, and wanted are obj"),
        ({"prompt": "q", "answers": [{"text": "a"}, {"text": "b"}]}, "no number: score .data.col"),
        ({"prompt": "q", "answers": [{"x": "a", "rank": 1}, {"x": "b", "rank": 2}]}, "no pair: an"),
    ],
)  # fmt: skip
def test_rows_that_hold_no_pair_say_why(value, reason):
    with pytest.raises(RowError, match=reason):
        judged(value)


@pytest.mark.parametrize(
    "value",
    [
        PAIR | {"score_chosen": 4.5, "score_rejected": "4.5"},
        {"prompt": "q", "answers": [{"text": t, "score": 2} for t in "abc"]},
    ],
)
def test_ties_are_not_wanted_and_stop_no_run(value):
    with pytest.raises(RowError, match="tie: both answers have the score"):
        judged(value)


@pytest.mark.parametrize("label", [True, 1, 1.0, "True", "1"])
@pytest.mark.parametrize("name", ["label", "desirable"])
def test_labels_of_rated_answers_are_true_and_false_as_files_hold_them(label, name):
    value = {"prompt": "q", "completion": "good", name: label}
    assert judged(value, rated=True).desirable == [True]
    with pytest.raises(RowError, match=f"no judgement: column '{name}' is 'good', known are true"):
        judged(value | {name: "good"}, rated=True)


def test_of_rated_conversations_the_answer_behind_the_last_user_is_trained():
    value = {"messages": [*TURNS, GOOD, message("tool", "7"), GOOD], "label": False}
    (answer,), desirable = judged(value, rated=True).answers, judged(value, rated=True).desirable
    assert answer.trained == [False, False, False, True, False, True]
    assert desirable == [False]


def test_rated_conversation_that_ends_with_the_user_is_refused():
    with pytest.raises(RowError, match="no answer: a user's turn is the last"):
        judged({"messages": TURNS, "label": True}, rated=True)


def test_pair_is_two_rated_answers():
    assert judged(PAIR, rated=True).desirable == [True, False]


def encoded(tokenizer, value, template=PLAIN_TEMPLATE):
    encoder = SampleEncoder(tokenizer, chat_template=template, loss_on="completions")
    return begin_judged(encoder, judged(value))()


def test_both_documents_begin_with_the_prompt_as_inference_renders_it(tokenizer):
    chosen, rejected = encoded(tokenizer, {"chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]})
    prompt = tokenizer.apply_chat_template(
        TURNS, chat_template=PLAIN_TEMPLATE, add_generation_prompt=True
    )["input_ids"]
    for document, answer in ((chosen, "good"), (rejected, "bad")):
        assert prompt_of(document.ids, document.mask).tolist() == prompt
        assert tokenizer.decode(document.ids[document.mask]) == answer + tokenizer.eos_token


UNTRAINED = GOOD | {"train": False}
TRIMS = PLAIN_TEMPLATE.replace("m.content", "(m.content | trim)")


@pytest.mark.parametrize(
    ("template", "value", "reason"),
    [
        (
            PLAIN_TEMPLATE,
            {"chosen": [USER, UNTRAINED, USER, GOOD], "rejected": [USER, BAD]},
            "unlike prompts",
        ),
        (TRIMS, PAIR | {"rejected": "good "}, "equal answers: the chat template writes"),
    ],
)
def test_documents_that_are_no_pair_any_more_are_refused(tokenizer, template, value, reason):
    with pytest.raises(RowError, match=reason):
        encoded(tokenizer, value, template)
