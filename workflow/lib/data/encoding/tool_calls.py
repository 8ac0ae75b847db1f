"""Tool calls and tools on offer, of several spellings, in OpenAI's form; results of tools, in the
order of their calls.

Arguments of calls become objects: templates write them as JSON and would quote a string again. Most
templates write results without ids, so a model tells them apart by their order alone. A result
belongs to the call with its id; without ids, to the call with its name; without names, to the next
call."""

import ast
import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any, Literal, NotRequired, TypedDict

from workflow.lib.data.encoding.keys_read import WORD, KeyAudit, KeySchema
from workflow.lib.data.encoding.row_values import (
    EMPTY,
    RowError,
    check_json,
    json_value,
    kind,
    objects_in,
    without_nulls,
)
from workflow.lib.data.reading.row_chunks import PREVIEW_CHARS

ARGUMENTS = ("arguments", "parameters", "args", "input", "kwargs", "params")  # of a call
SCHEMAS = ("parameters", "input_schema", "inputSchema")  # of a tool on offer
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")  # of calls, in the templates of Mistral
MAX_CALL_CHARS = 10_000  # of a text of Python's; its parser recurses
IDS = ("id", "call_id", "tool_call_id")
CALL = KeySchema("call", frozenset({*IDS, "type", "function", *ARGUMENTS}))
FUNCTION = KeySchema(
    "function of a call", frozenset({*IDS, "type", "name", "function", *ARGUMENTS})
)
TOOL = KeySchema("tool", frozenset({"type", "function"}))


class FunctionCall(TypedDict):
    """The function that a message calls; its arguments are an object, or JSON text of one."""

    name: str
    arguments: dict[str, Any] | str


class ToolCall(TypedDict):
    """An entry of a message's `tool_calls`, in OpenAI's form."""

    id: NotRequired[object]
    type: Literal["function"]
    function: FunctionCall


class Tool(TypedDict):
    """A tool on offer, in OpenAI's form; `function` has a name and a JSON schema of parameters."""

    type: Literal["function"]
    function: dict[str, Any]


def read_calls(raw: Any, where: str, keys: KeyAudit) -> list[ToolCall]:
    """Return the calls of a list, of its JSON text, or of a single call."""
    calls = _python_calls(raw) if isinstance(raw, str) else None
    if calls is None:
        _check_is_json(raw, where)
        calls = _decoded(without_nulls(raw), f"tool calls of {where}")
    if calls in EMPTY:
        return []
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        raise RowError(f"broken tool call: tool_calls of {where} is {kind(calls)}")
    return [_call(call, where, keys) for call in calls]


def _check_is_json(raw: Any, where: str) -> None:
    if isinstance(raw, str) and raw.lstrip()[:1] not in ("", "[", "{", '"', "n"):
        raise RowError(
            f"calls as text: {where} has {raw[:PREVIEW_CHARS]!r}, which is neither JSON nor calls "
            "by names as f(x=1); write a list of calls, each with its name and its arguments, or "
            "put the text into the content"
        )


