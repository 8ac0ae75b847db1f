"""The format of a source, from its columns, and the meaning of each column.

Names of columns come from `data.columns`; without them, from a table of the names in public
datasets."""

from collections.abc import Collection, Mapping
from typing import Any

from workflow.lib.data.encoding.keys_read import LABELS
from workflow.lib.data.reading.row_chunks import printable
from workflow.lib.settings.data import DataColumns, Format
from workflow.lib.settings.objectives import Examples
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.near_names import near_names

DEFAULTS = DataColumns()
# Columns that a format needs, by their keys of `data.columns`; `auto` takes the first format that
# fits.
REQUIRED: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "tokens": ("input_ids",),
    "text": ("text",),
    "pairs": ("chosen", "rejected"),
    "ranked": ("prompt", "answers"),
}
PAIRS: tuple[Format, ...] = ("pairs", "ranked")
# Formats by a run's examples. A pair is two rated answers; other rows need a label to be one.
FORMATS: dict[Examples, tuple[Format, ...]] = {
    "texts": ("messages", "prompt_completion", "alpaca", "tokens", "text"),
    "pairs": PAIRS,
    "rated": ("messages", "prompt_completion", "alpaca", *PAIRS),
}
# `auto` takes token ids only with labels or a mask: many tokenized datasets keep the text beside
# them.
TARGETS = ("labels", "loss_mask")
WITHOUT_TEMPLATE: frozenset[Format] = frozenset({"tokens", "text"})
# Other names of columns, tried in this order if those of `data.columns` are missing.
OTHER_NAMES: tuple[tuple[Format, Mapping[str, str]], ...] = (
    ("messages", {"messages": "conversations"}),
    ("messages", {"messages": "conversation"}),
    ("prompt_completion", {"prompt": "prompt", "completion": "response"}),
    ("prompt_completion", {"prompt": "query", "completion": "answers"}),
    ("prompt_completion", {"prompt": "query", "completion": "answer"}),
    ("prompt_completion", {"prompt": "query", "completion": "response"}),
    ("prompt_completion", {"prompt": "input", "completion": "output"}),
    ("prompt_completion", {"prompt": "inputs", "completion": "targets"}),
    ("prompt_completion", {"prompt": "input", "completion": "target"}),
    ("alpaca", {"instruction": "instruction", "output": "response"}),
    ("alpaca", {"instruction": "question", "output": "answer"}),
    ("alpaca", {"instruction": "question", "output": "response"}),
    ("alpaca", {"instruction": "problem", "output": "solution"}),
)
LONGER_ANSWERS = ("solution", "response")  # beside `answer`, which is then its last line
OTHER_INPUT = "context"  # of the column `input`, if that is not there
# Other names of columns of preference formats, each tuple as a whole; a column has one role.
PAIR_NAMES: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {
    ("chosen", "rejected"): (
        ("preferred_output", "non_preferred_output"),
        ("chosen_response", "rejected_response"),
        ("messages", "rejected_response"),
        ("messages", "rejected_messages"),
        ("response", "rejected_response"),
        ("conversations", "rejected_response"),
    ),
    ("chosen", "rejected", "preference"): (
        ("response1", "response2", "overall_preference"),
        ("response_1", "response_2", "preference_strength"),
    ),
    ("prompt",): tuple(
        (name,)
        for name in (
            *("question", "instruction", "input", "query"),
            *("messages", "conversations", "conversation", "context"),
        )
    ),
    ("score_chosen", "score_rejected"): (
        ("chosen_score", "rejected_score"),
        ("chosen_rating", "rejected_rating"),
        ("chosen_avg_rating", "rejected_avg_rating"),
    ),
    ("answers",): (("completions",),),
}
LABEL_NAMES = {("label",): tuple((name,) for name in LABELS)}
# Columns with several names among publishers; the first present one, unless the user names one.
SYSTEM_NAMES = ("system", "system_prompt", "system_message")
TOOLS_NAMES = ("tools", "functions")
# Columns of datasets whose rows are single messages.
TREE_COLUMNS = {"parent_id", "parent_message_id", "message_tree_id", "replies"}
ROLE_COLUMN = "role"


