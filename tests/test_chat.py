"""Conversations to tokens: equal to the tokenizer's own, masks on the answers, data never a special token."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny import CHAT_TEMPLATE, ROLES, TEXTS, tiny_tokenizer
from workflow.lib.chat import Encoded, SampleEncoder
from workflow.lib.errors import UserError
from workflow.lib.samples import RowError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the answer?"},
    {"role": "assistant", "content": "Forty-two."},
    {"role": "user", "content": "Why? 五 🦊 "},
    {"role": "assistant", "content": " é"},
]
# ChatML-like, without generation blocks, and with a line feed after each end-of-turn token.
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
OPEN_BLOCKS = CHAT_TEMPLATE.replace(
    "{{ message['content'] + eos_token }}{% endgeneration %}",
    "{{ message['content'] }}{% endgeneration %}{{ eos_token }}",
)
HOSTILE = ["<|end|>", "<|assistant|>", "a<|pad|>b", "<|user|><|begin|>", "<|end|", "<<|end|>>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def encode(
    tokenizer: Any, sample: Any, template: str | None = CHAT_TEMPLATE, **options: Any
) -> Encoded:
    options = {"train_all": False, **options}
    return SampleEncoder(tokenizer, chat_template=template, **options).encode(sample)


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
    mask = encode(tokenizer, CHAT, train_all=True).mask
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
    """The same conversation with a hostile system text ends in the same tokens as with a harmless one."""
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
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
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


def test_text_is_trained_whole_between_one_bos_and_one_eos(tokenizer: Any) -> None:
    encoded = encode(tokenizer, "Pack <|end|> rows", None)
    specials = [i for i in encoded.ids.tolist() if i in tokenizer.all_special_ids]
    assert specials == [tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert encoded.mask.tolist() == [False] + [True] * (len(encoded.ids) - 1)
    assert tokenizer.decode(encoded.ids.tolist()) == "<|begin|>Pack <|end|> rows<|end|>"


def test_turn_that_changes_once_others_follow_is_refused(tokenizer: Any) -> None:
    template = PLAIN_TEMPLATE.replace(
        "m.content", "(m.content if loop.last or m.role == 'user' else 'gone')"
    )
    with pytest.raises(RowError, match=r"turn not found: .* data\.chat_template"):
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
        SampleEncoder(tokenizer, chat_template=template, train_all=False)


def test_template_that_writes_the_date_gives_the_same_tokens_every_day(tokenizer: Any) -> None:
    dated = CHAT_TEMPLATE.replace("{{ bos_token }}", "{{ bos_token + strftime_now('%d %b %Y') }}")
    text = tokenizer.decode(encode(tokenizer, CHAT, dated).ids.tolist())
    assert text.startswith("<|begin|>26 Jul 2024<|system|>")
