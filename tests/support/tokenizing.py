"""A place to run the stage `tokenize_dataset` in, with good data to begin with, and what its tests
look at."""

import json
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.support.forked_stage import settings_file
from tests.support.models import tiny_llama
from tests.support.tiny import tiny_tokenizer
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.settings.config import DataConfig
from workflow.scripts.command import stage_parser
from workflow.scripts.tokenize_dataset import main

SEQ_LEN = 61  # prime
NUM_TRAIN, NUM_HELDOUT = 53, 7
LONG = {"prompt": "q", "completion": "long " * SEQ_LEN}


def rows(count: int, *, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Question {n}?", "completion": f"The answer is {'very ' * (n % 5)}{n}."}
        for n in range(start, start + count)
    ]


def save_rows(path: Path, content: list[Any]) -> Path:
    lines = [item if isinstance(item, str) else json.dumps(item) for item in content]
    path.write_text("".join(line + "\n" for line in lines))
    return path


class Stage:
    """One place to run the stage in, with good data to begin with."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.train = save_rows(folder / "train.jsonl", rows(NUM_TRAIN))
        self.heldout = save_rows(folder / "heldout.jsonl", rows(NUM_HELDOUT, start=1000))
        self.output = folder / "tokens"
        self.rejects = folder / "tokens.rejects.jsonl"
        self.processes = 1
        self.examples = "texts"
        self.asked = {}
        self.dataset = Path()

    def config(self, **settings: Any) -> dict[str, Any]:
        heldout = None if self.heldout is None else str(self.heldout)
        names = {"train": str(self.train), "heldout": heldout, "seq_len": SEQ_LEN}
        names["near_duplicates"] = "keep"  # these rows are all alike
        data = DataConfig.model_validate(names | settings).model_dump(mode="json")
        return {"data": data, "examples": self.examples} | self.asked

    def run(self, **settings: Any) -> TokenStore:
        parser = stage_parser("")
        for option in ("dataset", "tokenizer", "output"):
            parser.add_argument(f"--{option}", type=Path, default=Path())
        parser.add_argument("--processes", type=int)
        main(
            parser.parse_args(
                ["--config", str(settings_file(self.config(**settings))), *self.options()]
            )
        )
        return TokenStore.open(self.output)

    def options(self) -> list[str]:
        folders = ["--tokenizer", str(self.tokenizer), "--output", str(self.output)]
        return [*folders, "--dataset", str(self.dataset), "--processes", str(self.processes)]

    def command_line(self, **settings: Any) -> list[str]:
        """Return the command that does the same in a process of its own."""
        module = [sys.executable, "-m", "workflow.scripts.tokenize_dataset"]
        options = ["--config", str(settings_file(self.config(**settings))), *self.options()]
        return [*module, *options, "--log", str(self.folder / "log" / "tokenize.log")]


def tokenized_model(folder: Path) -> Path:
    """Save a tiny model in bf16 with its tokenizer to `folder`/model, and tokenize the good data;
    return `folder`."""
    tokenizer = tiny_tokenizer(folder / "model")
    tiny_llama(folder / "model", dtype=torch.bfloat16, vocab_size=len(tokenizer))
    Stage(folder, folder / "model").run()
    return folder


def documents_of(store: TokenStore, *, of: Any = None) -> dict[tuple[int, ...], list[bool]]:
    """Every document of the training rows, padding left out, with its mask, or its part of `of`."""
    documents = {}
    masks = store.loss_mask if of is None else of
    for ids, mask, positions in zip(store.input_ids, masks, store.position_ids, strict=True):
        edges = [*np.flatnonzero(positions == 0).tolist(), store.seq_len]
        for start, stop in pairwise(edges):
            if mask[start:stop].any():
                documents[tuple(ids[start:stop].tolist())] = mask[start:stop].tolist()
    return documents


@cache
def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def expected_ids(stage: Stage, row: dict[str, Any]) -> list[int]:
    messages = [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["completion"]},
    ]
    return _tokenizer(stage.tokenizer).apply_chat_template(messages)["input_ids"]
