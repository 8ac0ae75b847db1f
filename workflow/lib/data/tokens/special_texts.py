"""Special tokens that the data spell: rare ones are a warning, many are an error.

A text in which a template's tokens stand was rendered already, by this template or another
program. As ordinary text it would teach the model to spell tokens; as tokens, users' texts could
end a turn. So the user says which, where it matters."""

import logging

from workflow.lib.settings.data import SpecialTokens
from workflow.lib.system.errors import setting_error

logger = logging.getLogger("workflow")

SETTING = "data.special_tokens_in_text"
MAX_SHARE = 0.05  # of a file's rows; texts about chat templates are rarer in public datasets
ENOUGH_ROWS = 2000  # a file is judged before its end from here on


def check_special_texts(
    special_texts: int, *, rows: int, file: str, setting: SpecialTokens | None
) -> None:
    """Raise `UserError` if many rows of a file spell special tokens and the user said nothing."""
    if setting is None and special_texts > max(1, MAX_SHARE * rows):
        raise setting_error(
            SETTING,
            None,
            f"{special_texts} of {rows} rows of {file} spell special tokens that the chat template "
            "or the tokenizer writes, such as an end of turn: these rows seem to be rendered "
            "already",
            "Set it to tokens to read them as the tokens, or to text to train them as ordinary "
            "text; or take them out of the data",
        )


def log_special_texts(special_texts: int, *, setting: SpecialTokens | None) -> None:
    """Tell how many rows spell special tokens, and as what they were encoded."""
    if special_texts and setting is None:
        logger.warning(
            "%d rows spell a special token; it was encoded as ordinary text. %s: tokens reads it "
            "as the token, text says that this is right",
            special_texts,
            SETTING,
        )
    elif special_texts:
        logger.info("%d rows spell a special token; it was encoded as %s", special_texts, setting)
