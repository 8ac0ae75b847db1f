"""Conversations to text through a chat template, and the places of trained turns in it.

A turn begins where the prompt of inference ends. It ends with its last special token, or with the
first token of the next role. A turn that later text shows otherwise (templates leave reasoning out
of earlier turns) has a text of its own."""

from collections.abc import Collection, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

from workflow.lib.data.encoding.beginnings import Beginnings, WindowError
from workflow.lib.data.encoding.chat_messages import (
    BEGIN_OF_REASONING,
    END_OF_REASONING,
    Conversation,
)
from workflow.lib.data.encoding.chat_template import ChatTemplate, Spans
from workflow.lib.data.encoding.message_forms import Message
from workflow.lib.data.encoding.probe_conversations import NEXT_TURNS, PROBE
from workflow.lib.data.encoding.row_values import RowError, map_texts, texts_of
from workflow.lib.data.encoding.safe_encoder import SafeEncoder
from workflow.lib.data.encoding.template_texts import (
    RenderedTexts,
    Turn,
    TurnText,
    without_reasoning,
)
from workflow.lib.data.encoding.turn_openings import OPENED, ReasoningClosedError, TurnOpenings
from workflow.lib.settings.data import TextKind

MANY_TURNS = 16  # trained turns; those of fewer are rendered as fast without windows
LossOn = Literal["completions", "last_turn", "all"]


@dataclass(frozen=True)
class Rendered:
    """The texts of a conversation. guarded: spelled special tokens are others here (held);
    unrendered: allowed kinds of text that the template leaves out."""

    texts: list[TurnText]
    guarded: bool
    special_texts: frozenset[str] = frozenset()
    unrendered: frozenset[TextKind] = frozenset()


