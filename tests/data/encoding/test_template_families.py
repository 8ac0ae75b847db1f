"""Chat templates that behave as those of model families: what is trained is what inference must
generate."""

# ruff: noqa: RUF001  (DeepSeek spells its tokens with wide bars)

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.row_formats import to_sample
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.settings.data import DataColumns

TEMPLATES = Path(__file__).with_name("templates")
# What each template's tokenizer knows: the end of a sequence, then all other special tokens but
# those of reasoning.
CHATML = ["<|im_end|>", "<|im_start|>", "<|im_sep|>"]
DEEPSEEK = [
    "<eos>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
]
SPECIALS = {
    "qwen3": CHATML,
    "qwen3_5": CHATML,
    "llama3": ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    "gemma2": ["<end_of_turn>", "<start_of_turn>"],
    "gemma3": ["<end_of_turn>", "<start_of_turn>"],
    "mistral": ["</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    "deepseek_v3": DEEPSEEK,
    "deepseek_r1": DEEPSEEK,
    "gpt_oss": ["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"],
    "phi4": CHATML,
    "smollm3": CHATML,
}  # fmt: skip
# What must be generated for a plain answer, in braces.
ANSWERS = {
    "qwen3": "<think>\n\n</think>\n\n{}<|im_end|>",
    "qwen3_5": "\n</think>\n\n{}<|im_end|>",
    "llama3": "{}<|eot_id|>",
    "gemma2": "{}<end_of_turn>",
    "gemma3": "{}<end_of_turn>",
    "mistral": "{}</s>",
    "deepseek_v3": "{}<eos>",
    "deepseek_r1": "\n</think>\n\n{}<eos>",
    "gpt_oss": "<|channel|>final<|message|>{}<|return|>",
    "phi4": "{}<|im_end|>",
    "smollm3": "{}<|im_end|>",
}
TRIM = {"llama3", "gemma2", "gemma3"}
# Templates by which an earlier turn, or the prompt before it, changes once others follow.
BY_TURNS = {"qwen3", "qwen3_5", "deepseek_r1", "gpt_oss"}
# Which characters may be one token, as in the tokenizers of Llama 3 and Qwen.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KINDS = ["bytes", "pieces"]
TEXTS = ["The answer is\n\n forty-two,  why? Because.\n", "assistant\n  model\n\n  x  user Hm."] * 5


@cache
def tokenizer_of(name, kind="bytes"):
    """A BPE over bytes as Llama 3's and Qwen's, or over characters without parts as Gemma's: blanks
    and line feeds merge."""
    if kind == "bytes":
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        core = Tokenizer(models.BPE(byte_fallback=True))
        core.normalizer = normalizers.Replace(" ", "\u2581")
        core.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet = [chr(code) for code in range(10, 127)] + ["\u2581", "é", "五"]
    specials = ["<bos>", *SPECIALS[name], "<think>", "</think>"]
    byte_tokens = [] if kind == "bytes" else [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=byte_tokens, show_progress=False
    )
    core.train_from_iterator(TEXTS, trainer)
    core.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token=SPECIALS[name][0],
        clean_up_tokenization_spaces=False,
    )


@cache
def encoder_of(name, kind="bytes", loss_on="completions"):
    template = template_of(name)
    return SampleEncoder(tokenizer_of(name, kind), chat_template=template, loss_on=loss_on)


def template_of(name):
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def encode(name, messages, kind="bytes", **more):
    row = {"messages": messages, **more}
    return encoder_of(name, kind).encode(to_sample(row, format="messages", columns=DataColumns()))


def own_ids(name, kind, messages, **more):
    """The prompt as inference tokenizes it, on the day that the workflow gives to templates."""
    template = template_of(name).replace("strftime_now('%d %b %Y')", "'26 Jul 2024'")
    template = template.replace("strftime_now('%Y-%m-%d')", "'2024-07-26'")
    ids: list[int] = tokenizer_of(name, kind).apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, **more
    )["input_ids"]
    return ids


def answers(name, messages, kind="bytes", tools=None):
    """The trained text of each assistant turn, which must follow that turn's prompt as inference
    tokenizes it."""
    examples = encode(name, messages, kind, tools=tools)
    texts, trained = [], 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = own_ids(name, kind, messages[:index], tools=tools)
        hosts = [e for e in examples if e.ids[: len(prompt)].tolist() == prompt]
        (host,) = [e for e in hosts if e.mask[len(prompt)] and not e.mask[len(prompt) - 1]]
        untrained = [*(~host.mask[len(prompt) :]).tolist(), True]
        run = host.ids[len(prompt) :][: untrained.index(True)].tolist()
        texts.append(tokenizer_of(name, kind).decode(run))
        trained += len(run)
    assert trained == sum(int(e.mask.sum()) for e in examples), "nothing else is trained"
    return texts


