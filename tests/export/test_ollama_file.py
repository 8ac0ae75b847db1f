"""Ollama's Modelfile: the fixed texts of a chat template, found by rendering."""

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workflow.lib.export.ollama_file import Message, Render, TurnTexts, modelfile, turn_texts

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "<|begin|>{% for m in messages %}<|{{ m['role'] }}|>\n\n{{ m['content'] | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}"
)
# The second turn differs from the first: no fixed texts.
COUNTING = (
    "{% for m in messages %}[{{ loop.index }} {{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[answer]{% endif %}"
)
SYSTEM_WITHIN = (
    "{% for m in messages if m['role'] != 'system' %}{{ m['role'] }}: "
    "{% if messages[0]['role'] == 'system' and loop.first %}{{ messages[0]['content'] }} "
    "{% endif %}"
    "{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def renderer(template: str) -> Render:
    compiled = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        template
    )

    def render(messages: Sequence[Message], asking: bool) -> str:
        return compiled.render(messages=messages, add_generation_prompt=asking)

    return render


def found(template: str) -> TurnTexts:
    texts = turn_texts(renderer(template))
    assert texts is not None
    return texts


def test_texts_of_a_template_are_found() -> None:
    assert found(CHATML) == TurnTexts(
        beginning="<|im_start|>system\nBe kind.<|im_end|>\n",
        system=("<|im_start|>system\n", "<|im_end|>\n"),
        user=("<|im_start|>user\n", "<|im_end|>\n"),
        assistant=("<|im_start|>assistant\n", "<|im_end|>\n"),
        asking="<|im_start|>assistant\n",
    )


@pytest.mark.parametrize("template", [CHATML, HEADERS])
def test_texts_write_what_the_template_writes(template: str) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    for some in (messages, messages[1:], messages[3:]):
        assert found(template).rendered(some) == renderer(template)(some, True)


@pytest.mark.parametrize("template", [COUNTING, SYSTEM_WITHIN])
def test_template_of_another_kind_has_no_texts(template: str) -> None:
    assert turn_texts(renderer(template)) is None


def go_rendered(template: str, *, system: str, messages: list[Message]) -> str:
    """Render what `go_template` writes, and no other Go template."""
    texts = iter(re.findall(r'\{\{ ("(?:[^"\\]|\\.)*") \}\}|(\{\{.*?\}\})', template))
    parts = [json.loads(literal) if literal else action for literal, action in texts]
    assert parts[0] == "{{ if .System }}"
    otherwise, end = parts.index("{{ else }}"), parts.index("{{ end }}")
    head = parts[1:otherwise] if system else parts[otherwise + 1 : end]
    user = parts.index('{{ if eq .Role "user" }}')
    assistant = parts.index('{{ else if eq .Role "assistant" }}')
    last = parts.index("{{ end }}", assistant)
    turns = {"user": parts[user + 1 : assistant], "assistant": parts[assistant + 1 : last]}
    text = "".join(head).replace("{{ .System }}", system)
    for message in messages:
        text += "".join(turns[message["role"]]).replace("{{ .Content }}", message["content"])
    return text + "".join(parts[last + 2 :])


@pytest.mark.parametrize("template", [CHATML, HEADERS])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_go_template_writes_what_the_template_writes(template: str, system: str) -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    first = [{"role": "system", "content": system}] if system else []
    expected = renderer(template)([*first, *messages], True)
    go = found(template).go_template()
    assert go_rendered(go, system=system, messages=messages) == expected


@pytest.mark.parametrize(
    ("generation", "lines"),
    [
        ({"do_sample": False, "temperature": 0.7}, ["PARAMETER temperature 0"]),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
            ["PARAMETER temperature 0.7", "PARAMETER top_p 0.9", "PARAMETER repeat_penalty 1.1"],
        ),
    ],
)
def test_modelfile_has_ends_and_settings_of_generation(
    generation: dict[str, Any], lines: list[str]
) -> None:
    text = modelfile(["x.gguf"], found(CHATML), ends=["<|im_end|>"], generation=generation)
    written = text.splitlines()
    assert written[0] == "FROM ./x.gguf"
    assert written[2:] == [*lines, 'PARAMETER stop "<|im_end|>"']


def test_modelfile_without_a_template_says_so() -> None:
    text = modelfile(["x.gguf"], None, ends=[], generation={})
    assert "TEMPLATE" not in text
    assert "llama-server --jinja" in text


def test_modelfile_puts_an_adapter_over_its_base() -> None:
    text = modelfile(["base.gguf", "adapter.gguf"], None, ends=[], generation={})
    assert text.splitlines()[:2] == ["FROM ./base.gguf", "ADAPTER ./adapter.gguf"]
