"""Templates of more model families: every text is in a document, and a turn is trained behind the
prompt that stock Transformers renders, up to the turn's end; or the row is dropped with a reason.
"""

import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.encoding import conversation
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.sample_encoder import SampleEncoder

TEMPLATES = Path(__file__).with_name("templates")
GLM = ["<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>"]
CHATML = ["<|im_end|>", "<|im_start|>"]
# Special tokens by template, those first that may end a turn.
SPECIALS = {
    "apertus": [f"<|{name}|>" for name in [
        "assistant_end", "tools_suffix", "assistant_start", "tools_prefix", "user_start",
        "user_end", "system_start", "system_end", "developer_start", "developer_end"]],
    "command": [f"<|{name}|>" for name in [
        "END_OF_TURN_TOKEN", "START_OF_TURN_TOKEN", "CHATBOT_TOKEN", "USER_TOKEN", "SYSTEM_TOKEN",
        "START_THINKING", "END_THINKING", "START_TEXT", "END_TEXT", "START_ACTION", "END_ACTION"]],
    "exaone4": ["[|endofturn|]", "[|system|]", "[|user|]", "[|assistant|]", "[|tool|]"],
    "falcon_h1": ["<eos>", *CHATML],
    "gemma4": ["<turn|>", "<|tool_response>", "<|turn>", "<tool_response|>", "<|tool_call>",
               "<tool_call|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>"],
    "glm4_5": GLM,
    "glm4_7": GLM,
    "granite4": ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"],
    "hunyuan": [f"<|hy_{name}|>" for name in ["eos", "begin", "place", "User", "Assistant"]],
    "kimi_k2": [f"<|{name}|>" for name in [
        "im_end", "im_user", "im_assistant", "im_system", "im_middle", "tool_calls_section_begin",
        "tool_calls_section_end", "tool_call_begin", "tool_call_end", "tool_call_argument_begin"]],
    "lfm2": [*CHATML, "<|tool_call_start|>", "<|tool_call_end|>"],
    "llama4": [f"<|{name}|>" for name in [
        "eot", "header_start", "header_end", "python_start", "python_end"]],
    "minimax_m2": ["[e~[", "]~b]", "]~!b["],
    "mistral_small3": ["</s>", *(f"[{slash}{name}]" for slash in ("", "/") for name in [
        "INST", "SYSTEM_PROMPT", "AVAILABLE_TOOLS", "TOOL_RESULTS"]), "[TOOL_CALLS]", "[CALL_ID]",
        "[ARGS]", "[TOOL_CONTENT]"],
    "nemotron3": CHATML,
    "phi3": ["<|end|>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>"],
    "seed_oss": ["<seed:eos>", "<seed:bos>"],
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Tell the "weather".',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
QUESTION = {"role": "user", "content": "Fog here?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


def calls(*cities, **more):
    listed = [
        {
            "id": f"call0000{number}",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": city, "days": 3}},
        }
        for number, city in enumerate(cities)
    ]
    return says("", tool_calls=listed, **more)


def result(number):
    text = f"fog {number}"
    return {"role": "tool", "name": "weather", "tool_call_id": f"call0000{number}", "content": text}


CASES: dict[str, list[dict[str, Any]]] = {
    "plain": [QUESTION, says("Foggy.")],
    "system": [SYSTEM, QUESTION, says("Foggy.")],
    "turns": [QUESTION, says("Foggy."), {"role": "user", "content": "And now?"}, says("Sunny.")],
    "assistant_first": [says("Welcome."), QUESTION, says("Foggy.")],
    "reasoning": [
        QUESTION,
        says("Foggy.", reasoning_content="I look out."),
        {"role": "user", "content": "And now?"},
        says("Sunny.", reasoning_content="I look again."),
    ],
    "call": [QUESTION, calls("Oslo"), result(0), says("Foggy.")],
    "parallel": [SYSTEM, QUESTION, calls("Oslo", "Rome"), result(0), result(1), says("Foggy.")],
}
UNREASONED = "text not rendered: .* reasoning of message"
NO_TOOLS = "text not rendered: .* the tool 'weather'"
# Conversations that a template cannot write, and why.
REFUSED = {
    **{(name, "reasoning"): UNREASONED for name in [
        "apertus", "falcon_h1", "gemma4", "granite4", "kimi_k2", "llama4", "mistral_small3",
        "phi3"]},
    ("exaone4", "reasoning"): "the prompt of message 2 closes the reasoning",
    ("mistral_small3", "assistant_first"): "refused by the chat template: roles must alternate",
    ("phi3", "call"): NO_TOOLS,
    ("phi3", "parallel"): NO_TOOLS,
}  # fmt: skip
# Templates whose prompt opens or closes a reasoning that turns show otherwise: what stands between.
OPENED = {
    "command": "<|END_THINKING|>",
    "gemma4": "",
    "glm4_7": "</think>",
    "minimax_m2": "\n</think>\n\n",
    "nemotron3": "</think>",
}


@cache
def tokenizer_of(name):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    specials = dict.fromkeys(["<bos>", "<eos>", *SPECIALS[name]])
    core.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    eos = "<eos>" if "<eos>" in SPECIALS[name] else SPECIALS[name][0]
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token=eos)


def template_of(name):
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def encoder_of(name):
    return SampleEncoder(tokenizer_of(name), chat_template=template_of(name), loss_on="completions")


def own_ids(name, messages, *, prompt, tools):
    """The ids that stock Transformers makes of a conversation."""
    written: Any = tokenizer_of(name).apply_chat_template(
        messages, chat_template=template_of(name), add_generation_prompt=prompt, tools=tools
    )
    ids: list[int] = written["input_ids"]
    return ids


def decoded(name, ids):
    return str(tokenizer_of(name).decode([int(number) for number in ids]))


def runs(encoded):
    """Where the trained runs of an example begin and end."""
    edges = [0, *(encoded.mask[1:] != encoded.mask[:-1]).nonzero()[0] + 1, len(encoded.ids)]
    return [(int(a), int(b)) for a, b in pairwise(edges) if encoded.mask[a]]


def values(message):
    arguments = [c["function"]["arguments"]["city"] for c in message.get("tool_calls", ())]
    return [message["content"], *arguments]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SPECIALS)
