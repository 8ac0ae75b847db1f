"""Results of tools, in the order of their calls.

Most templates write results without ids, so a model tells them apart by their order alone. A result
belongs to the call with its id; without ids, to the call with its name; without names, to the next
call."""

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

from workflow.lib.data.encoding.keys_read import WORD
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.tool_calls import ToolCall

RESULT_ID = "tool_call_id"
NAMESPACE = "functions."  # of names in Harmony
ID_WORDS = (["id"], ["Id"], ["ID"])  # at the end of a key


def with_ordered_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose results stand in the order of their calls. Raises `RowError` at a
    result without a call, and at a call without a result before the end."""
    if not any("tool_calls" in message or message["role"] == "tool" for message in messages):
        return messages
    has_calls = any("tool_calls" in message for message in messages)
    ordered: list[dict[str, Any]] = []
    calls: list[ToolCall] = []
    for role, group in groupby(messages, lambda message: message["role"]):
        turn = list(group)
        if role == "tool":
            if has_calls or _begins_without_call(ordered, turn):
                may_miss = len(ordered) + len(turn) == len(messages)
                turn = _ordered(calls, turn, len(ordered) + 1, may_miss=may_miss)
        elif calls:
            raise _without_result(calls[0], len(ordered) + 1)
        calls = [call for message in turn for call in message.get("tool_calls", ())]
        if any("tool_calls" in before and "tool_calls" not in m for before, m in pairwise(turn)):
            raise _without_result(calls[0], len(ordered) + len(turn))
        ordered += turn
    return ordered


def _begins_without_call(earlier: list[dict[str, Any]], results: list[dict[str, Any]]) -> bool:
    """Tell whether results follow no assistant's turn (its text may be a call), or have ids of
    calls."""
    is_answer = bool(earlier) and earlier[-1]["role"] == "assistant"
    return not is_answer or any(message.get(RESULT_ID) is not None for message in results)


def _ordered(
    calls: Sequence[ToolCall], results: list[dict[str, Any]], number: int, *, may_miss: bool
) -> list[dict[str, Any]]:
    """Return the results of one turn's calls. number: the message number of the first result."""
    if len(results) == 1 < len(calls) and _is_joint(results[0], calls):
        return results
    open_calls = dict(enumerate(calls))
    by_call: dict[int, dict[str, Any]] = {}
    unnamed: list[tuple[int, dict[str, Any]]] = []
    for position, result in enumerate(results, number):
        matches = _matches(result, open_calls)
        if matches is None:
            unnamed.append((position, result))
        elif matches:
            by_call[matches[0]] = result
            del open_calls[matches[0]]
        else:
            raise _without_call(result, position, list(open_calls.values()))
    for position, result in unnamed:
        if not open_calls:
            raise _without_call(result, position, ())
        first = min(open_calls)
        by_call[first] = result
        del open_calls[first]
    if open_calls and not may_miss:
        raise _without_result(min(open_calls.items())[1], number + len(results))
    return [by_call[call] for call in sorted(by_call)]


def _is_joint(result: dict[str, Any], calls: Sequence[ToolCall]) -> bool:
    """Tell whether one message holds the results of all calls: nothing in it names one of them."""
    matches = _matches(result, dict(enumerate(calls)))
    return _id_of(result) is None and (matches is None or len(matches) == len(calls))


def _id_of(result: dict[str, Any]) -> object:
    return result.get(RESULT_ID)


def _matches(result: dict[str, Any], calls: dict[int, ToolCall]) -> list[int] | None:
    """Return the numbers of the calls that a result names; None if it names none."""
    ids = {number: str(call["id"]) for number, call in calls.items() if "id" in call}
    answered = _id_of(result)
    if answered is None:  # another key in its place, unless it has an id of the message's own
        others = (str(value) for key, value in result.items() if WORD.findall(key)[-1:] in ID_WORDS)
        answered = next((value for value in others if value in ids.values()), None)
    if answered is not None and (ids or not calls):
        return [number for number, name in ids.items() if name == str(answered)]
    name = result.get("name")
    if not isinstance(name, str) or not name.strip():
        return None
    name = name.strip().removeprefix(NAMESPACE)
    return [n for n, c in calls.items() if c["function"]["name"].removeprefix(NAMESPACE) == name]


def _without_call(result: dict[str, Any], number: int, open_calls: Sequence[ToolCall]) -> RowError:
    if not open_calls:
        return RowError(
            f"result without a call: message {number} is a tool's, and no call before it "
            "is without a result; take it out, or add its call"
        )
    key = "name" if _id_of(result) is None else RESULT_ID
    return RowError(
        f"result without a call: message {number} is a tool's, its {key} is {result[key]!r}, and "
        f"calls without a result before it are {', '.join(map(_shown, open_calls))}; correct it, "
        f"or leave it out to take results in the order of their calls (data.leave_out: [{key}])"
    )


def _without_result(call: ToolCall, number: int) -> RowError:
    return RowError(
        f"call without a result: {_shown(call)} has none before message {number}; add it as a "
        "message of the role tool, or take the call out"
    )


def _shown(call: ToolCall) -> str:
    return f"{call['function']['name']!r}" + (f" ({call['id']!r})" if "id" in call else "")
