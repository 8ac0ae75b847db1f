"""Settings and values of earlier versions: what to write instead."""

RENAMED_KEYS = {
    "lora.rank": "lora.r",
}
REPLACED_VALUES = {
    ("train.optimizer", "paged_adamw"): "adamw",
    ("train.optimizer", "paged_adamw_8bit"): "adamw_8bit",
}