def choose_format(
    present: Collection[str],
    *,
    format: str,
    columns: DataColumns,
    setting: str,
    examples: Examples = "texts",
) -> tuple[Format, DataColumns]:
    """Return the format of rows with the columns `present`, the one set or the first that fits
    `examples`; and names. Raises `UserError` with columns present and expected; `setting` names the
    source. Without columns any format rejects the rows by their own reasons."""
    candidates = [name for name in FORMATS[examples] if format in ("auto", name)]
    if not candidates:
        raise setting_error(
            "data.format",
            format,
            f"train.objective is trained on {examples}, and rows of this format are none",
            f"Set auto, or one of {', '.join(FORMATS[examples])}",
        )
    # a format whose columns the user names comes first
    set_keys = {key for key in DataColumns.model_fields if _is_named(key, columns)}
    candidates.sort(key=lambda name: set_keys.isdisjoint(REQUIRED[name]) and name not in PAIRS)
    if not present:
        return candidates[0], columns
    if DEFAULTS.input not in present and OTHER_INPUT in present and not _is_named("input", columns):
        columns = columns.model_copy(update={"input": OTHER_INPUT})
    for candidate in candidates:
        names = _preference_names(candidate, present, columns, examples)
        if _fits(candidate, present, names, examples, is_set=format != "auto"):
            if format == "auto" and candidate in ("prompt_completion", "text"):
                _check_whole_rows(present, columns, setting)
            return candidate, names
        if candidate == "messages" and (
            choice := _format_by_other_names(present, ["messages"], names, examples)
        ):
            return choice
    names = _preference_names("messages", present, columns, examples)
    if choice := _format_by_other_names(present, candidates, names, examples):
        _check_one_answer(present, choice[1], setting)
        return choice
    _check_whole_rows(present, columns, setting)
    expected = [f"{name} ({_expected_columns(name, columns, examples)})" for name in candidates]
    raise UserError(
        f"data.format = {format!r}: {setting} has the columns {_listed(present)}, but expected are "
        f"those of {' or '.join(expected)}. {_misspelt(present, columns)}"
        f"{_advice(present, examples)}Give the names that the file uses under data.columns, or set "
        "data.format."
    )


def _preference_names(
    format: Format, present: Collection[str], columns: DataColumns, examples: Examples
) -> DataColumns:
    groups = PAIR_NAMES if format in PAIRS else LABEL_NAMES if examples == "rated" else {}
    update: dict[str, str] = {}
    for keys, alternatives in groups.items():
        names = [getattr(columns, key) for key in keys]
        is_free = not any(_is_named(key, columns) for key in keys)
        if is_free and not any(name in present for name in names):
            free = set(present) - set(update.values())
            match = next(
                (alternative for alternative in alternatives if free.issuperset(alternative)), ()
            )
            update |= dict(zip(keys, match, strict=False))
    return columns.model_copy(update=update)


def _required_columns(format: Format, examples: Examples) -> tuple[str, ...]:
    labelled = examples == "rated" and format not in PAIRS
    return (*REQUIRED[format], "label") if labelled else REQUIRED[format]


def _check_whole_rows(present: Collection[str], columns: DataColumns, setting: str) -> None:
    """Raise `UserError` if each row is one message of a conversation or of a tree of them."""
    is_tree = not TREE_COLUMNS.isdisjoint(present)
    if is_tree or ROLE_COLUMN in present:
        what = "a tree of messages" if is_tree else "one message"
        raise UserError(
            f"data.format: a row of {setting} is {what} (columns {_listed(present)}), not "
            "a conversation. Write one row for each path from a first message to a last one, as "
            f"{{{columns.messages!r}: [{{'role': ..., 'content': ...}}, ...]}}; or, to train each "
            "text as plain text, set data.format: text and name its column in data.columns.text."
        )


