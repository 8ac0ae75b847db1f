"""Prompts and turns of a long conversation, made from windows of it, equal those rendered whole."""

import pytest

from tests.data.encoding.test_template_turns import TEMPLATES, calls, result, says
from tests.support.encoding import conversation
from workflow.lib.data.encoding.beginnings import Beginnings, WindowError
from workflow.lib.data.encoding.chat_template import ChatTemplate
from workflow.lib.data.encoding.row_values import RowError

NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
WITHOUT_TOOLS = ("gemma2", "gemma3")  # they refuse other roles
TURNS = 40
COUNTING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ messages | length }}{% endif %}"
)


def asks(number):
    return {"role": "user", "content": f"Question {number}? {'so ' * (number % 5)}"}


def plain():
    return [m for n in range(TURNS) for m in (asks(n), says(f"Answer {n}."))]


def reasoned():
    thoughts = [{"reasoning_content": f"Thought {n}."} if n % 3 else {} for n in range(TURNS)]
    return [m for n in range(TURNS) for m in (asks(n), says(f"Answer {n}.", **thoughts[n]))]


def calling():
    """Exchanges with no call, one, or two, and a long run of calls before the last ones."""
    messages = []
    for number in range(TURNS):
        messages.append(asks(number))
        count = TURNS // 2 if number == TURNS - 6 else number % 3
        messages += [m for n in range(count) for m in (calls(f"City {n}"), result(0))]
        messages.append(says(f"Answer {number}."))
    return messages


CASES = {"plain": plain, "reasoned": reasoned, "calling": calling}


def renderer(text, *, rendered):
    template = ChatTemplate(text, special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"})

    def render(messages, is_prompt):
        rendered.append(len(messages))
        return template.render(messages, tools=None, add_generation_prompt=is_prompt)

    return template, render


def beginnings_of(render, messages, *, windowed):
    """The prompt of each turn, the text with it, and the blocks behind the prompt."""
    beginnings = Beginnings(render, messages, windowed=windowed, compared=set())
    texts = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = beginnings.prompt(index)
            text, blocks = beginnings.turn(index, message)
            texts.append((prompt, text, [block for block in blocks if block[0] >= len(prompt)]))
            beginnings.advance(index + 1)
    beginnings.check(render(messages, False)[0])
    return texts


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_windows_give_the_prompts_and_texts_of_the_whole_beginnings(name, case):
    text = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    template, render = renderer(text, rendered=[])
    messages = CASES[case]()
    messages = template.adapted(conversation(messages)).messages
    if case == "calling" and name in WITHOUT_TOOLS:
        with pytest.raises(RowError):
            beginnings_of(render, messages, windowed=True)
        return
    expected = beginnings_of(render, messages, windowed=False)
    assert beginnings_of(render, messages, windowed=True) == expected


def test_rendered_messages_grow_as_the_turns_do():
    text = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    counts = []
    for number in (100, 400):
        rendered = []
        _, render = renderer(text, rendered=rendered)
        messages = [m for n in range(number) for m in (asks(n), says(f"Answer {n}."))]
        beginnings_of(render, messages, windowed=True)
        counts.append(sum(rendered))
    assert counts[1] < 5 * counts[0]


def test_template_whose_prompt_counts_all_messages_is_noticed():
    _, render = renderer(COUNTING, rendered=[])
    with pytest.raises(WindowError):
        beginnings_of(render, plain(), windowed=True)
