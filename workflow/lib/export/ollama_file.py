"""Ollama's `Modelfile` beside a GGUF file: the chat template in Ollama's language, end tokens and
settings of generation.

Ollama's templates are Go's, so a Jinja template cannot be copied. Most of them write a beginning,
then each message between two fixed texts, then what asks for an answer. These texts are found by
rendering short conversations, and a longer one is rendered both ways: where the two differ, the
template is of another kind, and none is written.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]
Render = Callable[[Sequence[Message], bool], str]  # messages, whether an answer is asked for
MARKS = ("first_content", "second_content", "third_content", "system_content")
# What Ollama calls settings of Transformers' generation_config.json.
PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}


@dataclass(frozen=True)
class TurnTexts:
    """The fixed texts of a template; pairs stand before and after a message's content."""

    beginning: str
    """Where no system message is given."""
    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    asking: str
    """What asks for an answer."""

    def rendered(self, messages: Sequence[Message]) -> str:
        begins_by_system = bool(messages) and messages[0]["role"] == "system"
        text = "" if begins_by_system else self.beginning
        for message in messages:
            before, after = getattr(self, message["role"])
            text += before + message["content"] + after
        return text + self.asking

    def go_template(self) -> str:
        """Return the same in Go's template language, as Ollama calls it."""

        def turn(texts: tuple[str, str], content: str) -> str:
            return f"{_literal(texts[0])}{content}{_literal(texts[1])}"

        return (
            f"{{{{ if .System }}}}{turn(self.system, '{{ .System }}')}"
            f"{f'{{{{ else }}}}{_literal(self.beginning)}' if self.beginning else ''}{{{{ end }}}}"
            "{{ range .Messages }}"
            f'{{{{ if eq .Role "user" }}}}{turn(self.user, "{{ .Content }}")}'
            f'{{{{ else if eq .Role "assistant" }}}}{turn(self.assistant, "{{ .Content }}")}'
            f"{{{{ end }}}}{{{{ end }}}}{_literal(self.asking)}"
        )


def _literal(text: str) -> str:
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def turn_texts(render: Render) -> TurnTexts | None:
    """Return the fixed texts of a template; None if it is of another kind."""
    one, two, three, system = MARKS
    user = {"role": "user", "content": one}
    answer = {"role": "assistant", "content": two}
    again = {"role": "user", "content": three}
    first, answered = render([user], False), render([user, answer], False)
    asked_again = render([user, answer, again], False)
    texts_user = _around(asked_again.removeprefix(answered), three)
    texts_assistant = _around(answered.removeprefix(first), two)
    if texts_user is None or texts_assistant is None:
        return None
    turn = texts_user[0] + one + texts_user[1]
    with_system = render([{"role": "system", "content": system}, user], False)
    texts_system = _around(with_system.removesuffix(turn), system)
    if texts_system is None or not first.endswith(turn):
        return None
    found = TurnTexts(
        beginning=first.removesuffix(turn),
        system=texts_system,
        user=texts_user,
        assistant=texts_assistant,
        asking=render([user], True).removeprefix(first),
    )
    return found if _agrees(found, render) else None


def _around(text: str, content: str) -> tuple[str, str] | None:
    """Return what stands before and after the only occurrence of `content`."""
    before, mark, after = text.partition(content)
    return None if not mark or any(other in before + after for other in MARKS) else (before, after)


def _agrees(found: TurnTexts, render: Render) -> bool:
    """Tell whether the texts write longer conversations as the template does."""
    turns = [
        ("user", "a"),
        ("assistant", "b c"),
        ("user", "d\ne"),
        ("assistant", "f"),
        ("user", "g"),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    with_system = [{"role": "system", "content": "h"}, *messages]
    return all(found.rendered(some) == render(some, True) for some in (messages, with_system))


def modelfile(
    files: Sequence[str],
    texts: TurnTexts | None,
    *,
    ends: Sequence[str],
    generation: dict[str, Any],
) -> str:
    """Return the `Modelfile` of GGUF files beside it. files: the model, and the adapter if it has
    one; ends: tokens that end an answer; generation: Transformers' settings, which count if they
    sample."""
    lines = [f"{word} ./{file}" for word, file in zip(("FROM", "ADAPTER"), files, strict=False)]
    if texts is None:
        lines.append(
            "# The chat template could not be written in Ollama's language: Ollama would guess. "
            "Serve the file with llama-server --jinja."
        )
    else:
        lines.append(f'TEMPLATE """{texts.go_template()}"""')
    if generation.get("do_sample"):
        lines += [
            f"PARAMETER {theirs} {generation[ours]}"
            for ours, theirs in PARAMETERS.items()
            if generation.get(ours) is not None
        ]
    else:
        lines.append("PARAMETER temperature 0")
    lines += [f"PARAMETER stop {json.dumps(end, ensure_ascii=False)}" for end in ends]
    return "\n".join(lines) + "\n"
