"""The encoding of each split's rows: formats by their columns, the chat template, the encoder."""

from transformers import PreTrainedTokenizerBase

from workflow.lib.checkpoints.tokenizer import read_chat_template, read_tool_template
from workflow.lib.data.encoding.chat_template import with_arguments
from workflow.lib.data.encoding.row_columns import WITHOUT_TEMPLATE, choose_format
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.data.reading.data_file import column_names
from workflow.lib.data.reading.row_chunks import printable
from workflow.lib.data.reading.sources import Source
from workflow.lib.data.tokens.corpus import Encoding
from workflow.lib.settings.config import DataConfig
from workflow.lib.settings.data import DataColumns, Format
from workflow.lib.settings.objectives import Examples
from workflow.lib.system.errors import setting_error


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
