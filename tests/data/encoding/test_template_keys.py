"""Arguments of a template are defaults of the template that is exported."""

import json
from typing import Any

import pytest

from workflow.lib.data.encoding.template_keys import keys_in_template, with_arguments

TEMPLATE = (
    "{% macro line(m) %}{{ m.role }}:{{ m['content'] }} {{ mode }}{% endmacro %}"
    "{% for m in messages %}{{ line(m) }}{% endfor %}{{ [mode, thoughts, depth] | tojson }}"
)
ARGUMENTS = {
    "mode": 'sa"y\\n ñ {{ x }} \U0001f642',
    "thoughts": False,
    "depth": [1, None, {"a": 2.5}],
}


def rendered(tokenizer: Any, template: str, **arguments: Any) -> str:
    messages = [{"role": "user", "content": "q"}]
    return str(
        tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **arguments)
    )


def test_template_with_arguments_renders_as_if_they_were_given(tokenizer: Any) -> None:
    text = rendered(tokenizer, with_arguments(TEMPLATE, ARGUMENTS))
    assert text == rendered(tokenizer, TEMPLATE, **ARGUMENTS)
    assert json.dumps(ARGUMENTS["depth"]) in text


def test_argument_that_is_given_comes_before_the_template_s(tokenizer: Any) -> None:
    text = rendered(tokenizer, with_arguments(TEMPLATE, ARGUMENTS), mode="other")
    assert text == rendered(tokenizer, TEMPLATE, **(ARGUMENTS | {"mode": "other"}))


def test_template_without_arguments_stays_as_it_is() -> None:
    assert with_arguments(TEMPLATE, {}) == TEMPLATE


@pytest.mark.parametrize("key", ["role", "content"])
def test_keys_that_a_template_looks_up_are_found(key: str) -> None:
    assert key in keys_in_template(TEMPLATE)
