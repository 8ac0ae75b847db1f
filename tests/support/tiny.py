"""A tokenizer small enough to be trained inside a test, with a vocabulary of no round size."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 307  # 256 bytes, six special tokens and 45 merges; prime

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if "
    "message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% "
    "endgeneration %}{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "What is the answer to the question? The answer is forty-two.",
    "Pack the rows, mask the prompt, train on the answer.",
)


def tiny_tokenizer(
    folder: Path, *, chat_template: bool = True, pad: bool = True
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `VOCAB_SIZE` tokens, save it to `folder`, and return it as loaded
    there.

    Its chat template marks assistant turns, their end token included, with `{% generation %}`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD if pad else None,
        additional_special_tokens=list(ROLES),
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE if chat_template else None
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)
