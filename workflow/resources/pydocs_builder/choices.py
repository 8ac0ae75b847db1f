"""Multiple-choice items about held-out objects: which of four names fits a description.

The names come from one class or module, so that the module's subject does not give the answer
away; the other three may be objects of the train split. The prompt has the wording of the train
split's questions for names.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .harvest import DocumentedObject
from .near_duplicates import normalised
from .pairs import UNASKED_MODULES, describing_sentence, fraction, name_question

NUM_CHOICES = 4


@dataclass(frozen=True)
class Item:
    """A question, its distinct choices, and the index of the right one."""

    question: str
    choices: list[str]
    answer: int
    source: str

    def as_row(self) -> dict[str, object]:
        """Return the columns of the JSONL file."""
        return {
            "question": self.question,
            "choices": self.choices,
            "answer": self.answer,
            "source": self.source,
        }


def build_items(objects: Sequence[DocumentedObject], heldout_sources: frozenset[str]) -> list[Item]:
    """Return an item per held-out object with a description and enough siblings, by name.

    The right answer takes the positions 0 to 3 in turn, in an order unrelated to the names.
    """
    described = [o for o in objects if o.is_public and not UNASKED_MODULES.match(o.name)]
    asked = [o for o in described if o.name in heldout_sources and name_question(o)]
    asked.sort(key=lambda o: fraction("position", o.name))
    items = []
    for item in asked:
        others = _distractors(item, described)
        if len(others) == NUM_CHOICES - 1:
            position = len(items) % NUM_CHOICES
            names = [*others[:position], item.name, *others[position:]]
            choices = [f"`{name}`" for name in names]
            items.append(Item(name_question(item), choices, position, item.name))
    return sorted(items, key=lambda i: i.source)


def _distractors(item: DocumentedObject, objects: Sequence[DocumentedObject]) -> list[str]:
    """Return three names of the same kind and class or module, with other descriptions."""
    own = normalised(describing_sentence(item))
    siblings = [
        o
        for o in objects
        if o.name != item.name
        and o.short_name not in (item.short_name, "__init__")
        and o.kind == item.kind
        and o.name.rpartition(".")[0] == item.name.rpartition(".")[0]
        and normalised(describing_sentence(o)) != own
    ]
    siblings.sort(key=lambda o: fraction("distractor", item.name, o.name))
    return [o.name for o in siblings[: NUM_CHOICES - 1]]
