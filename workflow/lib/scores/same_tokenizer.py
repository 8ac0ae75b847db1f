"""Whether a model means the same tokens: by vocabulary, and both tokenizers' probes."""

from pathlib import Path

from transformers import AutoConfig, PreTrainedTokenizerBase

from workflow.lib.data.encoding.tokenizer import load_tokenizer
from workflow.lib.system.errors import UserError, setting_error

# Words, code, digits, letters of several scripts (one accent composed, one not), signs beyond the
# basic plane, white space.
PROBES = (
    "The quick brown fox doesn't jump over 12345 lazy dogs, does it?",
    "def f(x):\n\treturn {'a': x ** 2, \"b\": [x != 3.14e-7]}\n\n\n    # end",
    "na\u00efve cafe\u0301 Stra\u00dfe \u0394\u03b5\u03bb\u03c4\u03b1 \u043c\u0438\u0440",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093 \uc548\ub155",
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600\U0001f469\u200d\U0001f4bb \t  \r\n \u00a0end ",
)
CHANGE = "Name a model with the tokenizer of model.source"


def check_same_tokenizer(folder: Path, student: Path, *, setting: str, named: str) -> None:
    """Raise `UserError` unless the tokenizers of two model folders have the same tokens and encode
    the same texts alike, special tokens included. setting: that names the model in `folder`."""
    own = load_tokenizer(student)
    try:
        other = load_tokenizer(folder)
    except UserError as error:
        reason = f"its tokenizer cannot be compared with that of model.source ({error})"
        raise setting_error(setting, named, reason, CHANGE) from None
    ids, others = own.get_vocab(), other.get_vocab()
    differing = [x for x in sorted({*ids, *others}) if ids.get(x) != others.get(x)]
    if differing:
        first = differing[0]
        reason = (
            f"its tokenizer has other tokens than that of model.source: {len(differing)} differ, "
            f"such as {first!r} ({_told(others.get(first))} instead of {_told(ids.get(first))})"
        )
        raise setting_error(setting, named, reason, CHANGE)
    for probe in (*PROBES, "".join(map(str, own.all_special_tokens))):
        if _encoded(own, probe) != _encoded(other, probe):
            reason = f"its tokenizer encodes {probe!r} otherwise than that of model.source"
            raise setting_error(setting, named, reason, CHANGE)


def _told(number: int | None) -> str:
    return "none" if number is None else f"id {number}"


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    """Return the ids of a text, with and without the special tokens around it."""
    around, alone = (tokenizer(text, add_special_tokens=x).input_ids for x in (True, False))
    return around, alone


def vocabulary_size(folder: Path) -> int:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return int(config.get_text_config().vocab_size)


def check_top_k(top_k: int, vocabulary: int) -> None:
    """Raise `UserError` if more tokens are to be stored than there are."""
    if top_k > vocabulary:
        raise setting_error(
            "distill.top_k", top_k, f"the vocabulary has {vocabulary} tokens", "Lower it"
        )
