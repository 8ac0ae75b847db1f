"""Conversations to tokens: equal to the tokenizer's own, masks on the answers, data never a special
token.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tests.support.tiny import CHAT_TEMPLATE, ROLES, TEXTS, tiny_tokenizer
from workflow.lib.data.encoding.chat_messages import Conversation, RowError
from workflow.lib.data.encoding.row_formats import TokenRow
from workflow.lib.data.encoding.safe_encoder import token_span
from workflow.lib.data.encoding.sample_encoder import PROBES, Encoded, SampleEncoder
from workflow.lib.system import limits
from workflow.lib.system.errors import UserError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the answer?"},
    {"role": "assistant", "content": "Forty-two."},
    {"role": "user", "content": "Why? 五 🦊 "},
    {"role": "assistant", "content": " é"},
]
# ChatML-like, without generation blocks, and with a line feed after each end-of-turn token.
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token + '\n' "
    "}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
OPEN_BLOCKS = CHAT_TEMPLATE.replace(
    "{{ message['content'] + eos_token }}{% endgeneration %}",
    "{{ message['content'] }}{% endgeneration %}{{ eos_token }}",
)
EOS_ID, USER_ID = 2, 4
HOSTILE = ["<|end|>", "<|assistant|>", "a<|pad|>b", "<|user|><|begin|>", "<|end|", "<<|end|>>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def encode(
    tokenizer: Any, sample: Any, template: str | None = CHAT_TEMPLATE, **options: Any
) -> Encoded:
    options = {"loss_on": "completions", **options}
    sample = conversation(sample) if isinstance(sample, list) else sample
    examples = SampleEncoder(tokenizer, chat_template=template, **options).encode(sample)
    assert len(examples) == 1
    return examples[0]


def conversation(messages: list[Any], **more: Any) -> Conversation:
    return Conversation(messages, [m["role"] == "assistant" for m in messages], **more)


def trained(tokenizer: Any, encoded: Encoded) -> list[str]:
    """The texts of the trained runs of tokens."""
    runs: list[list[int]] = [[]]
    for token, is_target in zip(encoded.ids.tolist(), encoded.mask, strict=True):
        if is_target:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def exchange(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE, OPEN_BLOCKS])
def test_ids_equal_the_tokenizers_own(tokenizer: Any, template: str) -> None:
    expected = tokenizer.apply_chat_template(CHAT, chat_template=template)["input_ids"]
    assert encode(tokenizer, CHAT, template).ids.tolist() == expected


def test_mask_equals_transformers_assistant_mask(tokenizer: Any) -> None:
    expected = tokenizer.apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )["assistant_masks"]
    assert encode(tokenizer, CHAT).mask.astype(int).tolist() == expected


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE, OPEN_BLOCKS])
def test_every_answer_and_its_end_of_turn_is_trained_and_nothing_else(
    tokenizer: Any, template: str
) -> None:
    answers = trained(tokenizer, encode(tokenizer, CHAT, template))
    assert answers == ["Forty-two.<|end|>", " é<|end|>"]


def test_all_is_trained_but_the_first_token_on_request(tokenizer: Any) -> None:
    mask = encode(tokenizer, CHAT, loss_on="all").mask
    assert not mask[0]
    assert mask[1:].all()


def test_bos_is_written_once(tokenizer: Any) -> None:
    ids = encode(tokenizer, CHAT).ids.tolist()
    assert [place for place, token in enumerate(ids) if token == tokenizer.bos_token_id] == [0]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE])
@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("place", [0, 1])
def test_special_token_in_the_data_is_ordinary_text(
    tokenizer: Any, template: str, text: str, place: int
) -> None:
    words = ["What now?", "Nothing."]
    harmless = encode(tokenizer, exchange(*words), template)
    words[place] = text
    hostile = encode(tokenizer, exchange(*words), template)
    specials = set(tokenizer.all_special_ids)
    kept = [[i for i in e.ids.tolist() if i in specials] for e in (hostile, harmless)]
    assert kept[0] == kept[1]
    assert text in tokenizer.decode(hostile.ids.tolist())
    assert trained(tokenizer, hostile) == [words[1] + "<|end|>"]


def test_guarded_encoding_differs_in_nothing_but_the_hostile_text(tokenizer: Any) -> None:
    """The same conversation with a hostile system text ends in the same tokens as with a harmless
    one.
    """
    harmless = encode(tokenizer, [{"role": "system", "content": "x"}, *CHAT[1:]])
    hostile = encode(tokenizer, [{"role": "system", "content": "<|end|>"}, *CHAT[1:]])
    tail = len(harmless.ids) - harmless.ids.tolist().index(tokenizer.eos_token_id)
    assert hostile.ids[-tail:].tolist() == harmless.ids[-tail:].tolist()
    assert hostile.mask[-tail:].tolist() == harmless.mask[-tail:].tolist()
    assert (hostile.held_special_text, harmless.held_special_text) == (True, False)


PIECES = st.sampled_from([*HOSTILE, *ROLES, "a", " ", "\n", "é", "五", "<", "|>", "\U000f0000"])
CONTENTS = st.lists(PIECES, min_size=1, max_size=8).map("".join)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200
)
@given(question=CONTENTS, answer=CONTENTS)
def test_any_text_comes_back_whole(tokenizer: Any, question: str, answer: str) -> None:
    encoded = encode(tokenizer, exchange(question, answer))
    assert trained(tokenizer, encoded) == [answer + "<|end|>"]
    expected = f"<|begin|><|user|>{question}<|end|><|assistant|>{answer}<|end|>"
    assert tokenizer.decode(encoded.ids.tolist()) == expected


LLAMA_2_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' "
    "[/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}{% "
    "endfor %}"
)


def sentencepiece_like(kind: str, prepend_scheme: Any) -> PreTrainedTokenizerFast:
    """Special tokens in the model's own vocabulary, and spaces written as part of the words."""
    specials = ["<unk>", "<s>", "</s>"]
    common: dict[str, Any] = {"vocab_size": 151, "special_tokens": specials, "show_progress": False}
    if kind == "unigram":
        core = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(unk_token="<unk>", **common)
    else:
        core = Tokenizer(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(**common)
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    core.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    core.train_from_iterator([*TEXTS, "[INST] </s> [/INST]"] * 3, trainer)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("prepend_scheme", ["first", "always", "never"])
def test_special_token_in_the_data_is_ordinary_text_for_sentencepiece_too(
    kind: str, prepend_scheme: str
) -> None:
    tokenizer = sentencepiece_like(kind, prepend_scheme)
    harmless = exchange("What is the fox?", "the dog")
    hostile = exchange("What </s> is <s> the fox?", "the dog")
    first, second = (encode(tokenizer, chat, LLAMA_2_TEMPLATE) for chat in (harmless, hostile))
    own = tokenizer.apply_chat_template(harmless, chat_template=LLAMA_2_TEMPLATE)["input_ids"]
    specials = [[i for i in e.ids.tolist() if i in (1, 2)] for e in (first, second)]
    assert first.ids.tolist() == own
    assert specials == [[1, 2], [1, 2]]
    assert trained(tokenizer, first) == trained(tokenizer, second)


@pytest.mark.parametrize("prepend_scheme", ["first", "always", "never"])
def test_answer_behind_a_prompt_that_ends_with_a_blank_is_what_a_model_would_add(
    prepend_scheme: str,
) -> None:
    """Encoded as one text, the blank would belong to the answer's first word, which inference has
    it not do."""
    tokenizer = sentencepiece_like("bpe", prepend_scheme)
    template = (
        "{{ bos_token }}{% for m in messages %}{{ '[INST]' + m.content + '[/INST] ' "
        "if m.role == 'user' else m.content + eos_token }}{% endfor %}"
    )
    talk = exchange("the fox", "the dog")
    encoded = encode(tokenizer, talk, template)
    prompt = tokenizer.apply_chat_template(talk[:1], chat_template=template)["input_ids"]
    assert encoded.ids[: len(prompt)].tolist() == prompt
    assert encoded.mask.tolist() == [False] * len(prompt) + [True] * (
        len(encoded.ids) - len(prompt)
    )
    text = "".join(tokenizer.convert_ids_to_tokens(encoded.ids[len(prompt) :].tolist()))
    assert text == "the▁dog</s>"


def test_generation_block_that_holds_a_part_of_some_prompts_is_trained_without_it(
    tokenizer: Any,
) -> None:
    """The prompt of a conversation with a system text goes on with a blank, which its block has
    too."""
    more = "{{ '<' if messages[0].role == 'system' else '' }}"
    template = CHAT_TEMPLATE.replace("{% generation %}", "{% generation %}" + more).replace(
        "{{ '<|assistant|>' }}", "{{ '<|assistant|>' }}" + more
    )
    assert trained(tokenizer, encode(tokenizer, CHAT, template))[0] == "Forty-two.<|end|>"
    assert trained(tokenizer, encode(tokenizer, CHAT[1:], template))[0] == "Forty-two.<|end|>"


def test_text_is_trained_whole_between_one_bos_and_one_eos(tokenizer: Any) -> None:
    encoded = encode(tokenizer, "Pack <|end|> rows", None)
    specials = [i for i in encoded.ids.tolist() if i in tokenizer.all_special_ids]
    assert specials == [tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert encoded.mask.tolist() == [False] + [True] * (len(encoded.ids) - 1)
    assert tokenizer.decode(encoded.ids.tolist()) == "<|begin|>Pack <|end|> rows<|end|>"


def test_turn_that_changes_once_others_follow_is_trained_as_inference_sees_it(
    tokenizer: Any,
) -> None:
    template = PLAIN_TEMPLATE.replace(
        "m.content", "(m.content if loop.last or m.role != 'assistant' else 'gone')"
    )
    encoder = SampleEncoder(tokenizer, chat_template=template, loss_on="completions")
    first, second = encoder.encode(conversation(CHAT))
    assert trained(tokenizer, first) == ["Forty-two.<|end|>"]
    assert trained(tokenizer, second) == [" é<|end|>"]
    assert "gone" in tokenizer.decode(second.ids.tolist())
    assert "Why?" not in tokenizer.decode(first.ids.tolist())


def test_template_without_the_prompt_in_front_of_its_answer_is_refused(tokenizer: Any) -> None:
    template = PLAIN_TEMPLATE.replace("{{ '<|assistant|>' }}", "Now speak:")
    with pytest.raises(UserError, match=r"turn not found: .* message 2 .*add_generation_prompt"):
        encode(tokenizer, CHAT, template)


def test_row_that_the_template_refuses_carries_its_message(tokenizer: Any) -> None:
    refusal = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    )
    with pytest.raises(RowError, match="refused by the chat template: no system here"):
        encode(tokenizer, CHAT, refusal + CHAT_TEMPLATE)


def test_template_whose_turns_do_not_end_is_refused_at_once(tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"does not end with a special token.*data\.chat_template"):
        encode(tokenizer, CHAT, CHAT_TEMPLATE.replace("+ eos_token", ""))


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages.none.none }}", "no answer in it"])
def test_template_that_cannot_render_an_answer_is_refused_at_once(
    tokenizer: Any, template: str
) -> None:
    with pytest.raises(UserError, match=r"a question and an answer cannot be rendered"):
        SampleEncoder(tokenizer, chat_template=template, loss_on="completions")


