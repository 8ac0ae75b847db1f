"""The model card (`README.md`) of an exported adapter, in the format of the Hugging Face hub."""

from typing import Any

from huggingface_hub import ModelCardData


def model_card(
    *, source: str, is_hub_model: bool, summary: dict[str, Any], parity: dict[str, Any]
) -> str:
    """Return the card: metadata block, what was trained on what and how, and the parity proof.

    summary: `summary.json`; parity: `parity.json`. A local base model is described, not linked.
    """
    data = ModelCardData(
        base_model=source if is_hub_model else None,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["lora", "qlora", "fsdp"],
    )
    lora, train = summary["settings"]["lora"], summary["settings"]["train"]
    facts = [
        ("Base model", f"`{source}`, NF4 with bitsandbytes"),
        ("Adapter", f"LoRA, rank {lora['r']}, alpha {lora['alpha']:g}, targets {_targets(lora)}"),
        ("Trainable parameters", f"{summary['trainable_parameters']:,} of {summary['total_parameters']:,}"),
        ("Optimizer steps", f"{summary['num_steps']:,} of {summary['global_batch_size']} rows of {summary['seq_len']} tokens"),
        ("Peak learning rate", f"{train['learning_rate']:g}, {train['lr_schedule']} schedule, seed {train['seed']}"),
        ("Training loss", f"{summary['first_loss']:.3f} at the start, {summary['final_loss']:.3f} at the end (nats per trained token)"),
        ("Hardware", f"{summary['processes']} x {summary['device_name']}, {summary['elapsed_s'] / 3600:.3g} h"),
        (
            "Export check",
            f"logits of the reloaded adapter within {parity['max_abs_difference']:.2g} of the trained model's "
            f"(tolerance {parity['tolerance']:.2g}) at {parity['positions']} positions",
        ),
    ]  # fmt: skip
    table = "\n".join(f"| {name} | {value} |" for name, value in facts)
    return (
        f"---\n{data.to_yaml()}\n---\n\n# {summary['run']}\n\n"
        f"A LoRA adapter trained with FSDP-QLoRA.\n\n| | |\n|---|---|\n{table}\n\n"
        "Load it on the base model with PEFT:\n\n"
        "```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f'base = AutoModelForCausalLM.from_pretrained("{source}")\n'
        'model = PeftModel.from_pretrained(base, "path/to/this/folder")\n```\n\n'
        "The adapter was trained on the NF4 weights; on unquantized weights its outputs differ slightly.\n"
    )


def _targets(lora: dict[str, Any]) -> str:
    targets = lora["target_modules"]
    return "all linear layers" if targets == "all-linear" else ", ".join(f"`{t}`" for t in targets)
