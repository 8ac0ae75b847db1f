"""Combinations of settings, models and rows, for which plans are made: each has unusual values of
several settings at once. All are drawn by a seed, and can be planned as far as no recording says
otherwise; the others of a draw are refused."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.families import FAMILIES, KINDS
from workflow.benchmark.random_groups import group_rows, random_groups
from workflow.benchmark.random_pairs import pair_rows, random_pairs
from workflow.lib.checkpoints.files.config_file import text_part
from workflow.lib.kernels.attention.answer_rows import answer_rows, grouped
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.describe_model import describe_config
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.model_sizes import weights_by_path
from workflow.lib.planning.preflight.checks import check_settings, check_tokens, read_machine
from workflow.lib.planning.preflight.planned_run import PlannedRun
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.recording.recording_process import PlanRecorder, RecordingProcess
from workflow.lib.settings.config import RunConfig, load_config
from workflow.lib.settings.objectives import NEEDS, PAIRED, readers_of
from workflow.lib.settings.overrides import merge
from workflow.lib.system.errors import UserError

Combination = Mapping[str, Any]
"""Unusual values by name of `VALUES`."""
MODEL, DOCUMENTS = "model", "documents"  # names that are no settings
UNEQUAL = "unequal"
ENABLING = (MODEL, "train.objective", "hardware.gpus")  # without which other values are refused
ATTEMPTS = 60
ROWS = 24  # of a run
# The usual value first. GPUs with a model of this size: nearly all of their memory is free.
VALUES: Mapping[str, Sequence[Any]] = {
    MODEL: (*KINDS, "gemma4_text", "jamba", "olmo_hybrid", "lfm2", "qwen3_next"),
    DOCUMENTS: (1, 5, 64, UNEQUAL),
    "data.seq_len": (96, 61, 512, 2048),
    "model.attention": ("auto", "eager", "sdpa", "flex", "flash_attention_2"),
    "model.attention_dropout": (0, "family"),
    "model.compute_dtype": ("auto", "float16", "float32"),
    "quantize.method": ("absmax", "none"),
    "quantize.keep": ((), ("down_proj",), ("layers.0",)),
    "quantize.block_size": (64, 512),
    "quantize.double_quant": (True, False),
    "lora.r": (16, 1, 256),
    "lora.dropout": (0.0, 0.1),
    "lora.use_dora": (False, True),
    "lora.use_rslora": (False, True),
    "lora.modules_to_save": ((), ("lm_head",), ("embed_tokens",), ("mlp.gate",)),
    "lora.target_modules": ("all-linear", ("q_proj", "v_proj"), ("o_proj",)),
    "lora.rank_pattern": ({}, {"q_proj": 3}),
    "train.objective": tuple(NEEDS),
    "preferences.shared_prompt": (True, False),
    "preferences.reference": ("start", "original"),
    "grpo.kl": (0.0, 0.1),
    "distill.top_k": (32, 1),
    "train.micro_batch_size": (1, 2, 6),
    "train.optimizer": ("adamw", "adamw_8bit"),
    "train.matmul_dtype": ("compute_dtype", "float8", "auto"),
    "train.activation_checkpointing": (True, False, 2, 0.625),
    "train.keep_attention": (False, True),
    "train.fused_layers": (True, False),
    "train.fused_loss": (True, False),
    "train.router_aux_loss_coef": (None, 0.01),
    "hardware.gpus": (2, 1, 4, 0),
    "hardware.nodes": (1, 2),
    "hardware.gpu_model": ("H200", "3090", "4090", "A100 40GB"),
    "hardware.host_memory_gib": ("auto", 4.0),
    "hardware.memory_margin_gib": (0.5, 0.0, 30.0),
    "hardware.shard_size": ("auto", 2),
    "hardware.context_parallel": (1, 2),
    "hardware.offload_activations": (False, True, 1),
    "hardware.offload_embedding": ("auto", True, False),
    "hardware.offload_layers": (0, 1, 2),
    "hardware.keep_decoded": (0, 1, 2),
    "hardware.reshard_after_forward": (True, False),
    "hardware.tile_tokens": (0, 128),
    "hardware.cuda_graphs": (True, False),
}
# Left to the search in addition.
OPEN = {
    "train.micro_batch_size": "auto",
    "train.activation_checkpointing": "auto",
    "train.keep_attention": "auto",
    "hardware.offload_activations": "auto",
    "hardware.offload_layers": "auto",
    "hardware.keep_decoded": "auto",
    "hardware.reshard_after_forward": "auto",
    "hardware.tile_tokens": "auto",
    "hardware.context_parallel": "auto",
}
# So that all sizes are multiples of NF4 blocks, where they are in the family.
WIDER = 4
WIDTHS = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "global_head_dim"),
    *("shared_intermediate_size", "shared_expert_intermediate_size", "dense_intermediate_size"),
    *("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "v_head_dim"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "q_lora_rank", "kv_lora_rank"),
)


def covering(seed: int, *, others: int = 8) -> Iterator[Combination]:
    """Yield combinations that are planned until each value was in one. others: unusual values of
    each besides the one that it is for."""
    draw = random.Random(seed)
    missing = {(name, n) for name, values in VALUES.items() for n in range(1, len(values))}
    for name, values in VALUES.items():
        for number in range(1, len(values)):
            if (name, number) not in missing:
                continue
            combination = _planned(draw, {name: number}, missing, others=others)
            missing -= set(combination.items())
            yield {key: VALUES[key][n] for key, n in combination.items()}


def _planned(
    draw: random.Random, first: dict[str, int], missing: set[tuple[str, int]], *, others: int
) -> dict[str, int]:
    """Return numbers of values by name with which a plan is possible, as many as possible of the
    missing ones."""
    chosen = first
    while not is_planned(chosen):
        enabling = {name: draw.randrange(len(VALUES[name])) for name in ENABLING}
        chosen = enabling | first
    every = [(name, n) for name, values in VALUES.items() for n in range(1, len(values))]
    for _ in range(ATTEMPTS):
        # of the missing ones some are refused with any model
        name, number = draw.choice(sorted(missing) if missing and draw.random() < 0.7 else every)
        if name not in chosen and is_planned(tried := chosen | {name: number}):
            chosen = tried
        if len(chosen) > others:
            break
    return chosen


def is_planned(numbers: Mapping[str, int]) -> bool:
    """Whether no check refuses a combination, and each of its values is read."""
    combination = {name: VALUES[name][number] for name, number in numbers.items()}
    try:
        run = settings(combination)
        planned_run(combination, recordings=None).too_large()
    except UserError:
        return False
    return all("." not in name or is_read(name, run) for name in numbers)


def drawn(seed: int, *, values: int = 6) -> Combination:
    """Return a combination, which may be refused; a few of its settings are left to the search."""
    draw = random.Random(seed)
    names = draw.sample(list(VALUES), values)
    chosen = {name: draw.choice(VALUES[name]) for name in names}
    return {name: x for name, x in OPEN.items() if draw.random() < 0.3} | chosen


def is_read(name: str, run: RunConfig) -> bool:
    readers = readers_of(name)
    return not readers or run.train.objective in readers


def settings(combination: Combination) -> RunConfig:
    """Return the run's settings, without those that its objective does not read."""
    usual = {name: values[0] for name, values in VALUES.items()}
    objective = combination.get("train.objective", "sft")
    document: dict[str, Any] = {"runs": {"case": {}}, "train": {"max_steps": 10}}
    for key, value in (usual | dict(combination)).items():
        section, dot, name = key.partition(".")
        readers = readers_of(key)
        if dot and (not readers or objective in readers):
            document = merge(document, {section: {name: value}})
    processes = max(1, document["hardware"]["gpus"]) * document["hardware"]["nodes"]
    document["train"]["global_batch_size"] = 12 * processes
    if objective == "grpo":
        document["rewards"] = {"functions": {"exact": {"function": "last_number"}}}
        document["answers"] = {"max_new_tokens": 16}
    # lists, as YAML has them
    return load_config(json.loads(json.dumps(document)))[1]["case"]