def _python_calls(text: str) -> list[dict[str, Any]] | None:
    """Return the calls in a text like `weather(town="Oslo")`, a list of such calls, or one call a
    line. Arguments have names and literal values. None for other texts."""
    if len(text) > MAX_CALL_CHARS or not text.rstrip().endswith((")", ")]")):
        return None
    try:
        statements = ast.parse(text.strip()).body
        lines = [line.value if isinstance(line, ast.Expr) else None for line in statements]
        calls = [n for line in lines for n in (line.elts if isinstance(line, ast.List) else [line])]
        return [_python_call(call) for call in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_call(node: ast.expr | None) -> dict[str, Any]:
    """Return a call by names; raises `ValueError` for other code."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("no call of a function")
    if node.args or any(argument.arg is None for argument in node.keywords):
        raise ValueError("an argument without a name")
    arguments = {argument.arg: ast.literal_eval(argument.value) for argument in node.keywords}
    return {"name": ast.unparse(node.func), "arguments": arguments}


def _decoded(raw: Any, what: str) -> Any:
    """Return the content of a JSON text, which may be JSON text once more."""
    if not isinstance(raw, str):
        return raw
    value = json_value(raw, what) if raw.strip() else None
    return json_value(value, what) if isinstance(value, str) and value.strip() else value


def _call(raw: Any, where: str, keys: KeyAudit) -> ToolCall:
    call = _decoded(raw, f"a call in {where}")
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, str) and function.lstrip()[:1] == "{":
        function = json_value(function, f"a call in {where}")
    if isinstance(function, dict):
        call, _ = keys.check(CALL, call, where)
        function, _ = keys.check(FUNCTION, function, where)
    elif isinstance(call, dict):  # the function itself, whose name may stand under `function`
        checked, _ = keys.check(FUNCTION, call, where)
        function = {**checked, "name": checked.get("name") or function}
    if not isinstance(function, dict) or not _is_name(function.get("name")):
        raise RowError(f"broken tool call: {where} has one without a name")
    function_call: FunctionCall = {
        "name": function["name"],
        "arguments": _arguments(function, call, where),
    }
    ids = (holder[key] for holder in (call, function) for key in IDS if holder.get(key) is not None)
    number = next(ids, None)
    check_json((number, function_call), f"a call in {where}")
    if number is not None:
        return {"id": number, "type": "function", "function": function_call}
    return {"type": "function", "function": function_call}


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name.strip())


def _arguments(function: dict[str, Any], call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the arguments of a call, under any of their names; null means none."""
    what = f"arguments in {where}"
    candidates: list[Any] = []
    for holder in (function, call):
        values = [_decoded(holder.get(key), what) for key in ARGUMENTS]
        candidates += [v for v in values if v not in (None, "", {}) and v not in candidates]
    if len(candidates) > 1:
        raise RowError(f"two arguments: a call in {where} has them under two names, unlike")
    if candidates and not isinstance(candidates[0], dict):
        raise RowError(f"broken tool call: {what} are {kind(candidates[0])}, no object")
    if not candidates:
        _check_no_other(function, where)
        _check_no_other(call, where)
    return candidates[0] if candidates else {}


def _check_no_other(holder: dict[str, Any], where: str) -> None:
    """Raise `RowError` if a call without arguments holds an object under another name."""
    for key, value in holder.items():
        is_object = isinstance(value, dict) or (isinstance(value, str) and objects_in(value))
        if is_object and key not in FUNCTION.read and key not in SCHEMAS:
            raise RowError(f"no arguments, but {key}: a call in {where}; rename it to arguments")


def read_tools(raw: Any, keys: KeyAudit, *, what: str) -> list[Tool] | None:
    """Return the tools of a list, or of its JSON text; None if there are none."""
    items = _decoded(without_nulls(raw), what)
    if items in EMPTY:
        return None
    if isinstance(items, dict) and ("name" in items or "function" in items):
        items = [items]
    if not isinstance(items, list):
        raise RowError(f"not a list of tools: {what} is {kind(items)}")
    return [_tool(item, keys, what) for item in items]


def _tool(raw: Any, keys: KeyAudit, what: str) -> Tool:
    tool = _decoded(raw, what)
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not _is_name(function.get("name")):
        raise RowError(f"not a tool: {what} has one without a name")
    if function is not tool:
        keys.check(TOOL, tool, what)
    schemas = [function[key] for key in SCHEMAS if key in function]
    function = {k: v for k, v in function.items() if k not in (*SCHEMAS, "type")}
    if schemas:
        function["parameters"] = _decoded(schemas[0], what)
    check_json(function, what)
    return {"type": "function", "function": function}


def with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give calls ids of nine letters and digits, and their results the same ids. Ids of this form
    stay. A result without an id gets the id of the next open call."""
    short_ids: dict[str, str] = {}
    open_ids: list[str] = []
    changed = []
    for message in messages:
        if calls := message.get("tool_calls"):
            ids = [
                _short_id(call.get("id"), short_ids, number) for number, call in enumerate(calls)
            ]
            open_ids += ids
            pairs = zip(calls, ids, strict=True)
            message = {**message, "tool_calls": [{**call, "id": id} for call, id in pairs]}
        elif message["role"] == "tool":
            result_id = str(message.get("tool_call_id"))
            answered = short_ids.get(result_id) or (open_ids[0] if open_ids else "call00000")
            if answered in open_ids:
                open_ids.remove(answered)
            message = {**message, "tool_call_id": answered}
        changed.append(message)
    return changed


def _short_id(call_id: object, short_ids: dict[str, str], number: int) -> str:
    """Return an id of the right form for a call, and note it in `short_ids` by its own id."""
    name = f"{call_id}" if call_id is not None else f"{len(short_ids)} {number}"
    if SHORT_ID.fullmatch(name):
        return short_ids.setdefault(name, name)
    return short_ids.setdefault(name, f"call{len(short_ids):05d}")


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
