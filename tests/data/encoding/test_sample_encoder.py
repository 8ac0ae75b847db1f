"""Conversations to tokens: equal to the tokenizer's own, masks on the answers."""

import pytest
from tokenizers import AddedToken, processors

from tests.support.encoding import (
    CHAT,
    OPEN_BLOCKS,
    PLAIN_TEMPLATE,
    TOOL_TEMPLATE,
    conversation,
    encode,
    trained,
)
from tests.support.tiny import CHAT_TEMPLATE, tiny_tokenizer
from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.chat_template import with_arguments
from workflow.lib.data.encoding.probe_conversations import PROBES
from workflow.lib.data.encoding.row_formats import Weighted
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.data.encoding.token_rows import TokenRow

EOS_ID, USER_ID = 2, 4


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE, OPEN_BLOCKS])
def test_ids_equal_the_tokenizers_own(tokenizer, template):
    expected = tokenizer.apply_chat_template(CHAT, chat_template=template)["input_ids"]
    assert encode(tokenizer, CHAT, template).ids.tolist() == expected


def test_mask_equals_transformers_assistant_mask(tokenizer):
    expected = tokenizer.apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )["assistant_masks"]
    assert encode(tokenizer, CHAT).mask.astype(int).tolist() == expected


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE, OPEN_BLOCKS])
def test_every_answer_and_its_end_of_turn_is_trained_and_nothing_else(tokenizer, template):
    answers = trained(tokenizer, encode(tokenizer, CHAT, template))
    assert answers == ["Forty-two.<|end|>", " é<|end|>"]


def test_all_is_trained_but_the_first_token_on_request(tokenizer):
    mask = encode(tokenizer, CHAT, loss_on="all").mask
    assert not mask[0]
    assert mask[1:].all()


def test_generation_block_that_holds_a_part_of_some_prompts_is_trained_without_it(tokenizer):
    """The prompt of a conversation with a system text goes on with a blank, which its block has
    too."""
    more = "{{ '<' if messages[0].role == 'system' else '' }}"
    template = CHAT_TEMPLATE.replace("{% generation %}", "{% generation %}" + more).replace(
        "{{ '<|assistant|>' }}", "{{ '<|assistant|>' }}" + more
    )
    assert trained(tokenizer, encode(tokenizer, CHAT, template))[0] == "Forty-two.<|end|>"
    assert trained(tokenizer, encode(tokenizer, CHAT[1:], template))[0] == "Forty-two.<|end|>"


LINES = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@pytest.mark.parametrize(("side", "token"), [("rstrip", "<|assistant|>"), ("lstrip", "<|end|>")])
@pytest.mark.parametrize("answer", ["  a {}b", "\n- a\n", "a b", " \t"])
def test_mask_begins_at_the_answer_where_special_tokens_strip_blanks(tmp_path, side, token, answer):
    stripping = tiny_tokenizer(tmp_path)
    stripping.add_tokens([AddedToken(token, special=True, **{side: True})], special_tokens=True)
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer + "c"}]
    if side == "lstrip":
        talk[1]["content"] = "c" + answer
    encoded = encode(stripping, talk * 2, LINES)
    kept = talk[1]["content"]
    kept = kept.lstrip() if side == "rstrip" else kept.rstrip()
    assert trained(stripping, encoded) == [f"{kept}<|end|>"] * 2
    assert encoded.notes == ({"lost_blanks"} if kept != talk[1]["content"] else frozenset())


def test_answer_that_begins_with_its_prompt_is_noted(tokenizer):
    prompt = {"role": "user", "content": "Name a river. "}
    for answer, notes in [(" Name a river. The Ebro.", {"repeat_prompt"}), ("The Ebro.", set())]:
        talk = [prompt, {"role": "assistant", "content": answer}]
        assert encode(tokenizer, talk).notes == notes
    short = [{"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": "2 + 3 = 5"}]
    assert not encode(tokenizer, short).notes


OPENS = PLAIN_TEMPLATE.replace("'<|assistant|>' }}", "'<|assistant|><think>\n' }}")
WRITES = PLAIN_TEMPLATE.replace("m.content", "m.content.replace('hm</th', '<think>hm</th')")


@pytest.mark.parametrize("answer", ["hm</think>a", "</think>a", "a</think><think>hm</think>"])
@pytest.mark.parametrize("loss_on", ["completions", "all"])
def test_end_of_a_reasoning_that_nothing_begins_is_refused(tokenizer, answer, loss_on):
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    with pytest.raises(RowError, match="reasoning without a beginning: message 2 has </think>"):
        encode(tokenizer, talk, PLAIN_TEMPLATE, loss_on=loss_on)


