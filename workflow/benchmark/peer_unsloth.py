"""The same case by unsloth: its model and adapter, trained by TRL's SFTTrainer, which it patches.

Rows, steps, optimizer and measurement are those of `peer_trl`. Batches without padding, compiled
code, and recomputation whose inputs wait in host memory are unsloth's defaults. Experts have
adapters, too. Packages: envs/unsloth.txt."""

import tempfile
from pathlib import Path

import torch
from unsloth import FastLanguageModel  # before `peer_trl`: it patches TRL, Transformers and PEFT

# isort: split
from workflow.benchmark import peer_trl
from workflow.benchmark.measure import Job
from workflow.lib.settings.config import RunConfig
from workflow.lib.system.errors import UserError

# A base names a stack of experts like a linear; unsloth expects the parameter's own name.
STACKS = {r"experts\.(gate_up_proj|down_proj)\.weight": r"experts.\1"}


def measure(job_file: Path, output: Path) -> None:
    """Measure the one case of `job_file` as `peer_trl.measure`. Collective: all workers."""
    peer_trl.measure(job_file, output, load=load_base)


def load_base(job: Job, config: RunConfig, device: torch.device) -> peer_trl.Loaded:
    """Load the base by unsloth, with an adapter on all linears. Raises `UserError` for pairs and
    groups."""
    assert job.peer is not None
    if job.pairs is not None or job.groups is not None:
        raise UserError("unsloth is measured on rows: leave out benchmark.pairs and .groups")
    recomputation = "unsloth" if job.peer["checkpointing"] else False
    with tempfile.TemporaryDirectory() as folder:
        peer_trl.tokenizer(job.vocab_size).save_pretrained(folder)
        model, _ = FastLanguageModel.from_pretrained(
            job.base,
            max_seq_length=config.data.seq_len,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            load_in_4bit=config.quantize.method != "none",
            device_map={"": device.index if device.type == "cuda" else "cpu"},
            use_gradient_checkpointing=recomputation,
            use_exact_model_name=True,  # else it asks the network for a better one
            local_files_only=True,
            tokenizer_name=folder,
            key_mapping=STACKS,
        )
    model = FastLanguageModel.get_peft_model(
        model,
        r=config.lora.r,
        lora_alpha=int(config.lora.alpha),
        lora_dropout=0.0,
        bias="none",
        target_modules="all-linear",
        use_gradient_checkpointing=recomputation,
    )
    return model, None