def _format_by_other_names(
    present: Collection[str], candidates: Collection[str], columns: DataColumns, examples: Examples
) -> tuple[Format, DataColumns] | None:
    """Return the first format that fits by names of public datasets, not the user's."""
    for format, names in OTHER_NAMES:
        required = [
            names.get(key, getattr(columns, key)) for key in _required_columns(format, examples)
        ]
        is_free = not any(_is_named(key, columns) for key in names)
        if format in candidates and is_free and all(name in present for name in required):
            return format, columns.model_copy(update=dict(names))
    return None


def _check_one_answer(present: Collection[str], columns: DataColumns, setting: str) -> None:
    longer = [name for name in LONGER_ANSWERS if name in present]
    if columns.output == "answer" and longer:
        raise UserError(
            f"data.format: {setting} has the columns 'answer' and {_listed(longer)}, and either "
            f"may be what a model has to write. Name the columns: data.columns: {{instruction: "
            f"{columns.instruction}, output: {longer[0]}}}, for one."
        )


def _is_named(key: str, columns: DataColumns) -> bool:
    return bool(getattr(columns, key) != getattr(DEFAULTS, key))


def system_columns(columns: DataColumns) -> tuple[str, ...]:
    """Return the columns that may hold the system text: the user's, else the usual names."""
    return (columns.system,) if _is_named("system", columns) else SYSTEM_NAMES


def tools_columns(columns: DataColumns) -> tuple[str, ...]:
    """Return the columns that may hold the tools: the user's, else the usual names."""
    return (columns.tools,) if _is_named("tools", columns) else TOOLS_NAMES


def _listed(names: Collection[str]) -> str:
    """Return names in quotes, which show a blank at an end."""
    return ", ".join(printable(f"'{name}'") for name in names)


def _misspelt(present: Collection[str], columns: DataColumns) -> str:
    parts = []
    for key in DataColumns.model_fields:
        name = getattr(columns, key)
        if name not in present and _is_named(key, columns):
            near = near_names(name, present)
            hint = f"; did you mean {_listed(near)}? " if near else ". "
            parts.append(f"data.columns.{key} = {name!r} is none of them{hint}")
    return "".join(parts)


def _advice(present: Collection[str], examples: Examples) -> str:
    """Return the settings for columns of public datasets that mean no format by themselves."""
    if examples != "texts":
        label = "data.columns.label names the column that says which answers are good"
        return f"{label}. " if examples == "rated" else ""
    advice: list[tuple[set[str], dict[str, Any], str]] = [
        ({"prompt", "chosen", "rejected"}, {"completion": "chosen"}, "trains the chosen answers"),
        ({"chosen", "rejected"}, {"messages": "chosen"}, "trains the chosen conversations"),
        ({"chat"}, {"text": "chat"}, "trains each chat as plain text, speakers included"),
    ]
    for names, setting, effect in advice:
        if names <= set(present):
            (pair,) = setting.items()
            both = "" if "chat" in names else "train.objective: dpo, for one, trains on both. "
            return f"data.columns: {{{pair[0]}: {pair[1]}}} {effect}. {both}"
    return ""


def _fits(
    name: Format,
    present: Collection[str],
    columns: DataColumns,
    examples: Examples,
    *,
    is_set: bool,
) -> bool:
    has_targets = any(getattr(columns, key) in present for key in TARGETS)
    has_required = all(
        getattr(columns, key) in present for key in _required_columns(name, examples)
    )
    return has_required and (name != "tokens" or has_targets or is_set)


def _expected_columns(name: Format, columns: DataColumns, examples: Examples) -> str:
    columns_text = ", ".join(
        getattr(columns, key) or key for key in _required_columns(name, examples)
    )
    targets = " or ".join(getattr(columns, key) for key in TARGETS)
    return f"{columns_text} with {targets}" if name == "tokens" else columns_text
