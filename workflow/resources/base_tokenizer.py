"""The base model's tokenizer: byte-level BPE, six special tokens and a chat template.

Encoding adds no special token of its own: the chat template writes `<|begin|>`, and the training
script writes it before each document. So `decode(encode(text)) == text` for any text.
"""

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
MODEL_MAX_TOKENS = 1024  # the model's `max_position_embeddings`

# `{% generation %}` marks what an assistant says, its end token included: the only trained tokens.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}"
    "{{ message['content'] + eos_token }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: list[str], *, vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer trained on the texts, with at most `vocab_size` tokens, specials
    included.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BEGIN, END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(ROLES),
        model_max_length=MODEL_MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
