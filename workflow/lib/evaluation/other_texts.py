"""Texts of other kinds than the training data, at which a fine-tuned model may have become worse:
prose, code, and chats without a system prompt (`workflow/resources/other_texts`).

They are encoded like training data, chats by the model's own template. A text is only a passage, so
no eos token follows it. At most `seq_len` tokens of a document count, as training saw no longer
ones."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from workflow.lib.checkpoints.tokenizer import default_template
from workflow.lib.data.encoding.row_formats import to_sample
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.data.tokens.token_store import Document
from workflow.lib.settings.data import DataColumns
from workflow.lib.system.errors import UserError

logger = logging.getLogger("workflow")

FOLDER = Path(__file__).resolve().parents[2] / "resources" / "other_texts"
TEXTS, CHATS = ("prose", "code"), "chat"


@dataclass(frozen=True)
class OtherTexts:
    """Documents with their loss masks, and the kind of each (`prose`, `code` or `chat`)."""

    documents: list[Document]
    kinds: list[str]

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, *, seq_len: int, usable_tokens: int
    ) -> "OtherTexts":
        """Encode the shipped texts. A tokenizer without a chat template, or with one that writes no
        question and answer, gets no chats. usable_tokens: ids with a row in the model."""
        documents = [
            (kind, ids[:seq_len], mask[:seq_len])
            for kind, ids, mask in _encoded(tokenizer, usable_tokens)
        ]
        scored = [(kind, (ids, mask)) for kind, ids, mask in documents if mask.any()]
        return cls([document for _, document in scored], [kind for kind, _ in scored])


def _encoded(
    tokenizer: PreTrainedTokenizerBase, usable_tokens: int
) -> Iterator[tuple[str, *Document]]:
    plain = SampleEncoder(
        tokenizer, chat_template=None, loss_on="completions", usable_tokens=usable_tokens
    )
    for kind in TEXTS:
        for row in _rows(kind):
            (encoded,) = plain.encode(to_sample(row, format="text", columns=DataColumns()))
            yield kind, encoded.ids[:-1], encoded.mask[:-1]
    if (template := default_template(tokenizer)) is None:
        return
    try:
        chats = SampleEncoder(
            tokenizer, chat_template=template, loss_on="completions", usable_tokens=usable_tokens
        )
        for row in _rows(CHATS):
            sample = to_sample(row, format="messages", columns=DataColumns())
            yield from ((CHATS, encoded.ids, encoded.mask) for encoded in chats.encode(sample))
    except (UserError, RowError) as error:
        logger.info("other texts have no chats, as the model's own template fails: %s", error)


def _rows(kind: str) -> list[dict[str, object]]:
    lines = (FOLDER / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
