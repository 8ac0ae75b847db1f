"""The files of a split to shards: every row is encoded, or dropped with a reason, and counted.

One process reads the files and hands out chunks of bytes; all others parse and encode them into
shards of the work folder. Chunks with a finished shard are skipped, so a killed run loses only the
chunks in work. A row is *unusable* if it is broken, empty or of a wrong type; too many of them stop
the run. So does any other drop that no setting asks for; a row that is only too long is cut."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from workflow.lib.checkpoints.tokenizer import read_chat_template, read_tool_template
from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.chat_template import keys_in_template, with_arguments
from workflow.lib.data.encoding.keys_read import KeyAudit
from workflow.lib.data.encoding.preference_rows import begin_judged, to_judged
from workflow.lib.data.encoding.row_columns import WITHOUT_TEMPLATE, choose_format
from workflow.lib.data.encoding.row_formats import plain, to_sample
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.data.reading.data_file import column_names, read_chunks
from workflow.lib.data.reading.row_chunks import NOT_UTF8, Chunk, Row, printable
from workflow.lib.data.reading.sources import Source
from workflow.lib.data.tokens.encoded_shards import (
    FIRST_REASONS,
    RowCounts,
    Shard,
    ShardFacts,
    encode_rows,
    is_finished,
    read_facts,
)
from workflow.lib.data.tokens.overlong import Begun, divide_chat
from workflow.lib.data.tokens.process_pool import map_in_order
from workflow.lib.data.tokens.work_folder import Listing, reason_kind
from workflow.lib.settings.config import DataConfig
from workflow.lib.settings.data import DataColumns, Format, Overlong
from workflow.lib.settings.objectives import Examples
from workflow.lib.system.errors import setting_error
from workflow.lib.system.files import file_sha256
from workflow.lib.system.progress import Progress

# Special tokens that the data spell: such a text was rendered already. As ordinary text it would
# teach the model to spell tokens; as tokens, users' texts could end a turn. So the user says which.
SETTING = "data.special_tokens_in_text"
MAX_SHARE = 0.05  # of a file's rows; texts about chat templates are rarer in public datasets
ENOUGH_ROWS = 2000  # a file is judged before its end from here on


FEW_CHUNKS = 4  # 4,000 rows or 16 MiB at most: no time is won by sharing them


@dataclass(frozen=True)
class Encoding:
    """A process's inputs for encoding rows, by number of the source. The encoder is made once and
    shared by forks (a second for 128,000 tokens). chat_template: as exported."""

    encoder: SampleEncoder
    chat_template: str | None
    formats: tuple[Format, ...]
    columns: tuple[DataColumns, ...]
    group_by: tuple[str | None, ...]
    overlong: tuple[Overlong, ...]
    settings: DataConfig
    examples: Examples = "texts"


@dataclass(frozen=True)
class ChunkTask:
    """A chunk of a source for the shard at `stem`; None if that is finished. file: its number in
    the split."""

    source: int
    file: int
    chunk: Chunk | None
    stem: Path


@dataclass
class FileRows(RowCounts):
    source: int
    path: Path
    file: str
    sha256: str
    dropped_by_reason: Counter[str] = field(default_factory=Counter)
    blank_lines: int = 0  # lines that hold no row, of files in which a line is one

    def add(self, facts: ShardFacts) -> None:
        """Add the counts of one of the file's shards."""
        self.rows_read += facts.rows_read
        self.counts.update(facts.counts)
        self.unrendered.update(facts.unrendered)
        self.columns = list(dict.fromkeys([*self.columns, *facts.columns]))
        self.not_read.update(facts.not_read)
        self.dropped_by_reason.update(reason_kind(r["reason"]) for r in facts.rejects)
        self.first_reasons += facts.first_reasons[: FIRST_REASONS - len(self.first_reasons)]
        self.needed_tokens = max(self.needed_tokens, facts.needed_tokens)


@dataclass
class Corpus:
    """The results of one split: shards in the order of sources, files and rows."""

    sources: Sequence[Source]
    files: list[FileRows]
    shards: list[Shard] = field(default_factory=list)
    rows_read: int = 0

    def add(self, stem: Path, file: int) -> ShardFacts:
        """Append the finished shard at `stem` of file `file`; return its facts."""
        facts = read_facts(stem)
        shard = Shard(stem, file, self.rows_read, facts.rows_read, facts.documents, facts.tokens)
        self.shards.append(shard)
        self.files[file].add(facts)
        self.rows_read += facts.rows_read
        return facts