def chat(*texts, system=None):
    roles = ["user", "assistant"] * len(texts)
    said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return said if system is None else [{"role": "system", "content": system}, *said]


def generated(name, text):
    return ANSWERS[name].format(text.strip() if name in TRIM else text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPECIALS)
def test_every_turn_is_trained_as_inference_must_generate_it(name, kind):
    system = None if name == "gemma2" else "Be brief."
    texts = ["  Forty-two.", "Because.\n\nx ", " \t五 "]
    talk = chat("What?", texts[0], "Why?\n", texts[1], "So?", texts[2], system=system)
    assert answers(name, talk, kind) == [generated(name, text) for text in texts]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPECIALS)
def test_turns_of_a_long_conversation_are_trained_as_those_of_a_short_one(name, kind):
    texts = [f"{'  ' * (n % 2)}So {n}.\n\nx{' ' * (n % 3)}" for n in range(40)]
    talk = chat(*(text for n, said in enumerate(texts) for text in (f"Why {n}?\n", said)))
    assert answers(name, talk, kind) == [generated(name, text) for text in texts]


@pytest.mark.parametrize("name", SPECIALS)
def test_only_templates_that_change_turns_give_several_examples(name):
    examples = encode(name, chat("What?", "Forty-two.", "Why?", "Because."))
    assert len(examples) == (2 if name in BY_TURNS else 1)


BLANKS = st.sampled_from(["", " ", "  ", "x", "\n", "\t", "é", "五", "The", "<|im_end|", "a b"])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(SPECIALS)),
    kind=st.sampled_from(KINDS),
    texts=st.lists(st.lists(BLANKS, max_size=4).map("".join), min_size=4, max_size=4),
)
def test_any_conversation_is_trained_as_inference_must_generate_it(name, kind, texts):
    texts = [f"{text}q" if n % 2 == 0 else f"q{text}" for n, text in enumerate(texts)]
    texts[1], texts[3] = f" {texts[1]}", f"{texts[3]} "
    expected = [generated(name, text) for text in (texts[1], texts[3])]
    assert answers(name, chat(*texts), kind) == expected


@pytest.mark.parametrize("name", SPECIALS)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_special_tokens_in_any_text_stay_text(name, index):
    texts = ["What?", "Nothing.", "So?", "Hm."]
    tokenizer = tokenizer_of(name)
    specials = set(tokenizer.all_special_ids)
    harmless = encode(name, chat(*texts))
    texts[index] = "a".join(["", "<bos>", *SPECIALS[name], *["<think>"][: index != 1], ""])
    hostile = encode(name, chat(*texts))
    special_ids = [
        [[i for i in e.ids.tolist() if i in specials] for e in examples]
        for examples in (hostile, harmless)
    ]
    assert special_ids[0] == special_ids[1]
    assert all(e.held_special_text for e in hostile)
    assert texts[index] in tokenizer.decode(hostile[-1].ids.tolist())


REASONED = {
    "qwen3": "<think>\nHm.\n</think>\n\nForty-two.<|im_end|>",
    "qwen3_5": "Hm.\n</think>\n\nForty-two.<|im_end|>",
    "deepseek_r1": "Hm.\n</think>\n\nForty-two.<eos>",
    "gpt_oss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Forty-two.<|return|>",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REASONED)