def test_each_turn_is_trained_behind_the_prompt_of_inference_up_to_its_end(name, case):
    messages = CASES[case]
    tools = [TOOL] if case in ("call", "parallel") else None
    sample = conversation(messages, tools=tools)
    if reason := REFUSED.get((name, case)):
        with pytest.raises(RowError, match=reason):
            encoder_of(name).encode(sample)
        return
    examples = encoder_of(name).encode(sample)
    turns = [n for n, m in enumerate(messages) if m["role"] == "assistant" and n > 0]
    assert sum(len(runs(example)) for example in examples) == len(turns)
    for index in turns:
        prompt = own_ids(name, messages[:index], prompt=True, tools=tools)
        hosts = [e for e in examples if e.ids[: len(prompt)].tolist() == prompt]
        ((host, stop),) = [
            (e, stop) for e in hosts for start, stop in runs(e) if start == len(prompt)
        ]
        written = own_ids(name, messages[: index + 1], prompt=False, tools=tools)
        trained = host.ids[len(prompt) : stop].tolist()
        # an open turn ends with the token of the next role, which these templates do not write
        ended = trained if trained[-1] in written[-3:] else trained[:-1]
        if written[: len(prompt)] == prompt:
            assert written[: len(prompt) + len(ended)] == prompt + ended
        elif name in OPENED:
            assert decoded(name, trained).startswith(OPENED[name])
        assert int(host.ids[stop - 1]) in encoder_of(name).end_of_turn_ids()
        shown = decoded(name, host.ids[:stop])
        assert all(text in shown for m in messages[:index] for text in values(m))
        said = decoded(name, trained)
        assert all(text in said for text in values(messages[index]))
        assert messages[index].get("reasoning_content", "") in said


def test_open_turn_ends_with_the_token_of_the_next_role_and_of_results_behind_calls():
    (encoded,) = encoder_of("glm4_5").encode(conversation(CASES["call"], tools=[TOOL]))
    ends = [decoded("glm4_5", encoded.ids[stop - 1 : stop]) for _, stop in runs(encoded)]
    assert ends == ["<|observation|>", "<|user|>"]
    ends = decoded("glm4_5", encoder_of("glm4_5").end_of_turn_ids())
    assert {"<|user|>", "<|observation|>"} == set(re.findall(r"<\|\w+\|>", ends))


@pytest.mark.parametrize(("name", "closing"), OPENED.items())
def test_reasoning_that_the_prompt_opens_is_closed_once(name, closing):
    (encoded,) = encoder_of(name).encode(conversation(CASES["plain"]))
    said = decoded(name, encoded.ids[encoded.mask])
    begin = "<|START_TEXT|>" if name == "command" else ""
    assert said.startswith(f"{closing}{begin}Foggy.")
    assert said.count("</think>") == closing.count("</think>")


@pytest.mark.parametrize(
    "text", ["<think>I look out.</think>Foggy.", "I look out.\n</think>Foggy."]
)
def test_reasoning_within_the_text_follows_the_prompt_that_opens_it(text):
    (encoded,) = encoder_of("nemotron3").encode(conversation([QUESTION, says(text)]))
    shown, said = (decoded("nemotron3", ids) for ids in (encoded.ids, encoded.ids[encoded.mask]))
    assert said == text.removeprefix("<think>") + "<|im_end|>"
    assert shown.rstrip("\n").endswith(f"<|im_start|>assistant\n<think>\n{said}")