def planned_run(combination: Combination, *, recordings: RecordingProcess | None) -> PlannedRun:
    """Return the run of a combination on an imagined machine; raises `UserError` if a check refuses
    it. recordings: None for a run that is not recorded."""
    run = settings(combination)
    config, shape = described(combination.get(MODEL, VALUES[MODEL][0]))
    machine = read_machine(run.hardware)
    check_settings(run, shape, config, trains_here=True)
    tokens = token_counts(combination.get(DOCUMENTS, 1), run, shape)
    check_tokens(tokens, run, shape)
    recorder: Any = recordings and PlanRecorder(recordings, config, shape)
    draw = random.Random(0)
    costs = {path: draw.random() for path in weights_by_path(shape)}
    return PlannedRun(run, shape, _with_host(machine), tokens, recorder, costs=costs)


def _with_host(machine: Machine) -> Machine:
    """Return a machine whose host has the same memory everywhere."""
    return replace(machine, host_bytes=2**36)


@cache
def described(family: str) -> tuple[dict[str, Any], ModelShape]:
    """Return the config.json of a family's wider tiny model, and its description."""
    config = FAMILIES[family].config(family).to_dict()
    text = text_part(config)
    text |= {name: WIDER * text[name] for name in WIDTHS if text.get(name)}
    text["max_position_embeddings"] = max(VALUES["data.seq_len"])
    return config, describe_config(config, origin=Path(family))


def token_counts(documents: int | str, run: RunConfig, shape: ModelShape) -> TokenCounts:
    """Return the counts of rows with so many documents each, or of drawn pairs or groups."""
    seq_len, examples = run.data.seq_len, NEEDS[run.train.objective].examples
    sizes = {"seq_len": seq_len, "vocab_size": shape.vocab_size}
    counts = TokenCounts(**sizes, heldout_tokens=seq_len, packed_rows=ROWS, trained_tokens=0)
    if examples != "texts":
        groups = examples == "groups"
        store = (
            group_rows(random_groups(6, **sizes), seq_len=seq_len)
            if groups
            else pair_rows(random_pairs(6, **sizes), seq_len=seq_len)
        )
        arrays = store.input_ids, store.position_ids, store.loss_mask
        return replace(
            counts,
            packed_rows=store.num_rows,
            trained_tokens=int(store.loss_mask.sum()),
            documents=(8 if groups else 2) * 6,
            answer_rows=answer_rows(*arrays, paired=store.examples in PAIRED),
        )
    lengths = _lengths(documents, seq_len=seq_len)
    total = ROWS * len(lengths)
    return replace(
        counts,
        documents=total,
        trained_tokens=ROWS * seq_len - total,
        lengths=grouped([np.array(lengths)] * ROWS) if documents == UNEQUAL else (),
    )


def _lengths(documents: int | str, *, seq_len: int) -> list[int]:
    if documents == UNEQUAL:
        return [1, 2, seq_len // 3, seq_len - seq_len // 3 - 3]
    count = min(int(documents), seq_len // 2)
    return [seq_len // count + (n < seq_len % count) for n in range(count)]