def test_template_that_writes_the_date_gives_the_same_tokens_every_day(tokenizer: Any) -> None:
    dated = CHAT_TEMPLATE.replace("{{ bos_token }}", "{{ bos_token + strftime_now('%d %b %Y') }}")
    text = tokenizer.decode(encode(tokenizer, CHAT, dated).ids.tolist())
    assert text.startswith("<|begin|>26 Jul 2024<|system|>")


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE, OPEN_BLOCKS])
def test_last_turn_alone_is_trained_on_request(tokenizer: Any, template: str) -> None:
    encoded = encode(tokenizer, CHAT, template, loss_on="last_turn")
    assert trained(tokenizer, encoded) == [" é<|end|>"]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE, OPEN_BLOCKS])
def test_turn_of_weight_zero_is_not_trained(tokenizer: Any, template: str) -> None:
    weighed = Conversation(CHAT, [False, False, True, False, False])
    assert trained(tokenizer, encode(tokenizer, weighed, template)) == ["Forty-two.<|end|>"]
    last = encode(tokenizer, weighed, template, loss_on="last_turn")
    assert trained(tokenizer, last) == ["Forty-two.<|end|>"]


def test_single_turns_of_a_template_with_several_blocks_for_each_are_found(tokenizer: Any) -> None:
    blocks = (
        "{% generation %}{{ message['content'] }}{% endgeneration %}{% generation %}{{ eos_token }}"
    )
    template = CHAT_TEMPLATE.replace("{% generation %}{{ message['content'] + eos_token }}", blocks)
    assert trained(tokenizer, encode(tokenizer, CHAT, template))[0] == "Forty-two.<|end|>"
    last = encode(tokenizer, CHAT, template, loss_on="last_turn")
    assert trained(tokenizer, last) == [" é<|end|>"]


