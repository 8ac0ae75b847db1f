"""Probes: conversations and a text, with the token ids of training in the manifest.

An export encodes them again by the written files alone, and must get the same ids."""

from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.message_forms import Message
from workflow.lib.data.encoding.tool_calls import Tool, ToolCall

PROBE = Conversation(
    [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}], [False, True]
)
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "ping",
        "description": "Send a ping.",
        "parameters": {"type": "object", "properties": {"host": {"type": "string"}}},
    },
}
_CALL: ToolCall = {
    "type": "function",
    "function": {"name": "ping", "arguments": {"host": "a.example"}},
}
OFFERING_PROBE = Conversation(PROBE.messages, PROBE.trained, [_TOOL])
_CALLING_TURNS: list[Message] = [
    {"role": "user", "content": "ping a.example"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
]
_RESULT_TURNS: list[Message] = [
    {"role": "tool", "name": "ping", "content": "12 ms"},
    {"role": "assistant", "content": "It answered in 12 ms."},
]
# Turns that follow a turn of the assistant, by whether it calls a tool.
NEXT_TURNS = {
    False: Conversation([*PROBE.messages, PROBE.messages[0]], [False, True, False]),
    True: Conversation([*_CALLING_TURNS, _RESULT_TURNS[0]], [False, True, False], [_TOOL]),
}
PROBE_TEXT = (
    "Zwölf Boxkämpfer, 12,345 x 6.78:\n\n\tdef f(x):\n        return x  # naïve, 日本 \U0001f642"
)
PROBES = (
    PROBE,
    Conversation(
        [{"role": "system", "content": "Be brief."}, *PROBE.messages, *PROBE.messages],
        [False, False, True, False, True],
    ),
    Conversation(_CALLING_TURNS, [False, True], [_TOOL]),
    Conversation(_CALLING_TURNS + _RESULT_TURNS, [False, True, False, True], [_TOOL]),
)