def open_corpora(splits: Mapping[str, Sequence[Source]]) -> dict[str, Corpus]:
    """Return the corpus of each split with hashed files, before any row is read."""
    return {
        split: Corpus(
            sources=sources,
            files=[
                FileRows(number, file.path, file.file, file_sha256(file.path))
                for number, source in enumerate(sources)
                for file in source.files
            ],
        )
        for split, sources in splits.items()
    }


def encode_corpus(
    corpus: Corpus, *, split: str, encoding: Encoding, work: Path, processes: int
) -> None:
    """Encode every row of a split's files into shards of the folder `work`. Raises `UserError` if
    many rows spell special tokens."""

    def check(file: FileRows) -> None:
        is_silent = encoding.settings.special_tokens_in_text is None
        special = file.counts["special_token_texts"]
        if is_silent and special > max(1, MAX_SHARE * file.rows_read):
            raise setting_error(
                SETTING,
                None,
                f"{special} of {file.rows_read} rows of {file.file} spell special "
                "tokens that the chat template or the tokenizer writes, such as an end of turn: "
                "these rows seem to be rendered already",
                "Set it to tokens to read them as the tokens, or to text to train them as ordinary "
                "text; or take them out of the data",
            )

    done = map_in_order(
        _tasks(corpus, split, work),
        prepare=partial(make_encoder, encoding),
        processes=processes,
        alone=FEW_CHUNKS,
    )
    with Progress(f"data.{split}", total=None, unit="rows") as progress:
        for number, stem in done:
            file = corpus.files[number]
            progress.add(corpus.add(stem, number).rows_read)
            if file.rows_read >= ENOUGH_ROWS:
                check(file)
    for file in corpus.files:
        check(file)


def _tasks(corpus: Corpus, split: str, work: Path) -> Iterator[ChunkTask]:
    types = [file.file_type for source in corpus.sources for file in source.files]
    for number, (file, file_type) in enumerate(zip(corpus.files, types, strict=True)):
        chunks = read_chunks(file.path, setting=f"data.{split}", file_type=file_type)
        for position, chunk in enumerate(chunks):
            stem = work / f"{split}-{number:05d}-{position:07d}"
            file.blank_lines += chunk.blank_lines
            yield ChunkTask(file.source, number, None if is_finished(stem) else chunk, stem)


def key_audits(encoding: Encoding) -> list[KeyAudit]:
    """Return the account of read keys of each source."""
    settings = encoding.settings
    template_keys = keys_in_template(encoding.chat_template or "")
    return [
        KeyAudit(
            template_keys=template_keys,
            leave_out=settings.leave_out,
            omit_media=settings.media == "omit",
            group_by=group_by,
            all_trained=settings.loss_on == "all",
        )
        for group_by in encoding.group_by
    ]


def beginning(
    encoding: Encoding, accounts: Sequence[KeyAudit] | None = None
) -> Callable[[int, Row], Begun]:
    """Return the function that begins to encode a row of a source, by number. It raises
    `RowError`."""
    settings, encoder = encoding.settings, encoding.encoder
    accounts = accounts or key_audits(encoding)

    def begin(source: int, row: Row) -> Begun:
        format, columns, keys = encoding.formats[source], encoding.columns[source], accounts[source]
        if encoding.examples == "texts":
            sample = to_sample(row.value, format=format, columns=columns, keys=keys)
            divide = None
            if encoding.overlong[source] == "split" and isinstance(plain(sample), Conversation):
                divide = partial(
                    divide_chat,
                    encoder,
                    sample,
                    seq_len=settings.seq_len,
                    last_turn=settings.loss_on == "last_turn",
                )
            return Begun(encoder.begin(sample), divide)
        rated = encoding.examples == "rated"
        judged = to_judged(row.value, format=format, columns=columns, keys=keys, rated=rated)
        return Begun(begin_judged(encoder, judged))

    return begin


def make_encoder(encoding: Encoding) -> Callable[[ChunkTask], tuple[int, Path]]:
    """Return the function that writes a task's shard, and returns its file and stem."""
    accounts = key_audits(encoding)
    begin = beginning(encoding, accounts)

    def encode(task: ChunkTask) -> tuple[int, Path]:
        if task.chunk is not None:
            encode_rows(
                task.chunk.rows(),
                begin=partial(begin, task.source),
                keys=accounts[task.source],
                group_by=encoding.group_by[task.source],
                seq_len=encoding.settings.seq_len,
                overlong=encoding.overlong[task.source],
                examples=encoding.examples,
                stem=task.stem,
            )
        return task.file, task.stem

    return encode


