"""The same case by other software: TRL's SFTTrainer, DPOTrainer for pairs or GRPOTrainer for
groups, over Accelerate (DDP, FSDP1 or FSDP2), bitsandbytes NF4, PEFT LoRA.

Its worker (`scripts/benchmark_peer.py`) is started by `benchmark_run`. It loads the
same random base, to be sharded with the packed weights as bf16 views, the storage that these stacks
recommend, and takes the same rows or examples, batch, rank and steps. Peaks are measured by the
same code.
Accelerate is told what to do by the environment variables that `accelerate launch` sets.
Packages: envs/peers.txt.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.utils.import_utils import is_flash_attn_2_available
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from workflow.benchmark.measure import (
    OUT_OF_MEMORY,
    STEP_S,
    Job,
    end_training,
    start_training,
    synchronize,
    together,
)
from workflow.benchmark.random_base import random_rows
from workflow.benchmark.random_groups import ANSWERS, answer_tokens, random_groups
from workflow.benchmark.random_pairs import Pair, random_pairs
from workflow.benchmark.record import Observed
from workflow.lib.artifacts.training_record import Check
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.distributed.heartbeat import Pulse
from workflow.lib.objectives.from_settings import BETA
from workflow.lib.settings.config import RunConfig
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.checksums import read_artifact
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checked_json

FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
}
VERSIONS = {
    "fsdp1": {
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
        "FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_SYNC_MODULE_STATES": "false",
        "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    },
    "fsdp2": {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"},
}


class PairTrainer(DPOTrainer):  # type: ignore[misc]
    """TRL's trainer on pairs that are token ids already."""

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset


class GroupTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer on answers that are sampled already. A step computes their log-probabilities
    before its update, as TRL does after each generation by a server, and as our engine does."""

    batches: Iterator[dict[str, torch.Tensor]]
    """Of `group_batches`."""

    def _prepare_inputs(self, _: Any) -> dict[str, torch.Tensor]:
        batch = {name: x.to(self.accelerator.device) for name, x in next(self.batches).items()}
        ids, present = (
            torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], dim=1)
            for name in ("ids", "mask")
        )
        with torch.no_grad():
            old, *_ = self._get_per_token_logps_and_entropies(
                self.model, ids, present, batch["completion_ids"].shape[1]
            )
        return batch | {"old_per_token_logps": old}


def group_batches(job: Job, config: RunConfig) -> Iterator[dict[str, torch.Tensor]]:
    """Yield micro-batches of the random groups again and again, in TRL's form; all prompts and
    answers have equal lengths, so none is padded."""
    assert job.groups is not None
    assert job.peer is not None
    drawn = {"seq_len": config.data.seq_len, "vocab_size": job.vocab_size}
    groups = random_groups(job.groups, **drawn)
    rows = [
        (group.prompt, answer.ids, answer.advantage) for group in groups for answer in group.answers
    ]
    size = job.peer["answers"]
    own = range(int(os.environ["RANK"]) * size, len(rows), int(os.environ["WORLD_SIZE"]) * size)
    while True:
        for first in own:
            prompts, answers, advantages = (
                torch.tensor(x) for x in zip(*rows[first : first + size], strict=True)
            )
            yield {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": answers,
                "completion_mask": torch.ones_like(answers),
                "advantages": advantages.float(),
                "num_items_in_batch": torch.tensor(len(rows) * answers.shape[1]),
            }


class Watch(TrainerCallback):
    """Records each step's seconds. As in our engine's benchmark, a step ends when all its work
    has."""

    def __init__(self, observed: Observed, device: torch.device, pulse: Pulse) -> None:
        self._observed, self._device, self._pulse = observed, device, pulse
        self._began = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        start_training(self._observed)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._pulse.step(len(self._observed.step_s) + 1)
        synchronize(self._device)
        self._began = time.monotonic()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize(self._device)
        self._observed.step_s.append(time.monotonic() - self._began)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "grad_norm" in logs:
            self._observed.losses.append(float(logs["loss"]))
            self._observed.grad_norms.append(float(logs["grad_norm"]))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._pulse.phase("ending")
        end_training(self._observed)


Loaded = tuple[Any, LoraConfig | None]
"""A model, and the adapter that the trainer is to add, if any."""
Load = Callable[[Job, RunConfig, torch.device], Loaded]


def load_base(job: Job, config: RunConfig, device: torch.device) -> Loaded:
    """Load the base by Transformers."""
    model = AutoModelForCausalLM.from_pretrained(
        job.base,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        attn_implementation="flash_attention_2" if is_flash_attn_2_available() else "sdpa",
        device_map={"": device.index if device.type == "cuda" else "cpu"},
    )
    adapter = LoraConfig(
        r=config.lora.r, lora_alpha=int(config.lora.alpha), lora_dropout=0.0, bias="none",
        target_modules="all-linear", task_type="CAUSAL_LM",
    )  # fmt: skip
    return model, adapter


def measure(job_file: Path, output: Path, *, load: Load = load_base) -> None:
    """Measure the one case of `job_file`, and write its record to the folder `output`. Collective:
    all workers. Raises `UserError` where the software cannot run the case."""
    ((key, document),) = read_artifact(job_file).items()
    job = Job.of(document)
    config = RunConfig.model_validate(job.run)
    if job.documents > 1:
        raise UserError("this peer takes rows of one document: set benchmark.documents to 1")
    device = torch.device("cpu")
    if job.plan.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        cap_memory(job.plan, device)
    observed = Observed()
    try:
        with Pulse(rank=int(os.environ["RANK"]), start_s=job.timeout_s, step_s=STEP_S) as pulse:
            train(job, config, device, observed, pulse, load=load)
    except torch.OutOfMemoryError as error:
        raise UserError(f"{OUT_OF_MEMORY}: {error}") from None
    everyone = [observed]
    if dist.is_initialized():
        everyone *= dist.get_world_size()
        dist.all_gather_object(everyone, observed)
    if int(os.environ["RANK"]) == 0:
        write_checked_json(output / f"{key}.json", together(everyone, job).as_json())
    if dist.is_initialized():
        dist.destroy_process_group()


def cap_memory(plan: StepPlan, device: torch.device) -> None:
    """Bound what PyTorch may reserve, as for our engine."""
    if plan.gpu_memory_bytes is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, plan.gpu_memory_bytes / total))


def train(
    job: Job,
    config: RunConfig,
    device: torch.device,
    observed: Observed,
    pulse: Pulse,
    *,
    load: Load,
) -> None:
    """Train the job's case by TRL; fill `observed`. Raises `UserError` if Accelerate does not
    shard."""
    assert job.peer is not None, "the benchmark starts this for peers alone"
    sharded = job.peer["strategy"] in VERSIONS and int(os.environ["WORLD_SIZE"]) > 1
    if sharded:
        os.environ |= FSDP | VERSIONS[job.peer["strategy"]]
        os.environ["FSDP_ACTIVATION_CHECKPOINTING"] = str(job.peer["checkpointing"]).lower()
    began = time.monotonic()
    model, adapter = load(job, config, device)
    observed.load_s = time.monotonic() - began
    observed.attention = str(model.config._attn_implementation)
    observed.bytes_read = sum(path.stat().st_size for path in Path(job.base).glob("*.safetensors"))
    if sharded:
        layer = next(iter(model._no_split_modules or ()))
        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = str(layer)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(job)(
            model=model,
            args=arguments(job, config, folder, device, sharded=sharded),
            train_dataset=dataset(job, config),
            processing_class=tokenizer(Checkpoint(Path(job.base)).vocabulary_size),
            peft_config=adapter,
            callbacks=[Watch(observed, device, pulse)],
            **({} if job.groups is None else {"reward_funcs": no_reward}),
        )
        if job.groups is not None:
            trainer.batches = group_batches(job, config)
        if sharded and trainer.accelerator.distributed_type != DistributedType.FSDP:
            kind = trainer.accelerator.distributed_type.value
            raise UserError(
                f"Accelerate shards nothing on {device.type} (distributed type {kind}): nothing "
                "was measured"
            )
        total = parameter_bytes(model)
        trainer.train()
        observed.checks = [
            share_check(parameter_bytes(trainer.model_wrapped), total, sharded=sharded)
        ]


def trainer_class(job: Job) -> Any:
    if job.groups is not None:
        return GroupTrainer
    return SFTTrainer if job.pairs is None else PairTrainer


def no_reward(completions: list[Any], **_: Any) -> list[float]:
    """Return 0 for each answer; never called, since the advantages are drawn."""
    return [0.0] * len(completions)


def parameter_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all parameters that this process holds."""
    parts = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(part.numel() * part.element_size() for part in parts)