def test_reasoning_under_its_key_is_trained_in_every_turn(name, kind):
    key = "thinking" if name == "gpt_oss" else "reasoning_content"
    turn = {"role": "assistant", "content": "Forty-two.", key: "Hm."}
    question = {"role": "user", "content": "What?"}
    trained = answers(name, [question, turn, question, turn], kind)
    assert trained == [REASONED[name]] * 2


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "deepseek_r1"])
def test_reasoning_in_the_text_is_read_by_the_template_and_ends_in_its_special_token(name):
    text = "<think>\nHm.\n</think>\n\nForty-two."
    assert answers(name, chat("What?", text, "Why?", text)) == [REASONED[name]] * 2
    (encoded,) = encode(name, chat("What?", text))
    end = tokenizer_of(name).convert_tokens_to_ids("</think>")
    assert encoded.ids.tolist().count(end) == 1
    assert not encoded.held_special_text


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {}}}
AGENT = [
    {"role": "user", "content": "Fog?"},
    {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "call00000"}]},
    {"role": "tool", "content": "fog<|im_end|></s>", "tool_call_id": "call00000"},
    {"role": "assistant", "content": "Foggy."},
]
QWEN_CALL = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALLS = {
    "qwen3": f"<think>\n\n</think>\n\n{QWEN_CALL}<|im_end|>",
    "qwen3_5": f"\n</think>\n\n{QWEN_CALL[1:]}<|im_end|>",
    "llama3": '{"name": "weather", "parameters": {"city": "Oslo"}}<|eot_id|>',
    "mistral": '[TOOL_CALLS]{"name": "weather", "arguments": {"city": "Oslo"}}call00000</s>',
    "deepseek_v3": "<｜tool▁calls▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜><eos>',
    "gpt_oss": ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
    "smollm3": '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}'
    "</tool_call><|im_end|>",
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_trained_behind_the_prompt_that_offers_the_tools(name):
    examples = encode(name, AGENT, tools=[TOOL])
    texts = [tokenizer_of(name).decode(e.ids[e.mask].tolist()) for e in examples]
    assert "".join(texts) == CALLS[name] + generated(name, "Foggy.")
    assert all("weather" in tokenizer_of(name).decode(e.ids.tolist()) for e in examples)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_blank_that_a_template_writes_before_an_answer_is_trained(system):
    template = template_of("mistral").replace(
        "{{- message.content + e", "{{- ' ' ~ message.content + e"
    )
    tokenizer = tokenizer_of("mistral")
    encoder = SampleEncoder(tokenizer, chat_template=template, loss_on="completions")
    talk = chat("What?", "Forty-two.", system=system)
    (encoded,) = encoder.encode(
        to_sample({"messages": talk}, format="messages", columns=DataColumns())
    )
    assert tokenizer.decode(encoded.ids[encoded.mask].tolist()) == " Forty-two.</s>"


def test_reasoning_before_a_call_is_trained_though_it_is_gone_once_an_answer_follows():
    thinking = [AGENT[0], {**AGENT[1], "thinking": "Hm."}, *AGENT[2:]]
    call = f"<|start|>assistant{CALLS['gpt_oss']}"
    analysis = "<|channel|>analysis<|message|>Hm.<|end|>"
    assert answers("gpt_oss", thinking, tools=[TOOL]) == [
        analysis + call, generated("gpt_oss", "Foggy.")
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["", "/no_think "])
def test_header_in_a_generation_block_is_not_trained(word):
    talk = chat("What?", "Forty-two.", "Why?", "Because.", system=f"{word}Be brief.")
    assert answers("smollm3", talk) == ["Forty-two.<|im_end|>", "Because.<|im_end|>"]


@pytest.mark.parametrize("name", SPECIALS)
def test_last_turn_alone_and_turns_of_weight_zero_are_one_example(name):
    talk = chat("What?", "Forty-two.", "Why?", "Because.")
    for trained, loss_on, text in [
        ([False, True, False, True], "last_turn", "Because."),
        ([False, True, False, False], "completions", "Forty-two."),
    ]:
        (encoded,) = encoder_of(name, loss_on=loss_on).encode(Conversation(talk, trained))
        answer = tokenizer_of(name).decode(encoded.ids[encoded.mask].tolist())
        assert answer == generated(name, text)


# Like DeepSeek V3.1: turns are written without reasoning, which the prompt opens on request.
HIDES_REASONING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role != 'assistant' %}{{ '<｜User｜>' + m.content + '<｜Assistant｜>' }}{% else %}"
    "</think>"
    "{% if m.tool_calls %}{{ m.content }}{% for c in m.tool_calls %}"
    "{{ '<｜tool▁calls▁begin｜>' + c.function.name + '<｜tool▁calls▁end｜>' }}{% endfor %}"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
NO_ARGUMENTS = [{"name": "f", "arguments": {}}]


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        ({"content": "a", "reasoning_content": "Hm."}, "Hm.</think>a<eos>"),
        ({"content": "<think>Hm.</think>a"}, "Hm.</think>a<eos>"),
        ({"content": "a"}, "</think>a<eos>"),
        (
            {"content": "<think>Hm.</think>", "tool_calls": NO_ARGUMENTS},
            "Hm.</think><｜tool▁calls▁begin｜>f<｜tool▁calls▁end｜><eos>",
        ),
    ],
    ids=["key", "content", "none", "call"],
)
def test_reasoning_that_no_turn_shows_is_trained_where_the_prompt_opens_one(turn, text):
    tokenizer = tokenizer_of("deepseek_r1")
    encoder = SampleEncoder(tokenizer, chat_template=HIDES_REASONING, loss_on="completions")
    spoken = {"role": "assistant", **turn}
    results = [{"role": "tool", "content": "r"} for _ in turn.get("tool_calls", ())]
    talk = [*chat("q"), spoken, *results, *chat("q"), spoken]

    def trained(**kwargs):
        row = {"messages": talk, "chat_template_kwargs": kwargs}
        examples = encoder.encode(to_sample(row, format="messages", columns=DataColumns()))
        return [tokenizer.decode(e.ids[e.mask].tolist()) for e in examples]

    assert trained(thinking=True) == [text, text]
    if "Hm." in text and "tool_calls" not in turn:
        with pytest.raises(RowError, match="leaves out the reasoning of message 2"):
            trained(thinking=False)
