"""Pre-train a small Llama from scratch on a raw corpus: the base model of the examples and tests.

The model sees plain documents only, never a question, an answer or the chat format, so that
fine-tuning has something to teach. Documents are `<|begin|>` text `<|end|>`, packed one after the
other and cut into rows of equal length; attention crosses documents. The weights kept are those
with the lowest validation loss, on documents that training never sees.

    python workflow/resources/pretrain_base.py --corpus corpus.jsonl --output
    workflow/resources/base

It needs torch, transformers and tokenizers, and no network.
"""

import argparse
import contextlib
import gzip
import hashlib
import json
import math
import platform
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent))

from base_tokenizer import BEGIN, END, PAD, train_tokenizer

RESOURCES = Path(__file__).resolve().parent
MAX_WEIGHT_BYTES = 8_000_000  # what the repository accepts as one committed file
VALIDATION_FRACTION = 0.02  # of documents
ADAM_BETAS = (
    0.9,
    0.95,
)  # as in GPT-3 (arXiv 2005.14165, app. B) and Llama (arXiv 2302.13971, sec. 2.3)
# Twenty times what those sources have: the corpus is read 29 times. With 0.1 the validation loss of
# 4 layers rose again after a third of the steps (2.57 at best); 3 layers have 2.49 with 1.0, 2.43
# with 2.0.
WEIGHT_DECAY = 2.0
GRAD_CLIP_NORM = 1.0  # same sources
MIN_LEARNING_RATE_FRACTION = 0.1  # same sources
WARMUP_FRACTION = 0.03


@dataclass
class Progress:
    """The weights with the lowest validation loss so far, and the losses on the way (nats per
    token).
    """

    best_loss: float = math.inf
    best_step: int = 0
    best_state: dict[str, torch.Tensor] | None = None
    history: list[dict[str, float]] = field(default_factory=list)


