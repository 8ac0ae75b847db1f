"""Settings and values of earlier versions: what to write instead."""

RENAMED_KEYS = {
    "lora.rank": "lora.r",
    "train.products": "train.matmul_dtype",
    "train.products_in": "train.matmul_passes",
    "train.max_products_loss_rise": "train.max_matmul_loss_rise",
}
REPLACED_VALUES = {
    ("train.matmul_dtype", "int8"): "float8",
    ("train.optimizer", "paged_adamw"): "adamw",
    ("train.optimizer", "paged_adamw_8bit"): "adamw_8bit",
}
