"""A manifest as lines of the log: the use of the rows, and notable facts; and its sample
documents on a terminal. Colours show trained text; without colours, brackets do. Control characters
are spelled out."""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from workflow.lib.data.encoding.sample_encoder import Note
from workflow.lib.data.reading.row_chunks import printable
from workflow.lib.data.tokens.corpus import SETTING
from workflow.lib.data.tokens.token_store import REJECTS
from workflow.lib.settings.data import SpecialTokens

NOTES: dict[Note, str] = {
    "begin_untrained": "begin with a turn that is not trained: it has no prompt",
    "lost_blanks": "lose blanks around an answer: special tokens of the tokenizer strip them",
    "repeat_prompt": (
        "repeat their prompt at the beginning of the answer, and it is trained there; take it out "
        "of the answers, unless a model should repeat it"
    ),
    "unknown_characters": (
        "have characters that the tokenizer does not know: its unknown token is trained for them"
    ),
}
logger = logging.getLogger("workflow")


def log_facts(
    facts: dict[str, Any],
    *,
    output: Path,
    special_tokens: SpecialTokens | None = None,
    leave_out: Sequence[str] = (),
) -> None:
    """Log the manifest's counts. Warns of whatever may surprise: notes on rows, unused `leave_out`
    keys."""
    train, seq_len = facts["splits"]["train"], facts["seq_len"]
    _log_split("train", train, seq_len=seq_len)
    _log_split("heldout", facts["splits"]["heldout"], seq_len=seq_len)
    logger.info(
        "packed %d documents into %d rows of %d tokens: %.2f%% full",
        train["documents"],
        train["packed_rows"],
        seq_len,
        100 * train["fill"],
    )
    if facts["examples"] != "texts":
        _log_examples(facts)
    if weights := train.get("weights"):
        logger.info(
            "%d trained tokens have another weight than 1 (%g to %g, mean %g): the loss of a step "
            "is sum(w (-log p)) / sum(w)",
            *(weights[key] for key in ("tokens", "smallest", "largest", "mean")),
        )
    for count, words in (
        (facts["train_heldout_near_duplicates"], "nearly repeat a training row"),
        (facts["train_heldout_shared_groups"], "share the group (data.group_by) of a training row"),
    ):
        if count:
            logger.info("heldout: rows that %s: %d", words, count)
    for reason, count in facts["dropped_by_reason"].items():
        logger.info("dropped %d: %s", count, reason)
    if facts["dropped_by_reason"]:
        logger.info("dropped rows, with line and reason: %s", output / REJECTS)
    _log_sources(facts["sources"])
    unread_keys = {
        label.split(" (")[0] for source in facts["sources"] for label in source["not_read"]
    }
    for key in leave_out:
        if key not in unread_keys:
            logger.warning("data.leave_out names %r, which holds a value in no row", key)
    special = sum(source["special_token_texts"] for source in facts["sources"])
    if special and special_tokens is None:
        message = (
            "%d rows spell a special token; it was encoded as ordinary text. %s: tokens reads it "
            "as the token, text says that this is right"
        )
        logger.warning(message, special, SETTING)
    elif special:
        logger.info("%d rows spell a special token; it was encoded as %s", special, special_tokens)
    if facts["template_date"] is not None:
        logger.info(
            "the chat template writes the date %s into every document; its arguments may set "
            "another (data.template_kwargs)",
            facts["template_date"],
        )
    if facts["pad_token_origin"] == "eos_token":
        logger.info("no pad token: rows are filled with eos, which is never trained there")


def _log_examples(facts: dict[str, Any]) -> None:
    for name, split in facts["splits"].items():
        count = split["documents"] // 2
        if facts["examples"] == "pairs":
            logger.info("%s: %d pairs of a chosen and a rejected answer", name, count)
        else:
            num_good = split["good_answers"]
            message = "%s: %d rated answers, %d good and %d bad, each with that of another row"
            logger.info(message, name, count, num_good, count - num_good)


def _log_split(name: str, split: dict[str, Any], *, seq_len: int) -> None:
    logger.info(
        "%s: %d rows read, %d kept, %d dropped, %d longer than %d tokens; %d tokens, %.1f%% "
        "trained",
        name,
        split["rows_read"],
        split["rows_kept"],
        split["rows_dropped"],
        split["truncated"],
        seq_len,
        split["tokens"],
        100 * split["trained_tokens"] / split["tokens"],
    )
    logger.info("%s: %d rows equal an earlier one", name, split["duplicates"])


def _log_sources(sources: Sequence[dict[str, Any]]) -> None:
    not_read: dict[str, Counter[str]] = {}
    for source in sources:
        not_read.setdefault(source["source"], Counter()).update(source["not_read"])
    for name, counts in not_read.items():
        if counts:
            listed = ", ".join(f"{key} ({count:,})" for key, count in counts.most_common())
            logger.info("%s: not read: %s", name, listed)
    for source in sources:
        if source["blank_lines"]:
            message = "%s: %d blank lines are no rows, but count as lines"
            logger.info(message, source["file"], source["blank_lines"])
    by_turns = sum(source["rows_by_turns"] for source in sources)
    if by_turns:
        logger.info(
            "%d rows became several examples: the template shows turns otherwise once others "
            "follow",
            by_turns,
        )
    for note, message in NOTES.items():
        if rows := sum(source[note] for source in sources):
            logger.warning("%d rows " + message, rows)
    unrendered: Counter[str] = Counter()
    for source in sources:
        unrendered.update(source["unrendered"])
    for kind, count in unrendered.items():
        logger.warning(
            "%d rows: the chat template leaves out %s, as data.allow_unrendered allows", count, kind
        )


TRAINED = "bold green"
OPEN, CLOSE = "\u27e6", "\u27e7"  # around trained text, without colours


def show_samples(facts: dict[str, Any], console: Console) -> None:
    """Print the sample documents of a manifest, each below its origin."""
    marked = "green" if console.is_terminal else f"between {OPEN} and {CLOSE}"
    _print(console, Text(f"Documents as the model sees them; what is trained is {marked}"))
    for segments, origin in zip(facts["samples"], facts["sample_origins"], strict=True):
        title = f"row {origin['row']} of {origin['file']}"
        if origin["source"] != origin["file"]:
            title = f"{origin['source']}: {title}"
        if "answer" in origin:
            title += f" ({origin['answer']})"
        _print(console, Text(f"\n{printable(title)}", style="bold"))
        for text, trained in segments:
            _print(console, _segment(text, trained, coloured=console.is_terminal), end="")
        console.print()


def _segment(text: str, trained: bool, *, coloured: bool) -> Text:
    shown = "\n".join(printable(line) for line in text.split("\n"))
    if not trained:
        return Text(shown)
    return Text(shown, style=TRAINED) if coloured else Text(f"{OPEN}{shown}{CLOSE}")


def _print(console: Console, text: Text, *, end: str = "\n") -> None:
    console.print(text, end=end, soft_wrap=True, highlight=False)
