"""Tokens folders of sampled answers: `texts` (an answer to a prompt), `pairs` (the better one
first), or `groups` (all answers, with advantages).

They are made beside a folder of texts, whose tokenizer and chat template they keep, and its
held-out documents unless they are pairs. The answers' tokens are those that were sampled: no text
is encoded again."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from workflow.lib.data.tokens.manifest import Facts, percentiles, row_facts, segments
from workflow.lib.data.tokens.packing import pack
from workflow.lib.data.tokens.token_store import (
    ARRAYS,
    MANIFEST,
    REJECTS,
    TRUNCATED,
    WEIGHTS,
    optional_files,
)
from workflow.lib.data.tokens.token_writer import Window, write_heldout, write_train
from workflow.lib.settings.objectives import Examples
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import file_sha256, provenance, read_checked_json, write_checked_json

HELDOUT = [name for name in ARRAYS if name.startswith("heldout.")]
OPTIONAL = [*optional_files("advantages"), *optional_files("sampled_log_probs")]
SHOWN_GROUPS = 3


class Answer(NamedTuple):
    ids: Sequence[int]  # as sampled, at least one
    log_probs: Sequence[float]  # of each id, by the sampler
    advantage: float


class Group(NamedTuple):
    """The answers to one prompt."""

    prompt: Sequence[int]  # token ids, at least one
    answers: Sequence[Answer]
    file: str  # that names the prompt
    row: int  # its number in the file, from 1


def write_groups(
    folder: Path,
    groups: Sequence[Group],
    *,
    texts: Path,
    seq_len: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples = "groups",
    heldout: Sequence[Group] = (),
) -> Facts:
    """Write the tokens folder of groups into an empty folder; return its manifest. The answers of a
    group are neighbours in a row of `seq_len` tokens; a group too long for one continues in
    another. texts: tokens folder of the prompts' rows. heldout: of pairs, the held-out ones. Raises
    `UserError` if a document, or a pair, does not fit into a row."""
    window = _window(groups, seq_len=seq_len, seed=seed, examples=examples)
    facts = read_checked_json(texts / MANIFEST)
    rows = write_train(
        folder,
        [window],
        seq_len=seq_len,
        pad_token_id=facts["pad_token_id"],
        optional=[*window.optional],
    )
    copied = [REJECTS, TRUNCATED]
    heldout_facts = facts["splits"]["heldout"]
    if examples == "pairs":
        pairs = _window(heldout, seq_len=seq_len, seed=seed, examples=examples)
        write_heldout(folder, [(pairs.ids, pairs.mask, pairs.lengths)])
        sources = [{"source": heldout_facts["sources"][0]["source"], "documents": 2 * len(heldout)}]
        heldout_facts = _split_facts(pairs, len(heldout)) | {"sources": sources}
    else:
        weights = WEIGHTS[1:] if examples == "texts" else ()
        copied += [*HELDOUT, *(name for name in weights if name in facts["files"])]
    for name in copied:
        shutil.copyfile(texts / name, folder / name)
    shown = [(group, answer) for group in groups[:SHOWN_GROUPS] for answer in group.answers[:2]]
    facts |= {
        "seq_len": seq_len,
        "examples": examples,
        "splits": {
            "train": _split_facts(window, len(groups))
            | {
                "packed_rows": rows,
                "fill": int(window.lengths.sum()) / (rows * seq_len),
            }
            | row_facts(folder, examples),
            "heldout": heldout_facts,
        },
        "samples": [segments(_document(group, answer), tokenizer) for group, answer in shown],
        "sample_origins": [
            {
                "source": group.file,
                "file": group.file,
                "row": group.row,
                "answer": f"advantage {answer.advantage:+.3g}",
            }
            for group, answer in shown
        ],
        "files": {path.name: file_sha256(path) for path in sorted(folder.iterdir())},
        "provenance": provenance(),
    }
    write_checked_json(folder / MANIFEST, facts)
    return facts


def _document(group: Group, answer: Answer) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    ids = np.array([*group.prompt, *answer.ids], dtype=np.uint32)
    return ids, np.arange(len(ids)) >= len(group.prompt)


def _window(groups: Sequence[Group], *, seq_len: int, seed: int, examples: Examples) -> Window:
    documents = [_document(group, answer) for group in groups for answer in group.answers]
    answers = [answer for group in groups for answer in group.answers]
    lengths = np.array([len(ids) for ids, _ in documents])
    if lengths.max() > seq_len:
        raise UserError(
            f"data.seq_len = {seq_len}: a prompt and its answer have {lengths.max()} tokens. Raise "
            "it, or lower answers.max_new_tokens"
        )
    mask = np.concatenate([trained for _, trained in documents])
    log_probs = np.zeros(len(mask), dtype=np.float32)
    log_probs[mask] = np.concatenate([answer.log_probs for answer in answers])
    advantages = np.array([answer.advantage for answer in answers], dtype=np.float32)
    parts = [_parts(group, seq_len) for group in groups]
    sizes = np.array([size for group_parts in parts for size in group_parts])
    assert examples == "groups" or len(sizes) == len(groups), "a pair fits into a row"
    firsts = np.cumsum(sizes) - sizes
    packing = pack(np.add.reduceat(lengths, firsts), seq_len=seq_len, seed=seed)
    return Window(
        ids=np.concatenate([ids for ids, _ in documents]),
        mask=mask,
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        packing=packing.units_to_documents(sizes),
        optional=dict(zip(OPTIONAL, (np.repeat(advantages, lengths), log_probs), strict=True))
        if examples == "groups"
        else {},
    )


def _parts(group: Group, seq_len: int) -> list[int]:
    """Return how many answers of a group each of its rows has: as many as fit."""
    sizes, free = [0], seq_len
    for answer in group.answers:
        assert group.prompt, "the first token of an answer is predicted from a prompt"
        assert len(answer.ids) == len(answer.log_probs) > 0, "an answer has tokens"
        length = len(group.prompt) + len(answer.ids)
        if length > free and sizes[-1]:
            sizes.append(0)
            free = seq_len
        sizes[-1] += 1
        free -= length
    return sizes


def _split_facts(window: Window, groups: int) -> Facts:
    return {
        "rows_read": groups,
        "rows_kept": groups,
        "rows_dropped": 0,
        "documents": len(window.lengths),
        "truncated": 0,
        "tokens": int(window.lengths.sum()),
        "trained_tokens": int(window.mask.sum()),
        "length_percentiles": percentiles(np.bincount(window.lengths)),
        "longest": [],
        "duplicates": 0,
    }
