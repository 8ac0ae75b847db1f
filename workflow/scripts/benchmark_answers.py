"""Measure how fast the engine samples answers on this machine, beside Transformers' `generate`:
random NF4 weights of any shape with a LoRA adapter, prompts of equal length, no end token.

    python -m workflow.scripts.benchmark_answers --output answers.json \\
        --model meta-llama/Llama-3.1-8B --prompts 64 --prompt-tokens 256 --new-tokens 128
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from workflow.benchmark.cases import BenchmarkConfig, model_config
from workflow.benchmark.measure import synchronize
from workflow.benchmark.random_base import write_random_base
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.evaluation.sample_answers import continue_rows
from workflow.lib.export.stock_models import load_base
from workflow.lib.model.backends import choose_device, resolve_dtype
from workflow.lib.rounds.generation import decode_for_answers_
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import setting_error
from workflow.lib.system.files import provenance, write_checked_json
from workflow.scripts.command import command_parser, logger, run

SIZES = {"prompts": 64, "prompt_tokens": 256, "new_tokens": 128, "times": 3}  # and their defaults


def main(args: argparse.Namespace) -> None:
    for name in SIZES:
        if (value := getattr(args, name)) < 1:
            option = f"--{name.replace('_', '-')}"
            raise setting_error(option, value, "must be at least 1", "Raise it")
    device = choose_device()
    model, size = loaded(args, device), (args.prompts, args.prompt_tokens)
    torch.manual_seed(0)
    ids = torch.randint(model.config.vocab_size, size, device=device)
    none = int(model.config.vocab_size)  # no token ends an answer

    def by_engine() -> list[list[int]]:
        how = {"stop_ids": [none], "max_new_tokens": args.new_tokens, "device": device}
        return continue_rows(model, ids.tolist(), **how)

    def by_generate() -> list[list[int]]:
        config = GenerationConfig(
            do_sample=False, max_new_tokens=args.new_tokens, eos_token_id=none, pad_token_id=0
        )
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        new: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return new

    generated, generate_s = timed(by_generate, device, args.times)
    decode_for_answers_(model, device)
    answered, answer_s = timed(by_engine, device, args.times)
    count = args.prompts * args.new_tokens
    rows = zip(answered, generated, strict=True)
    equal = sum(a == b for row in rows for a, b in zip(*row, strict=True))
    measured = {
        **{name: getattr(args, name) for name in ("model", "layers", "prompts", "prompt_tokens")},
        "new_tokens": args.new_tokens,
        "tokens_per_s": count / answer_s,
        "generate_tokens_per_s": count / generate_s,
        "equal_tokens_share": equal / count,
        "allocated_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "provenance": provenance(),
    }
    write_checked_json(args.output, measured)
    logger.info(
        "%.0f tokens/s, by generate %.0f; %.1f%% of the tokens are equal",
        *(count / answer_s, count / generate_s, 100 * equal / count),
    )


def loaded(args: argparse.Namespace, device: torch.device) -> Any:
    """Return the model with a random adapter of rank 16 on all linears; write its base once."""
    config = model_config(BenchmarkConfig(model=args.model, layers=args.layers))
    if not args.base.is_dir():
        write_random_base(args.base, config, QuantizeConfig())
    dtype = resolve_dtype("auto", device)
    options: Any = {"device": device, "compute_dtype": dtype, "attention": "sdpa"}
    base = load_base(Checkpoint(args.base), **options)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(base, lora).to(dtype).eval()


def timed(
    answers: Callable[[], list[list[int]]], device: torch.device, times: int
) -> tuple[list[list[int]], float]:
    """Return the answers, and the median of the seconds that they took; the first is not timed."""
    rows, seconds = answers(), []
    for _ in range(times):
        began = time.monotonic()
        rows = answers()
        synchronize(device)
        seconds.append(time.monotonic() - began)
    return rows, statistics.median(seconds)


def parser() -> argparse.ArgumentParser:
    arguments = command_parser(__doc__, needs="output")
    arguments.add_argument("--model", default="workflow/resources/base", help="its shape")
    arguments.add_argument("--layers", type=int, help="of the model; default: all")
    arguments.add_argument("--base", type=Path, default=Path("results/benchmark/answers-base"))
    for name, value in SIZES.items():
        option = f"--{name.replace('_', '-')}"
        arguments.add_argument(option, type=int, default=value, help="(%(default)d)")
    return arguments


if __name__ == "__main__":
    run(main, parser())
