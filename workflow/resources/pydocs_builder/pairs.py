"""Questions and answers about documented objects and about sections of the language reference.

Which questions an object gets, and in which words, follows from a hash of its name: the choice
is varied, yet the same on every machine.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import text, topics
from .harvest import DocumentedObject
from .near_duplicates import normalised

# Out of the questions: modules that PEP 594 and Python 3.12 remove; internals without readers
UNASKED_MODULES = re.compile(
    r"(aifc|asynchat|asyncore|audioop|cgi|cgitb|chunk|crypt|imghdr|imp|mailcap|nntplib|pipes|smtpd"
    r"|sndhdr|spwd|sunau|telnetlib|uu|xdrlib|pydoc|pickletools|pdb\.Pdb\.do_\w+|sre_\w+"
    r"|multiprocessing\.popen_\w+"
    r"|xml\.dom\.expatbuilder|multiprocessing\.resource_\w+)(\.|$)"
)
CALL_SHARE = 0.4  # of objects with parameters: asked for the call rather than for the purpose
NAME_SHARE = 0.12  # of objects: asked for the name that fits a description, besides
MIN_DETAIL_CHARS = 120
MIN_DESCRIPTION_WORDS = 5
UNASKED_TITLES = frozenset({"Overview"})  # say nothing out of their place

DESCRIBE = {
    "function": (
        "What does `{name}` do?",
        "What is the function `{name}` for?",
        "Describe the function `{name}`.",
        "What happens when I call `{name}`?",
    ),
    "method": (
        "What does the method `{name}` do?",
        "What does `{short}` do on `{owner}`?",
        "Describe the method `{name}`.",
        "When would I call `{name}`?",
    ),
    "constructor": ("What does the constructor of `{owner}` do?", "How is `{owner}` initialised?"),
    "class": (
        "What is `{name}`?",
        "What is the class `{name}` for?",
        "Describe the class `{name}`.",
    ),
    "exception": ("What does the exception `{name}` mean?", "When is `{name}` raised?"),
    "attribute": (
        "What is the attribute `{name}`?",
        "What does `{name}` hold?",
        "What does the attribute `{short}` of `{owner}` tell me?",
    ),
    "module": (
        "What is the module `{name}` for?",
        "What does the module `{name}` provide?",
        "Describe Python's module `{name}`.",
    ),
}
CALL = (
    "How do I call `{name}`?",
    "What are the parameters of `{name}`?",
    "Show me the signature of `{name}`, and say what it does.",
)
DETAIL = (
    "What else should I know about `{name}`?",
    "Tell me more about `{name}`.",
    "What are the details of `{name}`?",
)
NAME = "Which {kind} {scope} fits this description? {description}"
SECTION = (
    "Explain {title} in Python.",
    "What does Python's language reference say about {title}?",
)


@dataclass(frozen=True)
class Pair:
    """A question with its answer.

    `source` is the object it is about; `description` a text that the prompt reveals.
    """

    prompt: str
    completion: str
    source: str
    description: str = ""

    def as_row(self) -> dict[str, str]:
        """Return the columns of the JSONL files."""
        return {"prompt": self.prompt, "completion": self.completion, "source": self.source}


def fraction(*parts: str) -> float:
    """Return a number in [0, 1) that is fixed by the parts and otherwise arbitrary."""
    digest = hashlib.sha256("\n".join(parts).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def pick(options: Sequence[str], *parts: str) -> str:
    """Return one of the options, fixed by the parts."""
    return options[int(fraction("pick", *parts) * len(options))]


def all_pairs(
    objects: Sequence[DocumentedObject], sections: Sequence[topics.Section]
) -> list[Pair]:
    """Return every pair, sorted by source; of pairs with the same answer only the first stays."""
    candidates: list[Pair] = []
    for item in objects:
        if item.is_public and not UNASKED_MODULES.match(item.name):
            candidates += object_pairs(item)
    for section in sections:
        if section.title not in UNASKED_TITLES:
            candidates += section_pairs(section)
    unique: dict[str, Pair] = {}
    prompts: set[str] = set()
    for pair in sorted(candidates, key=lambda p: (p.source, p.prompt)):
        if pair.prompt not in prompts:
            prompts.add(pair.prompt)
            unique.setdefault(normalised(pair.completion), pair)
    return list(unique.values())


def object_pairs(item: DocumentedObject) -> Iterator[Pair]:
    """Yield the pairs about one object: its purpose or call, and perhaps details and name."""
    blocks = text.prose(item.doc)
    summary = text.answer(blocks)
    if not summary:
        return
    words = {"name": item.name, "short": item.short_name, "owner": item.name.rpartition(".")[0]}
    call = text.cut(f"Call `{item.name}{item.parameters}`. {summary}")
    has_call = len(item.parameters) > len("()") and item.short_name != "__init__" and call
    if has_call and fraction("call", item.name) < CALL_SHARE:
        yield Pair(pick(CALL, item.name).format(**words), call, item.name)
    else:
        kind = "constructor" if item.short_name == "__init__" else item.kind
        yield Pair(pick(DESCRIBE[kind], item.name).format(**words), summary, item.name)
    detail = remaining_answer(blocks, summary)
    if detail:
        yield Pair(pick(DETAIL, item.name).format(**words), detail, item.name)
    if fraction("name", item.name) < NAME_SHARE and (question := name_question(item)):
        yield Pair(question, f"`{item.name}`", item.name, describing_sentence(item))


def remaining_answer(blocks: Sequence[str], summary: str) -> str:
    """Return an answer from the prose that the summary did not use, or ""."""
    used = normalised(summary)
    rest = [block for block in blocks if normalised(block) not in used]
    first = blocks[0] if blocks else ""
    if rest and rest[0] == first:  # the summary is a part of the first block
        rest = rest[1:]
    detail = text.answer(rest)
    return detail if len(detail) >= MIN_DETAIL_CHARS else ""


def describing_sentence(item: DocumentedObject) -> str:
    """Return a sentence that describes the object without naming it, or ""."""
    summary = text.answer(text.prose(item.doc))
    sentence = text.first_sentence(summary)
    names_it = re.search(rf"\b{re.escape(item.short_name)}\b", sentence)
    if names_it or len(sentence.split()) < MIN_DESCRIPTION_WORDS:
        return ""
    return sentence


def name_question(item: DocumentedObject) -> str:
    """Return the question for the object's name given its description, or "" without one."""
    description = describing_sentence(item)
    if not description or item.kind == "module" or item.short_name == "__init__":
        return ""
    owner = item.name.rpartition(".")[0]
    if item.kind in ("method", "attribute"):
        scope = f"of `{owner}`"
    else:
        scope = f"of the module `{owner}`" if owner else "among Python's built-ins"
    return NAME.format(kind=item.kind, scope=scope, description=description)


def section_pairs(section: topics.Section) -> Iterator[Pair]:
    """Yield pairs about a section of the language reference and about the names it defines."""
    blocks = [topics.with_backquotes(b) for b in text.prose_anywhere(section.text)]
    title = topics.with_backquotes(section.title)
    if not re.search("[A-Z]", re.sub("`[^`]*`", "", title[1:])):
        title = title[0].lower() + title[1:]
    if summary := text.answer(blocks):
        yield Pair(pick(SECTION, section.source).format(title=title), summary, section.source)
        if detail := remaining_answer(blocks, summary):
            yield Pair(f"Tell me more about {title} in Python.", detail, section.source)
    for item in topics.definitions(section):
        described = [topics.with_backquotes(b) for b in text.prose(item.text)]
        if summary := text.answer(described):
            usage = f"`{item.name}{item.parameters}`"
            yield Pair(f"How does the language reference define {usage}?", summary, item.name)
            if detail := remaining_answer(described, summary):
                yield Pair(f"What more does the reference say on {usage}?", detail, item.name)