def test_ready_tokens_are_taken_as_they_are(tokenizer: Any) -> None:
    row = TokenRow([5, 6, 7, 300], [True, False, True, True])
    encoded = encode(tokenizer, row, None)
    assert encoded.ids.tolist() == row.ids
    assert encoded.mask.tolist() == [False, False, True, True]
    assert encode(tokenizer, row, None, loss_on="all").mask.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("ids", "targets", "reason"),
    [
        ([5, 307], [True, True], "unknown token: id 307, the tokenizer has 0 to 306"),
        ([5, -1], [True, True], "unknown token: id -1"),
        ([5, 6], [True, False], "no trained token"),
        ([5, 6], None, "no labels: token ids need labels or loss_mask"),
    ],
)
def test_ready_tokens_that_cannot_be_trained_are_refused(
    tokenizer: Any, ids: list[int], targets: Any, reason: str
) -> None:
    with pytest.raises(RowError, match=reason):
        encode(tokenizer, TokenRow(ids, targets), None)


@pytest.mark.parametrize("sample", ["plain", TokenRow([1, 2], [True, True])])
def test_last_turn_needs_turns(tokenizer: Any, sample: Any) -> None:
    with pytest.raises(RowError, match=r"no turns: .* needs conversations"):
        encode(tokenizer, sample, None, loss_on="last_turn")