class TurnRenderer:
    """Renders conversations by one template, and finds the turns that `loss_on` trains. allowed:
    kinds of text that may be left out. reads_tokens: special tokens in data are tokens."""

    def __init__(
        self,
        template: ChatTemplate,
        *,
        encoder: SafeEncoder,
        loss_on: LossOn,
        allowed: Collection[TextKind] = (),
        reads_tokens: bool = False,
    ) -> None:
        self.template = template
        self._encoder = encoder
        self._loss_on = loss_on
        self._allowed = frozenset(allowed)
        self._reads_tokens = reads_tokens
        self._openings = TurnOpenings(template, encoder)
        self._texts = RenderedTexts(self._turn_by_turn, allowed=allowed)
        self._next_tokens: dict[bool, str] = {}
        self._compared: set[Hashable] = set()

    def render(self, conversation: Conversation) -> Rendered:
        """Return the conversation's texts. Raises `RowError` if the template fails or leaves out a
        text that it must not, or if no turn can be trained."""
        ignored = self._ignored_arguments(conversation)
        special_texts = self._specials_in(conversation)
        guarded = False
        if special_texts and not self._reads_tokens:
            plain, conversation = conversation, self._guard(conversation)
            guarded = conversation != plain
        texts = self._turn_by_turn(conversation)
        lost = self._texts.check(conversation, texts)
        if conversation.prefills and self._loss_on != "all":
            texts = [self._without_prefills(text, conversation.prefills, guarded) for text in texts]
        if not (guarded or self._reads_tokens):
            special_texts = frozenset()  # the template's own, such as the end of the reasoning
        return Rendered(texts, guarded, special_texts, frozenset(lost | ignored))

    def whole(self, conversation: Conversation) -> str:
        """Return the text of the whole conversation."""
        return self._render(conversation)[0]

    def checked(self, conversation: Conversation) -> list[TurnText]:
        """Return the texts of a conversation without special tokens; raises as `render` does."""
        texts = self._turn_by_turn(conversation)
        self._texts.check(conversation, texts)
        return texts

    def _ignored_arguments(self, conversation: Conversation) -> set[TextKind]:
        fault = self.template.unknown_argument(conversation.template_kwargs)
        if fault is None:
            return set()
        if "template_kwargs" in self._allowed:
            return {"template_kwargs"}
        raise RowError(
            f"unknown template argument: {fault}; give a template that does in data.chat_template, "
            "or allow its loss: data.allow_unrendered: [template_kwargs]"
        )

    def _render(self, conversation: Conversation, stop: int | None = None) -> tuple[str, Spans]:
        messages = self.template.adapted(conversation).messages[:stop]
        return self._rendered(conversation, messages)

    def _rendered(
        self, conversation: Conversation, messages: list[Message], prompt: bool = False
    ) -> tuple[str, Spans]:
        """Render messages in the template's form, with the conversation's tools and arguments."""
        return self.template.render(
            messages,
            tools=conversation.tools,
            template_kwargs=conversation.template_kwargs,
            add_generation_prompt=prompt,
        )

    def _chosen(self, conversation: Conversation) -> list[int]:
        """Return the numbers of the trained turns; the first message has no prompt."""
        turns = [n for n, is_trained in enumerate(conversation.trained) if is_trained and n > 0]
        if not turns:
            raise RowError(
                "no trained token: the conversation begins with its only trained turn, which has "
                "no prompt"
            )
        if self._loss_on != "last_turn":
            return turns
        roles = [message["role"] for message in conversation.messages]
        if "assistant" in roles[turns[-1] + 1 :]:
            raise RowError(
                "no trained token: data.loss_on = last_turn trains the last assistant turn alone, "
                "and that is marked not to be trained"
            )
        return turns[-1:]

    def _turn_by_turn(self, conversation: Conversation) -> list[TurnText]:
        """Return texts in which each turn follows the prompt of inference. Turns share a text as
        long as it begins as inference has it: first the whole, then the longest others."""
        conversation = self.template.adapted(conversation)
        full_text, blocks = self._rendered(conversation, conversation.messages)
        if self._loss_on == "all":
            return [self._all_of(full_text, conversation)]
        chosen = self._chosen(conversation)
        if len(chosen) >= MANY_TURNS:
            with suppress(WindowError):
                return self._texts_of(chosen, conversation, (full_text, blocks), windowed=True)
        return self._texts_of(chosen, conversation, (full_text, blocks), windowed=False)

    def _texts_of(
        self,
        chosen: list[int],
        conversation: Conversation,
        rendered: tuple[str, Spans],
        *,
        windowed: bool,
    ) -> list[TurnText]:
        """Return the texts of chosen turns. rendered: the whole conversation; windowed: texts are
        made from windows, which may raise `WindowError`."""
        number, (full_text, _) = len(conversation.messages), rendered
        beginnings = Beginnings(
            partial(self._rendered, conversation),
            conversation.messages,
            windowed=windowed,
            compared=self._compared,
        )
        turns: list[tuple[str, Turn]] = []
        for index in chosen:
            is_last = index + 1 == number
            text, turn = self._turn(conversation, index, beginnings, rendered if is_last else None)
            if not is_last:
                beginnings.advance(index + 1)
            elif text.startswith(full_text):
                full_text = text  # an open turn has got its end
            shared = full_text.startswith(text[: turn.stop])
            turns.append((full_text if shared else text, turn))
        beginnings.check(rendered[0])
        texts = [TurnText(full_text, number)]
        for text, turn in reversed(turns):
            beginning = text[: turn.stop]
            host = next((other for other in texts if other.text.startswith(beginning)), None)
            if host is None:
                texts.append(host := TurnText(text, turn.index + 1))
            host.turns.insert(0, turn)
        return [text for text in reversed(texts) if text.turns]

    def _all_of(self, full_text: str, conversation: Conversation) -> TurnText:
        last = conversation.messages[-1]
        if last["role"] == "assistant" and self._end_of_turn(full_text, 0) is None:
            full_text += self._next_token(last, full_text, 0)
        turns = [n for n, is_trained in enumerate(conversation.trained) if is_trained]
        for index in turns:
            self._check_reasoning_begins(conversation, index, "", full_text)
        return TurnText(
            full_text, len(conversation.messages), [Turn(n, 0, len(full_text)) for n in turns]
        )

    def _turn(
        self,
        conversation: Conversation,
        index: int,
        beginnings: Beginnings,
        rendered: tuple[str, Spans] | None,
    ) -> tuple[str, Turn]:
        """Return a text that begins with the turn's prompt and continues with the turn. rendered:
        the conversation up to this turn and its blocks, if known."""
        message = conversation.messages[index]
        prompt = beginnings.prompt(index)
        text, blocks = rendered or beginnings.turn(index, message)
        if not text.startswith(prompt):
            try:
                answer = self._openings.answer(prompt, text, conversation, index)
            except ReasoningClosedError:
                if "reasoning" not in self._allowed:
                    raise
                messages = [*conversation.messages[:index], without_reasoning(message)]
                changed = replace(conversation, messages=messages)
                return self._turn(changed, index, beginnings, None)
            text = prompt + answer
            blocks = [(len(prompt), len(text))] if blocks else []
        text, turn = self._ended(text, blocks, start=len(prompt), message=message, index=index)
        self._check_reasoning_begins(conversation, index, prompt, text[turn.start : turn.stop])
        return text, turn

    def _check_reasoning_begins(
        self, conversation: Conversation, index: int, prompt: str, written: str
    ) -> None:
        """Raise `RowError` if a turn ends a reasoning that neither it nor its prompt begins."""
        before, end, _ = conversation.messages[index]["content"].partition(END_OF_REASONING)
        if not end or BEGIN_OF_REASONING in before or OPENED.search(prompt):
            return
        ends = [written.find(tag) for tag in {end, self._encoder.guard(end)} if tag in written]
        if ends and BEGIN_OF_REASONING not in written[: min(ends)]:
            raise RowError(
                f"reasoning without a beginning: message {index + 1} has {end} and no "
                f"{BEGIN_OF_REASONING} before it, and its prompt opens none; write "
                f"{BEGIN_OF_REASONING} at its beginning, or give a template whose prompt opens the "
                "reasoning in data.chat_template"
            )

    def _ended(
        self, text: str, blocks: Spans, *, start: int, message: Message, index: int
    ) -> tuple[str, Turn]:
        """Return the text and the turn after its prompt `text[:start]`, up to the turn's end.
        Raises `RowError` if the turn is empty, or a block leaves a part of it out."""
        text = text.removesuffix(self._trailer)
        stop = self._end_of_turn(text, start)
        written = len(text) if stop is None else stop
        if stop is None:
            text += self._next_token(message, text, start)
            stop = len(text.rstrip())
        if not text[start:written].strip():
            raise RowError(f"no trained token: the chat template writes message {index + 1} empty")
        edges = [start, *(min(max(e, start), stop) for span in blocks for e in span), stop]
        *gaps, last = [text[a:b].strip() for a, b in zip(edges[::2], edges[1::2], strict=True)]
        if blocks and (any(gaps) or last != self._encoder.special_text(last, 0)):
            raise RowError(
                f"turn not trained: the chat template writes a part of message {index + 1} outside "
                "of its {% generation %} blocks; give one that writes the whole turn inside in "
                "data.chat_template"
            )
        if self._reads_tokens:
            stop = self._encoder.without_repeated_end(text, stop)
        return text, Turn(index, start, stop)

    def _end_of_turn(self, text: str, start: int) -> int | None:
        return None if self._is_open_ended else self._end_of_text(text, start)

    def _end_of_text(self, text: str, start: int) -> int | None:
        """Return the end of a special token that only blanks follow."""
        stop = self._encoder.end_of_last_special(text, start)
        return None if stop is None or text[stop:].strip() else stop

    @cached_property
    def _is_open_ended(self) -> bool:
        """Whether a plain turn ends without a special token of its own."""
        return self._end_of_text(self.whole(PROBE), 0) is None

    @cached_property
    def _trailer(self) -> str:
        """The end of a conversation after its last turn: Phi-3's second end token."""
        full_text, longer = self.whole(PROBE), self._rendered_or_empty(NEXT_TURNS[False])
        start = self._encoder.start_of_last_special(full_text)
        stop = self._encoder.end_of_last_special(full_text[:start], 0)
        if stop is None or full_text[stop:start].strip() or not longer.startswith(full_text[:stop]):
            return ""
        return "" if longer.startswith(full_text) else full_text[stop:]

    def _next_token(self, message: Message, text: str, start: int) -> str:
        """Return the first special token of the next role (a tool's after a call); empty if the
        next role has none but `text` ends with one. Raises `RowError` if there is neither."""
        calls = "tool_calls" in message
        token = self._next_tokens.get(calls)
        if token is None:
            token = self._next_tokens[calls] = self._token_behind(NEXT_TURNS[calls])
        if not token and self._end_of_text(text, start) is None:
            raise RowError(
                "turn without an end: the chat template ends a turn with no special token, and "
                "begins the next one with none, so a model could not learn to stop; give another "
                "one in data.chat_template"
            )
        return token

    def _token_behind(self, conversation: Conversation) -> str:
        before = self._rendered_or_empty(conversation, -1)
        text = self._rendered_or_empty(conversation)
        suffix = text[len(before) :] if before and text.startswith(before) else ""
        blank = len(suffix) - len(suffix.lstrip())
        token = self._encoder.special_text(suffix, blank)
        return suffix[:blank] + token if token else ""

    def _rendered_or_empty(self, conversation: Conversation, stop: int | None = None) -> str:
        try:
            return self._render(conversation, stop)[0]
        except RowError:
            return ""

    def _without_prefills(
        self, text: TurnText, prefills: Mapping[int, str], guarded: bool
    ) -> TurnText:
        """Let trained turns begin after their prefills, which belong to the prompt in inference."""
        turns = []
        for turn in text.turns:
            prefill = prefills.get(turn.index, "").lstrip()
            if guarded:
                prefill = self._encoder.guard(prefill, but=self.template.searched_texts)
            start = text.text.find(prefill, turn.start, turn.stop)
            if start < 0:
                raise RowError(
                    f"turn not found: the chat template rewrites the beginning of message "
                    f"{turn.index + 1}, which the next message continues; join the two"
                )
            turns.append(replace(turn, start=start + len(prefill) if prefill else turn.start))
        return replace(text, turns=turns)

    def _guard(self, conversation: Conversation) -> Conversation:
        """Return the conversation with guarded special tokens. Tokens that the template searches
        for in an assistant's text, such as the end of its reasoning, stay."""
        guard = self._encoder.guard
        searched = self.template.searched_texts
        messages: list[Message] = []
        for message in conversation.messages:
            guarded: Message = map_texts(message, guard)
            if message["role"] == "assistant":
                guarded["content"] = guard(message["content"], but=searched)
            messages.append(guarded)
        return replace(
            conversation,
            messages=messages,
            tools=map_texts(conversation.tools, guard),
            template_kwargs=map_texts(conversation.template_kwargs, guard),
        )

    def _specials_in(self, conversation: Conversation) -> frozenset[str]:
        texts = texts_of([conversation.messages, conversation.tools, conversation.template_kwargs])
        if not self._encoder.specials_in("\n".join(texts)):
            return frozenset()  # one search where none has any
        return frozenset().union(*map(self._encoder.specials_in, texts))