@pytest.mark.parametrize(
    ("template", "answer"),
    [(OPENS, "hm</think>a"), (WRITES, "hm</think>a"), (PLAIN_TEMPLATE, "<think>hm</think>a")],
)
def test_reasoning_that_the_prompt_or_the_template_begins_is_trained(tokenizer, template, answer):
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    (text,) = trained(tokenizer, encode(tokenizer, talk, template))
    assert text.removeprefix("<think>") == "hm</think>a<|end|>"


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, CHAT_TEMPLATE])
@pytest.mark.parametrize("begin", ["Sure: ", "<|end|>: "])
def test_prefill_is_one_turn_with_its_continuation_and_not_trained(tokenizer, template, begin):
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"{begin}an oak"}]
    sample = conversation(talk, prefills={1: begin})
    encoded = encode(tokenizer, sample, template)
    assert trained(tokenizer, encoded) == ["an oak<|end|>"]
    assert tokenizer.decode(encoded.ids.tolist()).count(f"{begin}an oak") == 1
    other = template.replace("m.content", "m.content | replace(':', ';')").replace(
        "message['content']", "message['content'] | replace(':', ';')"
    )
    with pytest.raises(RowError, match="turn not found: the chat template rewrites the beginning"):
        encode(tokenizer, sample, other, allow_unrendered=["assistant", "user"])


def test_results_have_the_role_that_the_template_knows(tokenizer):
    template = PLAIN_TEMPLATE.replace(
        "'<|' + m.role", "'<|' + ('user' if m.role == 'environment' else m.role)"
    )
    talk = [*CHAT[1:3], {"role": "tool", "content": "r"}, CHAT[2]]
    text = tokenizer.decode(encode(tokenizer, talk, template).ids.tolist())
    assert "<|user|>r<|end|>" in text


def test_text_is_trained_whole_up_to_one_eos_without_a_bos_that_the_tokenizer_does_not_add(
    tokenizer,
):
    encoded = encode(tokenizer, "Pack <|end|> rows", None)
    specials = [i for i in encoded.ids.tolist() if i in tokenizer.all_special_ids]
    assert specials == [tokenizer.eos_token_id]
    assert encoded.held_special_text
    assert encoded.mask.tolist() == [False] + [True] * (len(encoded.ids) - 1)
    assert tokenizer.decode(encoded.ids.tolist()) == "Pack <|end|> rows<|end|>"


@pytest.mark.parametrize("text", ["<|user|>Hi<|end|>", "<|user|>Hi"])
def test_text_is_read_as_the_tokens_that_it_spells_on_request(tokenizer, text):
    ids = encode(tokenizer, text, None, special_tokens="tokens").ids.tolist()
    assert [i for i in ids if i in tokenizer.all_special_ids] == [USER_ID, EOS_ID]


def test_end_that_answer_and_template_both_write_is_trained_once(tokenizer):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes.<|end|>"}]
    encoded = encode(tokenizer, talk, PLAIN_TEMPLATE, special_tokens="tokens")
    assert trained(tokenizer, encoded) == ["Yes.<|end|>"]


def test_turn_that_changes_once_others_follow_is_trained_as_inference_sees_it(tokenizer):
    template = PLAIN_TEMPLATE.replace(
        "m.content", "(m.content if loop.last or m.role != 'assistant' else 'gone')"
    )
    encoder = SampleEncoder(tokenizer, chat_template=template, loss_on="completions")
    first, second = encoder.encode(conversation(CHAT))
    assert trained(tokenizer, first) == ["Forty-two.<|end|>"]
    assert trained(tokenizer, second) == [" é<|end|>"]
    assert "gone" in tokenizer.decode(second.ids.tolist())
    assert "Why?" not in tokenizer.decode(first.ids.tolist())


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE, OPEN_BLOCKS])
def test_turn_of_weight_zero_is_not_trained(tokenizer, template):
    weighed = Conversation(CHAT, [False, False, True, False, False])
    assert trained(tokenizer, encode(tokenizer, weighed, template)) == ["Forty-two.<|end|>"]
    with pytest.raises(RowError, match=r"no trained token: .* last_turn trains the"):
        encode(tokenizer, weighed, template, loss_on="last_turn")


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE, OPEN_BLOCKS])
def test_tokens_have_the_weights_of_their_turn_and_row(tokenizer, template):
    weights = [0, 0, 0.5, 0, 2]
    talk = Conversation(CHAT, [weight > 0 for weight in weights], weights=weights)
    plain = encode(tokenizer, CHAT, template)
    encoded = encode(tokenizer, Weighted(talk, 4), template)
    assert encoded.mask.tolist() == plain.mask.tolist()
    first, second = trained(tokenizer, plain)
    spans = [
        len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (first, second)
    ]
    assert encoded.weights[encoded.mask].tolist() == [2.0] * spans[0] + [8.0] * spans[1]
    assert not encoded.weights[~encoded.mask].any()


def test_row_of_text_has_one_weight(tokenizer):
    encoded = encode(tokenizer, Weighted("plain", 0.5), None)
    assert encoded.weights.tolist() == (0.5 * encoded.mask).tolist()