def share_check(held_bytes: int, total: int, *, sharded: bool) -> Check:
    """Return a check whether the processes share the parameters: packed weights may have stayed
    whole on each.
    """
    detail = f"{held_bytes:,} of {total:,} bytes on the main process"
    name = "every process holds its share of the parameters"
    return Check(name=name, passed=not sharded or held_bytes < 0.75 * total, detail=detail)


def arguments(
    job: Job, config: RunConfig, folder: str, device: torch.device, *, sharded: bool
) -> SFTConfig | DPOConfig | GRPOConfig:
    """Return the trainer's settings; sharded models are recomputed by Accelerate, as it
    recommends.
    """
    assert job.peer is not None
    kind: Any = SFTConfig
    options: dict[str, Any] = {"packing": False, "max_length": config.data.seq_len}
    batch, accumulated = job.plan.micro_batch_size, job.plan.accumulation_steps
    if job.groups is not None:
        kind, batch = GRPOConfig, job.peer["answers"]
        options = {"num_generations": ANSWERS, "beta": config.grpo.kl}
        options |= {"max_completion_length": answer_tokens(config.data.seq_len)}
        accumulated = job.groups * ANSWERS // (batch * int(os.environ["WORLD_SIZE"]))
    elif job.pairs is not None:
        kind = DPOConfig
        options |= {"precompute_ref_log_probs": job.peer["stored_reference"]}
        options |= {"beta": config.preferences.beta or BETA}
        del options["packing"]
        options |= {"train_sampling_strategy": "sequential"} if job.peer["by_length"] else {}
        batch = job.peer["pairs"]
        accumulated = job.pairs // (batch * int(os.environ["WORLD_SIZE"]))
    return kind(
        output_dir=folder,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulated,
        **options,
        max_steps=job.plan.num_steps,
        learning_rate=config.train.learning_rate,
        warmup_steps=0,  # TRL's defaults, this and the next, but not unsloth's
        weight_decay=0.0,
        max_grad_norm=config.train.max_grad_norm,
        optim="adamw_torch_fused" if device.type == "cuda" else "adamw_torch",
        bf16=device.type == "cuda",
        use_cpu=device.type == "cpu",
        gradient_checkpointing=job.peer["checkpointing"] and not sharded,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_liger_kernel=job.peer["liger"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=device.type == "cuda",
    )


def dataset(job: Job, config: RunConfig) -> Dataset:
    """Return the random rows or pairs that our engine trains on; of groups, prompts that nothing
    reads."""
    if job.groups is not None:
        return Dataset.from_list([{"prompt": "prompt"}] * job.groups)
    if job.pairs is not None:
        pairs = random_pairs(job.pairs, seq_len=config.data.seq_len, vocab_size=job.vocab_size)
        pairs.sort(key=lambda p: -len(p.prompt) - max(len(p.chosen), len(p.rejected)))
        names = [f"{name}_ids" for name in Pair._fields]
        return Dataset.from_list(
            [dict(zip(names, (ids.tolist() for ids in pair), strict=True)) for pair in pairs]
        )
    store = random_rows(
        rows=job.rows, seq_len=config.data.seq_len, documents=1, vocab_size=job.vocab_size
    )
    return Dataset.from_dict({"input_ids": store.input_ids.astype("int64")})


def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that nothing is encoded with: the trainer asks for one, with a padding
    token; unsloth adds one to the model's vocabulary if it is the end's.
    """
    words = {"<pad>": vocab_size - 2, "<end>": vocab_size - 1}
    core = Tokenizer(WordLevel(words, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<pad>")
