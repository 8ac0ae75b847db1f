"""The tables of public dataset styles in `workflow/docs/your-data.md` and `preferences.md`, from
what becomes of a small sample of each.

`python -m tests.support.styles_page` writes it anew."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.pages import DOCS, with_part
from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.chat_template import keys_in_template
from workflow.lib.data.encoding.keys_read import KeyAudit
from workflow.lib.data.encoding.preference_rows import Judged, to_judged
from workflow.lib.data.encoding.row_columns import choose_format
from workflow.lib.data.encoding.row_formats import to_sample
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.reading.data_file import column_names, read_rows
from workflow.lib.data.reading.row_chunks import Row
from workflow.lib.data.reading.sources import SourceFile
from workflow.lib.settings.data import DataColumns
from workflow.lib.settings.objectives import Examples
from workflow.lib.system.errors import UserError

PAGES = {"styles": DOCS / "your-data.md", "preferences": DOCS / "preferences.md"}
SAMPLES = Path(__file__).parents[1] / "data" / "encoding" / "styles"
TEMPLATE = (SAMPLES / "template.jinja").read_text(encoding="utf-8")
HEAD = "| style | columns read | its first row becomes | not read |\n|---|---|---|---|\n"
# Styles by their samples' names, as the page calls them.
STYLES = {
    "sharegpt": "ShareGPT",
    "sharegpt_system_tools": "ShareGPT with system and tools (LLaMA-Factory)",
    "openai": "OpenAI",
    "openai_tools": "OpenAI with tools",
    "ultrachat": "UltraChat 200k",
    "hermes_tools": "Hermes function calling",
    "glaive_tools": "Glaive function calling",
    "xlam": "xLAM function calling",
    "olmo_tools": "OLMo function calling",
    "metadata_tools": "tools in the metadata (Nemotron)",
    "responses": "OpenAI Responses",
    "harmony": "Harmony",
    "alpaca": "Alpaca",
    "alpaca_history": "Alpaca with system and history",
    "openhermes": "OpenHermes",
    "dolly": "Dolly",
    "gsm8k": "GSM8K",
    "query_answer": "CodeFeedback",
    "oasst": "OASST",
    "magpie": "Magpie",
    "capybara": "Capybara",
    "nemotron_v1": "Nemotron post-training 1",
    "nemotron_v2": "Nemotron post-training 2",
    "reasoning_in_content": "reasoning in the content",
    "reasoning_keys": "reasoning in a key of the message",
    "reasoning_column": "reasoning in a column",
    "thinking_switch": "SmolTalk 2",
    "preference": "preference pairs",
    "kto": "judged answers (KTO)",
}
# The same of preferences, with what they are read as.
PREFERENCES: dict[str, tuple[str, Examples]] = {
    "preference": ("TRL", "pairs"),
    "preference_conversations": ("TRL, the prompt in both", "pairs"),
    "preference_tools": ("TRL with tools", "pairs"),
    "openai_preference": ("OpenAI", "pairs"),
    "preference_sharegpt": ("ShareGPT (LLaMA-Factory)", "pairs"),
    "hh": ("HH-RLHF", "pairs"),
    "ultrafeedback": ("UltraFeedback", "pairs"),
    "ultrafeedback_binarized": ("UltraFeedback, binarized", "pairs"),
    "nectar": ("Nectar", "pairs"),
    "orca_dpo": ("Orca DPO", "pairs"),
    "rejected_response": ("ms-swift", "pairs"),
    "helpsteer": ("HelpSteer3", "pairs"),
    "kto": ("TRL, judged", "rated"),
    "kto_messages": ("conversations, judged", "rated"),
}


class Read(NamedTuple):
    """What became of a sample: its rows' conversations or why they are dropped, and the keys."""

    rows: list[Conversation | Judged | str]
    columns: list[str]
    not_read: dict[str, int]


def read_style(name: str, examples: Examples = "texts") -> Read:
    """Read a sample as `tokenize_dataset` does. Raises `UserError` if its columns are refused."""
    path = SAMPLES / f"{name}.jsonl"
    present = column_names([SourceFile(path, path.name, "jsonl")], setting="data.train")
    format, columns = choose_format(
        present, format="auto", columns=DataColumns(), setting="data.train", examples=examples
    )
    keys = KeyAudit(template_keys=keys_in_template(TEMPLATE))
    given = {"format": format, "columns": columns, "keys": keys}
    rows = []
    for row in read_rows(path, setting="data.train"):
        assert isinstance(row, Row)
        try:
            if examples == "texts":
                sample = to_sample(row.value, **given)
            else:
                sample = to_judged(row.value, **given, rated=examples == "rated")
        except RowError as error:
            rows.append(str(error))
        else:
            assert isinstance(sample, Conversation | Judged)
            rows.append(sample)
    return Read(rows, *keys.report())


def tables() -> dict[str, str]:
    lines = {
        "styles": [_line(name, title) for name, title in STYLES.items()],
        "preferences": [_line(name, *style) for name, style in PREFERENCES.items()],
    }
    return {name: HEAD + "".join(some) for name, some in lines.items()}


def _line(name: str, title: str, examples: Examples = "texts") -> str:
    try:
        read = read_style(name, examples)
    except UserError as error:
        return f"| {title} | none | refused: {_cure(str(error))} | |\n"
    columns = ", ".join(f"`{column}`" for column in read.columns)
    (first, *_), dropped = read.rows, Counter(row for row in read.rows if isinstance(row, str))
    assert not isinstance(first, str)
    becomes = _shown(first) if isinstance(first, Conversation) else _answers(first)
    for reason, count in dropped.items():
        becomes += f"; {count} of {len(read.rows)} rows dropped ({reason})"
    not_read = ", ".join(f"`{key}`" for key in read.not_read)
    return f"| {title} | {columns} | {becomes} | {not_read} |\n"


def _answers(judged: Judged) -> str:
    names = ["chosen", "rejected"]
    if judged.desirable:
        names = ["good" if good else "bad" for good in judged.desirable]
    shown = [_shown(answer) for answer in judged.answers]
    if len({*shown}) == 1:
        return f"{' and '.join(names)}: {shown[0]}"
    return "; ".join(f"{name}: {text}" for name, text in zip(names, shown, strict=True))


def _cure(message: str) -> str:
    """Return the sentence of a refusal that says what to set, or what to write."""
    sentences = message.replace("\n", " ").split(". ")
    wanted = ("data.columns: {", "Write one row")
    return next(s for start in wanted for s in sentences if start in s).split(", as {")[0]


def _shown(conversation: Conversation) -> str:
    turns = zip(conversation.messages, conversation.trained, strict=True)
    roles = ", ".join(_role(message, is_trained) for message, is_trained in turns)
    more = [f"{len(conversation.tools)} tool"] if conversation.tools else []
    more += [f"{name} = {value}" for name, value in conversation.template_kwargs.items()]
    return "; ".join([roles, *more])


def _role(message: dict[str, Any], is_trained: bool) -> str:
    has = [
        word
        for word, key in (("calls", "tool_calls"), ("reasoning", "reasoning_content"))
        if key in message
    ]
    role = f"**{message['role']}**" if is_trained else message["role"]
    return f"{role} ({', '.join(has)})" if has else role


def written(name: str) -> str:
    """Return the page of a table with the table of today."""
    return with_part(PAGES[name].read_text(encoding="utf-8"), name, tables()[name])


if __name__ == "__main__":
    for name, page in PAGES.items():
        page.write_text(written(name), encoding="utf-8")