WEATHER = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo <|end|>"}}}
AGENT = [
    {"role": "user", "content": "How is the weather in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "fog<|pad|>"},
    {"role": "assistant", "content": "Foggy."},
]
TOOL_TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|user|>' if m.role == 'tool' else '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name ~ c.function.arguments | tojson }}{% "
    "endfor %}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NO_BLOCKS = TOOL_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, NO_BLOCKS])
def test_calls_are_trained_and_tools_and_results_are_not(tokenizer: Any, template: str) -> None:
    encoded = encode(tokenizer, conversation(AGENT, tools=[WEATHER]), template)
    assert trained(tokenizer, encoded) == [
        'weather{"city": "Oslo <|end|>"}<|end|>',
        "Foggy.<|end|>",
    ]
    text = tokenizer.decode(encoded.ids.tolist())
    assert '"name": "weather"' in text
    assert "fog<|pad|>" in text


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, NO_BLOCKS])
def test_special_tokens_in_calls_and_results_are_ordinary_text(
    tokenizer: Any, template: str
) -> None:
    encoded = encode(tokenizer, conversation(AGENT, tools=[WEATHER]), template)
    ids = encoded.ids.tolist()
    assert encoded.held_special_text
    assert ids.count(tokenizer.eos_token_id) == len(AGENT)
    assert ids.count(tokenizer.pad_token_id) == 0