def test_single_turns_of_a_template_with_several_blocks_for_each_are_found(tokenizer):
    blocks = (
        "{% generation %}{{ message['content'] }}{% endgeneration %}{% generation %}{{ eos_token }}"
    )
    template = CHAT_TEMPLATE.replace("{% generation %}{{ message['content'] + eos_token }}", blocks)
    assert trained(tokenizer, encode(tokenizer, CHAT, template))[0] == "Forty-two.<|end|>"
    last = encode(tokenizer, CHAT, template, loss_on="last_turn")
    assert trained(tokenizer, last) == [" é<|end|>"]


def test_ready_tokens_are_taken_as_they_are(tokenizer):
    row = TokenRow([5, 6, 7, 300], [True, False, True, True])
    encoded = encode(tokenizer, row, None)
    assert encoded.ids.tolist() == row.ids
    assert encoded.mask.tolist() == [False, False, True, True]


def test_labels_that_leave_tokens_out_are_refused_where_every_token_is_trained(tokenizer):
    for targets in (None, [False, True, True]):
        row = TokenRow([5, 6, 7], targets)
        assert encode(tokenizer, row, None, loss_on="all").mask.tolist() == [False, True, True]
    with pytest.raises(RowError, match=r"labels: .* trains every token; leave them out"):
        encode(tokenizer, TokenRow([5, 6, 7], [True, True, False]), None, loss_on="all")


@pytest.mark.parametrize(
    ("ids", "targets", "reason"),
    [
        ([5, 307], [True, True], "unknown token: id 307, the tokenizer has 0 to 306"),
        ([5, -1], [True, True], "unknown token: id -1"),
        ([5, 6], [True, False], "no trained token"),
        ([5, 6], None, "no labels: token ids need labels or loss_mask"),
    ],
)
def test_ready_tokens_that_cannot_be_trained_are_refused(tokenizer, ids, targets, reason):
    with pytest.raises(RowError, match=reason):
        encode(tokenizer, TokenRow(ids, targets), None)


@pytest.mark.parametrize("sample", ["plain", TokenRow([1, 2], [True, True])])
def test_last_turn_needs_turns(tokenizer, sample):
    with pytest.raises(RowError, match=r"no turns: .* needs conversations"):
        encode(tokenizer, sample, None, loss_on="last_turn")


@pytest.mark.parametrize("sample", [CHAT, "plain text"])
def test_bos_that_the_tokenizer_adds_by_itself_is_not_doubled(tmp_path, sample):
    tokenizer = tiny_tokenizer(tmp_path)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>",
        special_tokens=[(t, tokenizer.convert_tokens_to_ids(t)) for t in ("<|begin|>", "<|end|>")],
    )
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert tokenizer("x")["input_ids"][0] == bos
    ids = encode(tokenizer, sample).ids.tolist()
    assert ids.count(bos) == 1
    assert ids[0] == bos
    assert ids[-2:] != [eos, eos]


@pytest.mark.parametrize("loss_on", ["completions", "last_turn", "all"])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE, OPEN_BLOCKS])
def test_end_of_turn_is_the_token_that_the_template_ends_an_answer_with(
    tokenizer, template, loss_on
):
    """Also where all is trained, and the template writes a line feed behind each turn."""
    other = template.replace("eos_token", "'<|user|>'")
    for text, ends in ((template, [EOS_ID]), (other, [USER_ID]), (None, [])):
        encoder = SampleEncoder(tokenizer, chat_template=text, loss_on=loss_on)
        assert encoder.end_of_turn_ids() == ends


NINE = "{% if c.id | default('') | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
JOINED = "c.function.name + c.function.arguments }}"


@pytest.mark.parametrize(
    "template",
    [
        TOOL_TEMPLATE,
        TOOL_TEMPLATE.replace("{{ c.function.name", NINE + "{{ c.function.name"),
        TOOL_TEMPLATE.replace("c.function.name ~ c.function.arguments | tojson }}", JOINED),
        TOOL_TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ mode | default('none') }}"),
    ],
)
def test_probes_are_encoded_as_stock_transformers_writes_them(tokenizer, template):
    arguments = {"mode": "brief"} if "mode" in template else {}
    encoder = SampleEncoder(
        tokenizer, chat_template=template, loss_on="completions", template_kwargs=arguments
    )
    exported = with_arguments(template, arguments)
    text, *chats = encoder.encoded_probes()
    assert text["ids"] == tokenizer(text["text"], add_special_tokens=False)["input_ids"]
    assert len(chats) == len(PROBES)
    for chat in chats:
        expected = tokenizer.apply_chat_template(
            chat["messages"], tools=chat["tools"], chat_template=exported
        )
        assert chat["ids"] == expected["input_ids"]


def test_probes_that_the_template_refuses_are_left_out(tokenizer):
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}"
        + CHAT_TEMPLATE
    )
    encoder = SampleEncoder(tokenizer, chat_template=strict, loss_on="completions")
    (_, chat) = encoder.encoded_probes()
    assert chat["messages"] == PROBES[0].messages
