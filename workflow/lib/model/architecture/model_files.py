"""Which files of a model's folder belong to the model, and which to its tokenizer."""

# Files of a local folder whose change makes what was made from them stale.
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
)


MODEL_PATTERNS = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    *TOKENIZER_PATTERNS,
)