LOSSES = [
    (
        "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}",
        "",
        "the function 'weather'",
    ),
    ("c.function.name ~", "''~", "the function 'weather'"),
    ("{{ m.content + eos_token }}", "{{ eos_token }}", "the result in message 3"),
]


@pytest.mark.parametrize(("part", "replacement", "lost"), LOSSES, ids=["tools", "calls", "results"])
def test_template_that_leaves_out_what_a_tool_says_refuses_the_row(
    tokenizer: Any, part: str, replacement: str, lost: str
) -> None:
    template = TOOL_TEMPLATE.replace(part, replacement)
    assert template != TOOL_TEMPLATE
    with pytest.raises(RowError, match=f"tools not rendered: the chat template leaves out {lost}"):
        encode(tokenizer, conversation(AGENT, tools=[WEATHER]), template)


def test_template_that_writes_calls_outside_its_blocks_refuses_the_row(tokenizer: Any) -> None:
    start = "{% generation %}{{ m.content }}"
    outside = TOOL_TEMPLATE.replace(start, "").replace(
        "{{ eos_token }}{% endg", start + "{{ eos_token }}{% endg"
    )
    with pytest.raises(RowError, match="tools not trained"):
        encode(tokenizer, conversation(AGENT, tools=[WEATHER]), outside)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_template_runs_in_a_sandbox(tokenizer: Any, attack: str) -> None:
    with pytest.raises(UserError, match="refused by the chat template"):
        encode(tokenizer, CHAT, attack + CHAT_TEMPLATE)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Only for conversations of five messages, which the first check of a template has not.
LATE = "{% if messages | length == 5 %}" + LOOPS + "{% endif %}"


@pytest.mark.parametrize("bomb", [LOOPS, LATE, "{{ 10 ** (10 ** 9) }}"])
def test_template_that_loops_without_end_is_stopped(
    tokenizer: Any, bomb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.05)
    refusal = r"data\.chat_template, .* more than 0\.05 seconds of processor time for one conver"
    with pytest.raises(UserError, match=refusal):
        encode(tokenizer, CHAT, bomb + CHAT_TEMPLATE)


@pytest.mark.parametrize(
    "bomb",
    [
        "{{ 'x' * 3000000000 }}",
        "{{ 'x' * (messages | length * 3000000000) }}",
        "{{ ''.ljust(3000000000) }}",
        "{{ messages[0].content.replace('', 'x' * 100000000) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% "
        "endfor %}{{ ns.x }}",
    ],
)
def test_template_of_a_hundred_gigabytes_of_text_is_stopped(tokenizer: Any, bomb: str) -> None:
    refusal = r"data\.chat_template, .* takes more than 1,024 MiB of memory for one conversation"
    with pytest.raises(UserError, match=refusal):
        encode(tokenizer, CHAT, bomb + CHAT_TEMPLATE)


def test_template_that_writes_more_than_a_tokenizer_holds_drops_the_row(tokenizer: Any) -> None:
    much = "{% if messages | length == 5 %}{{ 'x' * 20000000 }}{% endif %}"
    with pytest.raises(
        RowError, match=r"too large: the chat template writes 2\d{7} characters, mor"
    ):
        encode(tokenizer, CHAT, much + CHAT_TEMPLATE)