def positive_int(text: str) -> int:
    """Return an integer of at least 1; argparse reports others."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def parse_args() -> argparse.Namespace:
    """Return the options.

    The cosine's default length reads the corpus 29 times. Of its 3,500 steps the 3,200th was best
    (base/training.json, one H100, 139 s beside four other trainings).
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="JSONL with a column `text`")
    parser.add_argument("--output", type=Path, required=True, help="folder of the model")
    parser.add_argument(
        "--train-prompts",
        type=Path,
        default=RESOURCES / "pydocs" / "train.jsonl.gz",
        help="JSONL whose `prompt` column the tokenizer (not the model) learns from too",
    )
    parser.add_argument("--steps", type=positive_int, default=3500, help="optimizer steps")
    parser.add_argument("--batch-size", type=positive_int, default=32, help="rows per step")
    parser.add_argument("--seq-len", type=positive_int, default=512, help="tokens per row")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="peak, after warm-up")
    parser.add_argument("--vocab-size", type=int, default=4000, help="tokens, specials included")
    parser.add_argument(
        "--eval-every", type=positive_int, default=50, help="steps between validations"
    )
    parser.add_argument("--max-seconds", type=float, default=300, help="training stops after this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    documents = read_column(args.corpus, "text")
    training, validation = split_documents(documents, seed=args.seed)
    tokenizer = train_tokenizer(
        training + read_column(args.train_prompts, "prompt"), vocab_size=args.vocab_size
    )
    train_rows = pack_rows(tokenizer, training, seq_len=args.seq_len).to(args.device)
    validation_rows = pack_rows(tokenizer, validation, seq_len=args.seq_len).to(args.device)
    model = build_model(tokenizer).to(args.device)
    print_facts(args, model, documents, train_rows, validation_rows)
    start = time.perf_counter()
    progress, steps_done = train(model, train_rows, validation_rows, args)
    if progress.best_state is None:
        raise SystemExit(
            f"--learning-rate = {args.learning_rate}: the loss is not finite. Lower the rate."
        )
    model.load_state_dict(progress.best_state)
    save(model, tokenizer, args.output)
    record = {
        **training_facts(args, progress, steps_done),
        "parameters": model.num_parameters(),
        "documents": {"train": len(training), "validation": len(validation)},
        "corpus_tokens": {"train": train_rows.numel(), "validation": validation_rows.numel()},
        "elapsed_s": round(time.perf_counter() - start, 1),
    }
    (args.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(
        f"kept step {progress.best_step}: validation loss {progress.best_loss:.4f} nats per token"
    )


def read_column(path: Path, column: str) -> list[str]:
    """Return one column of a JSONL file, compressed or not."""
    unpacked = gzip.open if path.suffix == ".gz" else open
    with unpacked(path, "rt", encoding="utf-8") as file:
        return [json.loads(line)[column] for line in file]


def split_documents(documents: list[str], *, seed: int) -> tuple[list[str], list[str]]:
    """Return training and validation documents, both in a random order fixed by the seed."""
    shuffled = random.Random(seed).sample(documents, len(documents))
    num_validation = max(1, round(VALIDATION_FRACTION * len(shuffled)))
    if num_validation >= len(shuffled):
        raise SystemExit(
            f"--corpus: {len(shuffled)} documents are too few to hold any out. Give more."
        )
    return shuffled[num_validation:], shuffled[:num_validation]


def pack_rows(
    tokenizer: transformers.PreTrainedTokenizerFast, documents: list[str], *, seq_len: int
) -> torch.Tensor:
    """Return int64 (rows, seq_len): documents with begin and end tokens, one after the other.

    The tail that does not fill a row is dropped, unless it is all there is: then it repeats.
    """
    begin, end = tokenizer.convert_tokens_to_ids([BEGIN, END])
    encoded = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    flat = torch.tensor([token for ids in encoded for token in (begin, *ids, end)])
    if len(flat) < seq_len:
        flat = flat.repeat(math.ceil(seq_len / len(flat)))
    return flat[: len(flat) // seq_len * seq_len].view(-1, seq_len)


def build_model(tokenizer: transformers.PreTrainedTokenizerFast) -> torch.nn.Module:
    """Return a Llama in float32, of 2.8 million parameters at the default vocabulary."""
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=tokenizer.convert_tokens_to_ids(BEGIN),
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def print_facts(
    args: argparse.Namespace,
    model: torch.nn.Module,
    documents: list[str],
    train_rows: torch.Tensor,
    validation_rows: torch.Tensor,
) -> None:
    """Print what the run will do, before it starts."""
    step_tokens = args.batch_size * args.seq_len
    print(
        f"{model.num_parameters():,} parameters; {len(documents):,} documents; "
        f"{train_rows.numel():,} training and {validation_rows.numel():,} validation tokens; "
        f"{step_tokens:,} tokens per step; "
        f"{args.steps * step_tokens / train_rows.numel():.1f} epochs on {args.device}",
        flush=True,
    )


def train(
    model: torch.nn.Module,
    train_rows: torch.Tensor,
    validation_rows: torch.Tensor,
    args: argparse.Namespace,
) -> tuple[Progress, int]:
    """Train in place; return the best weights with the losses, and the number of steps done."""
    optimizer = build_optimizer(model, args.learning_rate)
    forward = torch.compile(model) if args.compile else model
    generator = torch.Generator().manual_seed(args.seed)
    progress = Progress()
    deadline = time.perf_counter() + args.max_seconds
    order = torch.empty(0, dtype=torch.int64)
    for step in range(1, args.steps + 1):
        while len(order) < args.batch_size:
            order = torch.cat([order, torch.randperm(len(train_rows), generator=generator)])
        indices, order = order[: args.batch_size], order[args.batch_size :]
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * learning_rate_factor(step, args.steps)
        loss = batch_loss(forward, train_rows[indices.to(train_rows.device)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        is_last = step == args.steps or time.perf_counter() > deadline
        if is_last or step % args.eval_every == 0:
            evaluate(model, validation_rows, args.batch_size, step, loss.item(), progress)
        if is_last:
            break
    return progress, step


def build_optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices but not norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=ADAM_BETAS)


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, then half a cosine down to `MIN_LEARNING_RATE_FRACTION`; `step` counts from
    1.
    """
    warmup_steps = max(1, round(WARMUP_FRACTION * num_steps))
    if step <= warmup_steps:
        return step / warmup_steps
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return MIN_LEARNING_RATE_FRACTION + (1 - MIN_LEARNING_RATE_FRACTION) * cosine


def batch_loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token loss of (batch, seq_len) rows, in bfloat16 autocast on a GPU."""
    on_gpu = rows.device.type == "cuda"
    autocast = torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext()
    with autocast:
        logits = model(input_ids=rows).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten()
    )


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    rows: torch.Tensor,
    batch_size: int,
    step: int,
    train_loss: float,
    progress: Progress,
) -> None:
    """Measure the validation loss, note it in `progress`, and keep the weights if it is the
    lowest.
    """
    model.eval()
    sums = [batch_loss(model, part) * len(part) for part in rows.split(batch_size)]
    model.train()
    loss = (torch.stack(sums).sum() / len(rows)).item()
    progress.history.append({"step": step, "train_loss": train_loss, "validation_loss": loss})
    if loss < progress.best_loss:
        progress.best_loss, progress.best_step = loss, step
        progress.best_state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    print(f"step {step}: train loss {train_loss:.4f}, validation loss {loss:.4f}", flush=True)


def save(
    model: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerFast, output: Path
) -> None:
    """Write the model in bfloat16, its configuration and the tokenizer; refuse weights over
    `MAX_WEIGHT_BYTES`.
    """
    output.mkdir(parents=True, exist_ok=True)
    model.config.use_cache = True
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)
    num_bytes = (output / "model.safetensors").stat().st_size
    if num_bytes > MAX_WEIGHT_BYTES:
        raise SystemExit(
            f"model.safetensors has {num_bytes:,} bytes, more than {MAX_WEIGHT_BYTES:,}. "
            "Lower --vocab-size."
        )


def training_facts(
    args: argparse.Namespace, progress: Progress, steps_done: int
) -> dict[str, object]:
    """Return how the weights came about: settings, losses and versions, no path."""
    settings = {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
    gpu = torch.cuda.get_device_name() if args.device.startswith("cuda") else None
    return {
        "settings": settings,
        "steps": steps_done,
        "tokens": steps_done * args.batch_size * args.seq_len,
        "kept_step": progress.best_step,
        "validation_loss": progress.best_loss,
        "history": progress.history,
        "corpus_sha256": hashlib.sha256(args.corpus.read_bytes()).hexdigest(),
        "gpu": gpu,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


if __name__ == "__main__":
    main()