def list_rows(corpus: Corpus, listing: Listing) -> npt.NDArray[np.int64]:
    """List the dropped and cut rows; return the ordinals of the dropped ones."""
    dropped = array("q")
    for shard in corpus.shards:
        facts, file = shard.facts(), corpus.files[shard.file].file
        for reject in facts.rejects:
            listing.drop(reject, file=file)
        for cut in facts.cuts:
            listing.cut(cut, file=file)
        dropped.extend(shard.first_ordinal + ordinal for ordinal in facts.dropped)
    return np.array(dropped, dtype=np.int64)


def check_rejected_share(corpora: Iterable[Corpus], *, largest: float, rejects: Path) -> None:
    """Raise `UserError` if a file lost more than the share `largest` of its rows, not counting rows
    that a setting leaves out. rejects: the list of dropped rows."""
    for file in (file for corpus in corpora for file in corpus.files):
        unusable = file.counts["unusable"]
        share = unusable / max(1, file.rows_read)
        if share > largest:
            encoded = any(NOT_UTF8 in reason for reason in file.first_reasons)
            save = "Save the file as UTF-8 (iconv -f WINDOWS-1252 -t UTF-8), mend"
            longer = f"Set data.seq_len: {file.needed_tokens}, which holds those too long, mend"
            convert = save if encoded else longer if file.needed_tokens else "Mend"
            raise setting_error(
                "data.max_rejected_share",
                largest,
                f"{unusable} of {file.rows_read} rows of {file.file} would be "
                f"dropped ({share:.1%}).\n  "
                + "\n  ".join(file.first_reasons)
                + f"\nAll of them, with reasons: {rejects}",
                f"{convert} the rows, or raise the share",
            )


def find_encodings(
    tokenizer: PreTrainedTokenizerBase,
    usable_tokens: int,
    splits: dict[str, list[Source]],
    settings: DataConfig,
    examples: Examples,
) -> dict[str, Encoding]:
    """Check the template; return the encoding by split. usable_tokens: number of token ids that
    data may have."""
    formats = {split: find_formats(split, sources, examples) for split, sources in splits.items()}
    chats = any(name not in WITHOUT_TEMPLATE for choices in formats.values() for name, _ in choices)
    template = tool_template = None
    if chats:
        template = read_chat_template(tokenizer, settings.chat_template)
        tool_template = read_tool_template(tokenizer, settings.chat_template)
    encoder = SampleEncoder(
        tokenizer,
        chat_template=template,
        tool_template=tool_template,
        loss_on=settings.loss_on,
        template_kwargs=settings.template_kwargs,
        allow_unrendered=settings.allow_unrendered,
        special_tokens=settings.special_tokens_in_text or "text",
        usable_tokens=usable_tokens,
    )
    exported = template and with_arguments(template, settings.template_kwargs)
    return {
        split: Encoding(
            encoder=encoder,
            chat_template=exported,
            formats=tuple(name for name, _ in formats[split]),
            columns=tuple(columns for _, columns in formats[split]),
            group_by=tuple(source.group_by for source in splits[split]),
            overlong=tuple(source.overlong for source in splits[split]),
            settings=settings,
            examples=examples,
        )
        for split in splits
    }


def find_formats(
    split: str, sources: list[Source], examples: Examples
) -> list[tuple[Format, DataColumns]]:
    """Return the format of each source's rows, and the names of its columns."""
    formats = []
    for source in sources:
        setting = f"data.{split}"
        names = column_names(source.files, setting=setting)
        named = setting if len(sources) == 1 else f"{setting} ({source.name})"
        check_group_by(source.group_by, names, setting=named)
        formats.append(
            choose_format(
                names,
                format=source.format,
                columns=source.columns,
                setting=named,
                examples=examples,
            )
        )
    return formats


def check_group_by(group_by: str | None, columns: list[str], *, setting: str) -> None:
    """Raise `UserError` if a source has no such column."""
    if group_by is not None and columns and group_by not in columns:
        listed = ", ".join(printable(f"'{name}'") for name in columns)
        raise setting_error(
            "data.group_by",
            group_by,
            f"{setting} has the columns {listed}, and none of that name",
            "Name one of them, or null; a source may have its own group_by",
        )