def test_message_of_a_template_cannot_speak_to_the_terminal(tokenizer: Any) -> None:
    refusal = (
        "{% if messages[0].role == 'system' %}{{ raise_exception(messages[1].content) }}{% endif %}"
    )
    hostile = [CHAT[0], {"role": "user", "content": "\x1b[2J\u202e"}, CHAT[2]]
    with pytest.raises(RowError) as caught:
        encode(tokenizer, hostile, refusal + CHAT_TEMPLATE)
    assert str(caught.value) == r"refused by the chat template: \x1b[2J\u202e"


@pytest.mark.parametrize("sample", [CHAT, "plain text"])
def test_bos_that_the_tokenizer_adds_by_itself_is_not_doubled(tmp_path: Any, sample: Any) -> None:
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


def test_pad_token_that_is_the_end_token_leaves_the_end_trained(tmp_path: Any) -> None:
    tokenizer = tiny_tokenizer(tmp_path, pad=False)
    encoded = encode(tokenizer, CHAT)
    assert encoded.ids[encoded.mask].tolist().count(tokenizer.eos_token_id) == 2


@pytest.mark.parametrize("loss_on", ["completions", "last_turn", "all"])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN_TEMPLATE, OPEN_BLOCKS])
def test_end_of_turn_is_the_token_that_the_template_ends_an_answer_with(
    tokenizer: Any, template: str, loss_on: Any
) -> None:
    """Also where all is trained, and the template writes a line feed behind each turn."""
    other = template.replace("eos_token", "'<|user|>'")
    for text, ends in ((template, [EOS_ID]), (other, [USER_ID]), (None, [])):
        encoder = SampleEncoder(tokenizer, chat_template=text, loss_on=loss_on)
        assert encoder.end_of_turn_ids() == ends


def test_probes_are_encoded_as_stock_transformers_writes_them(tokenizer: Any) -> None:
    encoder = SampleEncoder(tokenizer, chat_template=TOOL_TEMPLATE, loss_on="completions")
    text, *chats = encoder.encoded_probes()
    assert text["ids"] == tokenizer(text["text"], add_special_tokens=False)["input_ids"]
    assert len(chats) == len(PROBES)
    for chat in chats:
        expected = tokenizer.apply_chat_template(
            chat["messages"], tools=chat["tools"], chat_template=TOOL_TEMPLATE
        )
        assert chat["ids"] == expected["input_ids"]


def test_probes_that_the_template_refuses_are_left_out(tokenizer: Any) -> None:
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}"
        + CHAT_TEMPLATE
    )
    encoder = SampleEncoder(tokenizer, chat_template=strict, loss_on="completions")
    (_, chat) = encoder.encoded_probes()
    assert chat["messages"] == PROBES[0].messages


def byte_level(*, trim: bool) -> Tokenizer:
    """Parts of characters as tokens; with `trim`, offsets leave out the blanks that a token begins
    with.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=trim)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the fox  the answer é"] * 9, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """As SentencePiece does: text is normalized, which changes its length, and a blank put before
    it.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["?"], show_progress=False)
    tokenizer.train_from_iterator(["the fox  the answer e"] * 9, trainer)
    return tokenizer


SPANNED = {
    "bytes": byte_level(trim=False),
    "trimmed": byte_level(trim=True),
    "normalized": metaspace(),
}


@pytest.mark.parametrize("kind", SPANNED)
@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet=st.sampled_from("the fox  éﬁİ\u0323\u0307五🦊\n\t"), max_size=30),
    ends=st.tuples(st.integers(0, 31), st.integers(0, 31)),
)
def test_token_span_is_that_of_the_tokens_that_touch_the_characters(
    kind: str, text: str, ends: tuple[int, int]
) -> None:
    encoding = SPANNED[kind].encode(text, add_special_tokens=False)
    start, end = sorted(ends)
    touching = [i for i, (a, b) in enumerate(encoding.offsets) if a < end and b > start]
    expected = (touching[0], touching[-1] + 1) if touching else (0, 0)
    assert token_span(encoding, start, end) == expected
