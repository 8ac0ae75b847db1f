"""Docstrings to plain prose: paragraphs, reStructuredText marks, sentence ends."""

import re

MAX_ANSWER_CHARS = 600  # long enough for a summary, short enough for a small model's context
SHORT_ANSWER_CHARS = 160  # an answer below this takes the next paragraph too
MIN_ANSWER_WORDS = 4

_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)(?<!vs\.)\s+(?=[A-Z`\"'(“])")
_SIGNATURE_LINE = re.compile(r"^[\w.]*\w\([^)]*\)[)\]]*\s*(?:(?:->|-->|=>|--)\s*(.*))?$")
_FIELD = re.compile(
    r"^(?::\w|@\w|[-*+•] |\d+[.)] |>>> |\.\. |[=*~^_-]{3,}$|->|[A-Z][\w ]*:$|\||\w+ +(?::|--) )"
)
_CODE = re.compile(r" -> |^[^\n]* = [^\n]*\)$")  # signatures run together, or one assignment
_DEFINITION = re.compile(r"^(?:(?:class|exception|classmethod|async|static) )?[\w.]+(?:\(.*\))?$")


def paragraphs(doc: str) -> list[str]:
    """Return the blocks between blank lines, without signature lines at the start."""
    blocks = [block.strip("\n") for block in re.split(r"\n\s*\n", doc.strip("\n"))]
    blocks = [block for block in blocks if block.strip()]
    if blocks:
        blocks[0] = _without_signature_lines(blocks[0])
    return [block for block in blocks if block]


def _without_signature_lines(block: str) -> str:
    lines = block.split("\n")
    while lines and (match := _SIGNATURE_LINE.match(lines[0].strip())):
        result = re.sub(r"^v, ", "", match.group(1) or "")  # "D.pop(k) -> v, remove the key ..."
        if result and len(result.split()) >= MIN_ANSWER_WORDS:
            lines[0] = result[0].upper() + result[1:]
            break
        lines.pop(0)
    return "\n".join(lines)


def prose(doc: str) -> list[str]:
    """Return the leading run of prose paragraphs, each as one line.

    Code, lists and fields end it.
    """
    texts: list[str] = []
    for block in paragraphs(doc):
        if not is_prose(block):
            break
        texts.append(clean(block))
    return texts


def is_prose(block: str) -> bool:
    """Whether a block is running text rather than code, a table, a list or a field list."""
    lines = block.split("\n")
    if any(line.startswith((" ", "\t")) for line in lines) or any(map(_FIELD.match, lines)):
        return False
    if all(map(_DEFINITION.match, lines)) or _CODE.search(block):
        return False
    words = re.findall(r"[A-Za-z]{2,}", block)
    return len(words) >= 2 and sum(map(len, words)) >= 0.55 * len("".join(block.split()))


def clean(block: str) -> str:
    """Return a block on one line, with the marks of reStructuredText reduced to backquotes."""
    text = " ".join(block.split())
    text = re.sub(r":[\w:+-]+:`~?([^`<]+?)(?: ?<[^>]*>)?`", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    if text.endswith(":"):  # introduces code or a list, which is not part of the answer
        text = without_last_sentence(text) or text.rstrip(": ")
    return re.sub(r"[,;]$", "", text)


def without_last_sentence(text: str) -> str:
    """Return the text up to its last sentence; "" if it has only one."""
    ends = [match.start() for match in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else ""


def answer(blocks: list[str]) -> str:
    """Return the first prose block, cut at a sentence end, or "" if unusable.

    The next one is added if the first is short.
    """
    text = ""
    for block in blocks:
        if text and len(text) + 1 + len(block) > MAX_ANSWER_CHARS:
            break
        text = f"{end_sentence(text)} {block}".strip() if text else block
        if len(text) >= SHORT_ANSWER_CHARS:
            break
    text = cut(text)
    if len(text.split()) < MIN_ANSWER_WORDS:
        return ""
    return end_sentence(text[0].upper() + text[1:] if text[:2].islower() else text)


def cut(text: str, max_chars: int = MAX_ANSWER_CHARS) -> str:
    """Return as many whole sentences as fit into `max_chars`, or "" if the first does not."""
    if len(text) <= max_chars:
        return text
    ends = [match.start() for match in _SENTENCE_END.finditer(text) if match.start() <= max_chars]
    return text[: ends[-1]] if ends else ""


def end_sentence(text: str) -> str:
    """Return the text with a full stop unless it has a mark of its own."""
    return text if not text or text.endswith((".", "!", "?", ".)", '."', "…")) else f"{text}."


def first_sentence(text: str) -> str:
    """Return the text up to its first sentence end."""
    match = _SENTENCE_END.search(text)
    return text[: match.start()] if match else text


def prose_anywhere(document: str) -> list[str]:
    """Return every prose paragraph of a document, each as one line; other blocks are left out."""
    return [clean(block) for block in paragraphs(document) if is_prose(block)]
