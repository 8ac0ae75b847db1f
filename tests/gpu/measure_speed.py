"""Speed and peak memory of the engine on the GPUs of this machine, with random weights of a public model's shape.

    python -m tests.gpu.measure_speed --shape llama2-70b --layers 8 --batch 2 --seq-len 2048 --gpus 2 --output FILE

Prints one JSON object: tokens/s per GPU (median over the timed steps), peak allocated and reserved, losses, gradient
norms, and what the memory model predicts for the same case. Random weights: speed and memory do not depend on them.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from tests.distributed import run_distributed
from workflow.lib.artifacts import package_versions, write_json
from workflow.lib.config import LoraSettings, QuantizeConfig, RunConfig, TrainConfig
from workflow.lib.quantize import ShardWriter, nf4_config, quantizable_linears, quantize_tensor
from workflow.lib.tokens import TokenStore

SHAPES = {
    "llama2-70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000},
    "llama3-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip


def write_random_base(folder: Path, shape: dict[str, int]) -> None:
    """Write an NF4 checkpoint with random weights; every linear of a kind shares one random tensor."""
    from workflow.lib.model import build_on_meta

    config = LlamaConfig(**shape, max_position_embeddings=8192, tie_word_embeddings=False)
    folder.mkdir(parents=True)
    plain = json.loads(config.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    write_json(folder / "config.json", plain)
    model = build_on_meta(folder, dtype=torch.bfloat16)
    device = torch.device("cuda")
    writer = ShardWriter(folder, shard_bytes=2**30)
    made: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    linears = quantizable_linears(model)
    for path, size in linears.items():
        if size not in made:
            weight = torch.randn(size, dtype=torch.bfloat16, device=device) * 0.02
            made[size] = quantize_tensor(weight, QuantizeConfig(), device=device)
        writer.add({f"{path}.{suffix}": part.clone() for suffix, part in made[size].items()})
    for name, param in model.named_parameters():
        if name.removesuffix(".weight") not in linears:
            value = torch.ones(param.shape) if param.ndim == 1 else torch.randn(param.shape) * 0.02
            writer.add({name: value.to(torch.bfloat16)})
    writer.close()
    write_json(folder / "config.json", nf4_config(plain, QuantizeConfig()))


def random_rows(args: argparse.Namespace, vocab: int) -> TokenStore:
    rows = args.gpus * args.batch * 2
    ids = np.random.default_rng(0).integers(0, vocab, (rows, args.seq_len)).astype(np.uint32)
    positions = np.tile(np.arange(args.seq_len, dtype=np.int32), (rows, 1))
    if args.documents > 1:
        positions %= args.seq_len // args.documents
    arrays: dict[str, Any] = {
        "train.input_ids.npy": ids,
        "train.loss_mask.npy": positions > 0,
        "train.position_ids.npy": positions,
        "heldout.input_ids.npy": ids[0, :64],
        "heldout.loss_mask.npy": np.ones(64, dtype=bool),
        "heldout.offsets.npy": np.array([0, 64]),
    }
    return TokenStore(manifest={}, arrays=arrays)


def measure(args: argparse.Namespace, base: Path, vocab: int) -> dict[str, Any]:
    """One process: build, check, train `--steps` steps, time the last ones."""
    from workflow.lib.attention import resolve_training_attention
    from workflow.lib.parallel import process_group
    from workflow.lib.setup import build_training_model, startup_checks
    from workflow.lib.training import make_optimizer, steps

    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    train = TrainConfig(
        epochs=None,
        max_steps=args.steps,
        global_batch_size=args.gpus * args.batch,
        learning_rate=1e-4,
    )
    config = RunConfig(lora=LoraSettings(r=args.rank, alpha=2 * args.rank), train=train)
    plan = {
        "device": "cuda", "processes": args.gpus, "micro_batch_size": args.batch, "reshard_after_forward": True,
        "activation_checkpointing": not args.no_checkpointing, "num_steps": args.steps,
        "gpu_memory_bytes": int(args.cap_gib * 2**30) if args.cap_gib else None,
    }  # fmt: skip
    store = random_rows(args, vocab)
    with process_group("cuda", timeout_s=600) as world:
        attention = resolve_training_attention(
            args.attention, world.device, compute_dtype=torch.bfloat16, softcapped=False
        )
        model = build_training_model(
            base, config, plan, world, compute_dtype=torch.bfloat16, attention=attention
        )
        checks = [] if args.skip_byte_check else startup_checks(model, store, base, world)
        optimizer = make_optimizer(model.training, train, device=world.device)
        torch.cuda.reset_peak_memory_stats()
        metrics = list(
            steps(
                model.training, optimizer, store, train, first_step=0, num_steps=args.steps,
                micro_batch_size=args.batch, elapsed_s=0.0, world=world,
            )
        )  # fmt: skip
        reserved = torch.cuda.max_memory_reserved()
    timed = [m.tokens_per_s / args.gpus for m in metrics[args.steps // 3 :]]
    return {
        "tokens_per_s_per_gpu": round(statistics.median(timed), 1),
        "peak_allocated_gib": round(metrics[-1].peak_bytes / 2**30, 3),
        "peak_reserved_gib": round(reserved / 2**30, 3),
        "losses": [round(m.loss, 4) for m in metrics],
        "grad_norms": [round(m.grad_norm, 5) for m in metrics],
        "attention": attention,
        "bytes_read_gib": round(model.bytes_read / 2**30, 3),
        "checks": checks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama2-70b")
    parser.add_argument("--layers", type=int, help="decoder layers; default: all")
    parser.add_argument("--batch", type=int, default=2, help="rows per GPU")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens per row")
    parser.add_argument("--documents", type=int, default=1, help="documents packed into a row")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapter, on all linears")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cap-gib", type=float, help="emulate a smaller card, GiB per GPU")
    parser.add_argument("--attention", default="auto", help="a value of model.attention")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--skip-byte-check", action="store_true")
    parser.add_argument("--base", type=Path, help="reuse or keep the random checkpoint here")
    parser.add_argument("--output", type=Path, help="append the result as a JSON line")
    args = parser.parse_args()
    shape = SHAPES[args.shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
    with tempfile.TemporaryDirectory() as temporary:
        base = args.base or Path(temporary) / "base"
        if not base.exists():
            write_random_base(base, shape)
        result = run_distributed(measure, args, base, shape["vocab_size"], world_size=args.gpus)[0]
    case = {k: v for k, v in vars(args).items() if k not in ("base", "output")}
    line = {
        "case": case,
        "shape": shape,
        **result,
        "gpu": torch.cuda.get_device_name(),
        "packages": package_versions(),
    }
    print(
        json.dumps(
            {
                k: line[k]
                for k in (
                    "case",
                    "tokens_per_s_per_gpu",
                    "peak_allocated_gib",
                    "peak_reserved_gib",
                    "losses",
                    "grad_norms",
                )
            }
        )
    )
    if args.output:
        with args.output.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
