"""Make `workflow/resources/pydocs/pairs-*.jsonl.gz` from the questions and answers beside them.

    python -m tests.support.make_pairs

The rejected answer to a question is the right one of another: of an object of the same kind (a
method, a class, ...) of the same class, else of the same package, else of any; about as long, in
other words. So it reads well, and only what is asked tells it from the chosen one. Draws are hashes
of names, so the files are the same each time. Of train a fifth of the objects is taken, of held-out
every one, and each split's answers come from itself.
"""

import gzip
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

Row = dict[str, str]

FOLDER = Path(__file__).parents[2] / "workflow" / "resources" / "pydocs"
TAKEN = {"train": 5, "heldout": 1}  # one of so many objects
KINDS = ("method", "class", "function", "exception", "raised", "module", "property", "constant")
LENGTHS = (0.6, 1.6)  # of the rejected answer over the chosen one, characters
MOST_ALIKE = 0.3  # Jaccard similarity of their words


def pairs(split: str) -> Iterator[Row]:
    rows = read_rows(FOLDER / f"{split}.jsonl.gz")
    groups: list[dict[tuple[str, str], list[Row]]] = []
    for place in PLACES:
        groups.append(defaultdict(list))
        for row in rows:
            groups[-1][kind(row), place(row["source"])].append(row)
    done = set()
    for row in rows:
        source = row["source"]
        if source in done or drawn(source) % TAKEN[split]:
            continue
        near = (
            fitting
            for place, group in zip(PLACES, groups, strict=True)
            if (fitting := [o for o in group[kind(row), place(source)] if fits(o, row)])
        )
        if others := next(near, None):
            other = min(others, key=lambda o: drawn(source + o["source"] + o["prompt"]))
            yield {
                "prompt": row["prompt"],
                "chosen": row["completion"],
                "rejected": other["completion"],
                "source": source,
            }
            done.add(source)


# Where an object is, from near to far.
PLACES: tuple[Callable[[str], str], ...] = (
    lambda source: source.rpartition(".")[0],
    lambda source: source.partition(".")[0],
    lambda source: "",
)


def kind(row: Row) -> str:
    question = re.sub(r"`[^`]*`", "", row["prompt"]).lower()
    return next((known for known in KINDS if known in question), "")


def fits(other: Row, row: Row) -> bool:
    """Tell whether the answer of `other` may stand as a wrong one to `row`."""
    right, wrong = row["completion"], other["completion"]
    if not LENGTHS[0] <= len(wrong) / len(right) <= LENGTHS[1]:
        return False
    ours, theirs = (set(re.findall(r"[a-z]+", text.lower())) for text in (right, wrong))
    is_other = other["source"] != row["source"]
    return is_other and len(ours & theirs) < MOST_ALIKE * max(1, len(ours | theirs))


def drawn(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


def read_rows(path: Path) -> list[Row]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def main() -> None:
    for split in TAKEN:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in pairs(split))
        path = FOLDER / f"pairs-{split}.jsonl.gz"
        with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
            file.write(lines.encode())
        print(path, lines.count("\n"), "pairs", hashlib.sha256(lines.encode()).hexdigest())


if __name__ == "__main__":
    main()
