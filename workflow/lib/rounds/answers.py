"""Sampled answers on disk: a shard of JSON lines for some prompts, and a manifest written last.

Finished shards lie in a folder beside the output until all are done, so a killed stage goes on
with the next one."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from workflow.lib.artifacts.read_records import read_record, read_records
from workflow.lib.artifacts.records import Provenance, Record
from workflow.lib.data.tokens.work_folder import BEGUN_WITH, begin_shards
from workflow.lib.system.checksums import RecordedFile, check_files, write_lines
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import (
    file_sha256,
    replace_folder,
    short_hash,
    write_checked_json,
)

MANIFEST = "manifest.json"
SHARD_ANSWERS = 512  # at least; seconds to minutes of work


class Answer(Record):
    """An answer as it was sampled."""

    ids: list[int]  # token ids, with the token that ended it
    log_probs: list[float]
    """Log p of each token by the sampler's model, nats, before temperature and top_p."""
    finish: Literal["stop", "length"]  # by a token or text that ends answers; by its length
    text: str  # without special tokens


class AnsweredPrompt(Record):
    """A prompt of a row, with its answers."""

    split: Literal["train", "heldout"]  # whether it is trained
    file: str  # file of the row, as the settings name it
    row: int  # its number in the file, from 1
    values: dict[str, Any]  # the row, by column
    prompt: list[int]  # token ids
    text: str  # the prompt without special tokens
    answers: list[Answer] = Field(default=[])


class AnswersManifest(Record):
    """`manifest.json` of a folder of answers, written by `sample_answers`."""

    advice: ClassVar[str] = "Delete its folder and repeat the command; sample_answers makes it."

    sampler: str  # the program that sampled
    model_files: dict[str, str]  # SHA-256 of the model's files
    prompts: int  # prompts with answers
    left_out: dict[str, int]  # rows without answers, by reason
    tokens: int  # sampled tokens
    finish: dict[str, int]  # answers by the reason of their end
    unreadable: int  # answers with bytes that are no text
    shards: dict[str, str]  # SHA-256 of each file, in order
    provenance: Provenance


@dataclass(frozen=True)
class Shard:
    name: str
    prompts: Sequence[AnsweredPrompt]


class AnswerWriter:
    """Writes the folder `output`; keeps finished shards of equal `facts` and prompts."""

    def __init__(
        self, output: Path, prompts: Sequence[AnsweredPrompt], *, facts: Any, per_prompt: int
    ) -> None:
        self._output = output
        self._folder = output.with_name(f".{output.name}.partial")
        self._key = short_hash([facts, [prompt.as_json() for prompt in prompts]])
        size = math.ceil(SHARD_ANSWERS / per_prompt)
        self.shards = [
            Shard(f"answers-{number:05d}.jsonl", prompts[first : first + size])
            for number, first in enumerate(range(0, len(prompts), size))
        ]

    def prepare(self) -> list[Shard]:
        """Make the folder of shards; return those without answers."""
        begin_shards(self._folder, key=self._key)
        return [shard for shard in self.shards if not self._is_finished(shard)]

    def _is_finished(self, shard: Shard) -> bool:
        try:
            return len(read_records(self._folder / shard.name, AnsweredPrompt)) > 0
        except UserError:
            return False

    def add(self, shard: Shard, answers: Sequence[Sequence[Answer]]) -> None:
        """Write a shard. answers: of each prompt."""
        rows = (
            prompt.model_copy(update={"answers": list(own)}).model_dump()
            for prompt, own in zip(shard.prompts, answers, strict=True)
        )
        write_lines(self._folder / shard.name, rows)

    def finish(
        self, *, sampler: str, model_files: dict[str, str], left_out: Counter[str]
    ) -> AnswersManifest:
        """Write the manifest and rename the folder, after all shards."""
        names = [shard.name for shard in self.shards]
        prompts = _read(self._folder / name for name in names)
        every = [answer for prompt in prompts for answer in prompt.answers]
        manifest = AnswersManifest(
            sampler=sampler,
            model_files=model_files,
            prompts=len(prompts),
            left_out=dict(left_out),
            tokens=sum(len(answer.ids) for answer in every),
            finish=dict(Counter(answer.finish for answer in every)),
            unreadable=sum("\ufffd" in answer.text for answer in every),
            shards={name: file_sha256(self._folder / name) for name in names},
            provenance=Provenance.now(),
        )
        write_checked_json(self._folder / MANIFEST, manifest.as_json())
        (self._folder / BEGUN_WITH).unlink()
        replace_folder(self._folder, self._output)
        return manifest


def read_answers(folder: Path) -> list[AnsweredPrompt]:
    """Return the prompts of a folder of answers; raises `UserError` if it is damaged."""
    shards = read_record(folder / MANIFEST, AnswersManifest).shards
    check_files([RecordedFile(folder, name, sha256) for name, sha256 in shards.items()])
    return _read([folder / name for name in shards])


def _read(shards: Iterable[Path]) -> list[AnsweredPrompt]:
    return [prompt for shard in shards for prompt in read_records(shard, AnsweredPrompt)]
