"""Chat templates run in a sandbox, stop at bounds, and are refused where they cannot work."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.support.encoding import CHAT, PLAIN_TEMPLATE, encode
from tests.support.tiny import CHAT_TEMPLATE
from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.chat_template import (
    keys_in_template,
    with_arguments,
    without_generation_tags,
)
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.system import limits
from workflow.lib.system.errors import UserError


def test_template_without_the_prompt_in_front_of_its_answer_is_refused(tokenizer):
    template = PLAIN_TEMPLATE.replace("{{ '<|assistant|>' }}", "Now speak:")
    with pytest.raises(UserError, match=r"turn not found: .* message 2 .*add_generation_prompt"):
        encode(tokenizer, CHAT, template)


def test_row_that_the_template_refuses_carries_its_message(tokenizer):
    refusal = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    )
    with pytest.raises(RowError, match="refused by the chat template: no system here"):
        encode(tokenizer, CHAT, refusal + CHAT_TEMPLATE)


def test_template_whose_turns_neither_end_nor_begin_with_a_token_is_refused_at_once(tokenizer):
    endless = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    with pytest.raises(UserError, match=r"turn without an end: .*data\.chat_template"):
        encode(tokenizer, CHAT, endless + prompt)


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages.none.none }}", "no answer in it"])
def test_template_that_cannot_render_an_answer_is_refused_at_once(tokenizer, template):
    with pytest.raises(UserError, match=r"a question and an answer cannot be rendered"):
        SampleEncoder(tokenizer, chat_template=template, loss_on="completions")


def test_template_that_writes_the_date_gives_the_same_tokens_every_day(tokenizer):
    dated = CHAT_TEMPLATE.replace("{{ bos_token }}", "{{ bos_token + strftime_now('%d %b %Y') }}")
    text = tokenizer.decode(encode(tokenizer, CHAT, dated).ids.tolist())
    assert text.startswith("<|begin|>26 Jul 2024<|system|>")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(10 ** 9) | list }}",
        "{{ 'x' | truncate(-1) }}",  # an assertion of Jinja
    ],
)
def test_template_runs_in_a_sandbox(tokenizer, attack):
    with pytest.raises(UserError, match="refused by the chat template"):
        encode(tokenizer, CHAT, attack + CHAT_TEMPLATE)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Only for conversations of five messages, which the first check of a template has not.
LATE = "{% if messages | length == 5 %}" + LOOPS + "{% endif %}"


@pytest.mark.parametrize("bomb", [LOOPS, LATE, "{{ 10 ** (10 ** 9) }}"])
def test_template_that_loops_without_end_is_stopped(tokenizer, bomb, monkeypatch):
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
        "{{ messages[0].content.replace('', 'x' * 300000000) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% "
        "endfor %}{{ ns.x }}",
    ],
)
def test_template_of_a_hundred_gigabytes_of_text_is_stopped(tokenizer, bomb):
    refusal = r"data\.chat_template, .* takes more than 1,024 MiB of memory for one conversation"
    with pytest.raises(UserError, match=refusal):
        encode(tokenizer, CHAT, bomb + CHAT_TEMPLATE)


def test_template_that_writes_more_than_a_tokenizer_holds_drops_the_row(tokenizer):
    much = "{% if messages | length == 5 %}{{ 'x' * 20000000 }}{% endif %}"
    with pytest.raises(
        RowError, match=r"too large: the chat template writes 2\d{7} characters, mor"
    ):
        encode(tokenizer, CHAT, much + CHAT_TEMPLATE)


def test_message_of_a_template_cannot_speak_to_the_terminal(tokenizer):
    refusal = (
        "{% if messages[0].role == 'system' %}{{ raise_exception(messages[1].content) }}{% endif %}"
    )
    hostile = [CHAT[0], {"role": "user", "content": "\x1b[2J\u202e"}, CHAT[2]]
    with pytest.raises(RowError) as caught:
        encode(tokenizer, hostile, refusal + CHAT_TEMPLATE)
    assert str(caught.value) == r"refused by the chat template: \x1b[2J\u202e"


def test_template_without_generation_tags_writes_the_same():
    tagged = (
        "{% for m in messages %}[{{ m['role'] }}]\n"
        "{%- generation -%}\n  {{ m['content'] }}\n{%- endgeneration %} \n{% endfor %}"
    )
    plain = without_generation_tags(tagged)
    assert "generation" not in plain
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    texts = [
        render_jinja_template(conversations=[messages], chat_template=text)[0]
        for text in (tagged, plain)
    ]
    assert texts[0] == texts[1]
    assert without_generation_tags("{{ generation }}") == "{{ generation }}"


def test_argument_that_the_template_does_not_read_is_refused_once_with_the_nearest_name(tokenizer):
    switch = "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    refusal = (
        r"data\.template_kwargs\.enable_thinkin = true: the chat template reads no argument "
        r"'enable_thinkin' \(did you mean enable_thinking\?\); it reads enable_thinking"
    )
    with pytest.raises(UserError, match=refusal):
        encode(tokenizer, CHAT, switch + PLAIN_TEMPLATE, template_kwargs={"enable_thinkin": True})
    row = Conversation(CHAT[1:3], [False, True], template_kwargs={"enable_thinking": False})
    with pytest.raises(RowError, match=r"unknown template argument: .* reads none"):
        encode(tokenizer, row, PLAIN_TEMPLATE)
    allowed = encode(tokenizer, row, PLAIN_TEMPLATE, allow_unrendered=["template_kwargs"])
    assert allowed.unrendered == {"template_kwargs"}


DOCUMENTS = [{"title": "t", "text": "a<|end|>b"}]


@pytest.mark.parametrize("note", [DOCUMENTS, "a<|end|>b"])
def test_arguments_of_a_row_reach_the_template_and_their_special_tokens_stay_text(tokenizer, note):
    name = "documents" if note is DOCUMENTS else "note"
    template = f"{{{{ ({name} or 0) | tojson }}}}" + PLAIN_TEMPLATE
    row = Conversation(CHAT[1:3], [False, True], template_kwargs={name: note})
    encoded = encode(tokenizer, row, template)
    assert "a<|end|>b" in tokenizer.decode(encoded.ids.tolist())
    assert encoded.ids.tolist().count(tokenizer.eos_token_id) == 2
    assert encoded.held_special_text


TEMPLATE = (
    "{% macro line(m) %}{{ m.role }}:{{ m['content'] }} {{ mode }}{% endmacro %}"
    "{% for m in messages %}{{ line(m) }}{% endfor %}{{ [mode, thoughts, depth] | tojson }}"
)
ARGUMENTS = {
    "mode": 'sa"y\\n ñ {{ x }} \U0001f642',
    "thoughts": False,
    "depth": [1, None, {"a": 2.5}],
}


def rendered(tokenizer, template, **arguments):
    messages = [{"role": "user", "content": "q"}]
    return str(
        tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **arguments)
    )


@pytest.mark.parametrize("given", [{}, {"mode": "other"}])
def test_template_with_arguments_renders_as_if_they_were_given_or_others(tokenizer, given):
    text = rendered(tokenizer, with_arguments(TEMPLATE, ARGUMENTS), **given)
    assert text == rendered(tokenizer, TEMPLATE, **(ARGUMENTS | given))
    assert json.dumps(ARGUMENTS["depth"]) in text


@pytest.mark.parametrize("key", ["role", "content"])
def test_keys_that_a_template_looks_up_are_found(key):
    assert key in keys_in_template(TEMPLATE)
