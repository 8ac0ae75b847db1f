"""Every other decoder of the installed Transformers, tiny: is it taken, and does it train as stock
does?

`tests/support/families.py` has the families whose tiny models were made by hand. Here each further
class that Transformers maps to a causal language model gets sizes by the names of its settings, and
goes the same way: description, quantization, training by one process, the stock model. What is
refused says why. `python -m tests.support.decoder_survey` takes about ten minutes of two cores and
writes the lists of `workflow/docs/families.md` anew.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.families import (
    FAMILIES,
    LATENT,
    MOE,
    NEMOTRON_H,
    ROUTED_IN_GROUPS,
    SIZES,
    VOCAB,
    WINDOW,
    tiny_model,
)
from tests.support.family_runs import difference_from_stock, run_family
from tests.support.models import quantized
from workflow.lib.distributed.world import process_group
from workflow.lib.model.describe_model import describe_folder
from workflow.lib.system.errors import UserError

PAGE = Path(__file__).parents[2] / "workflow" / "docs" / "families.md"
WIDTH = 180  # columns of the page
MARKS = ("<!-- decoders: begin -->\n", "<!-- decoders: end -->")
TOGETHER = 2  # processes
MOST_S = 300.0  # of a family
ALONE = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "MASTER_PORT"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    "MASTER_ADDR": "127.0.0.1",
}
# Settings by name, wherever a class has them.
BY_NAME: dict[str, Any] = {
    **{name: SIZES[name] for name in SIZES if name not in ("num_hidden_layers",)},
    **dict.fromkeys(("d_model", "n_embd", "lru_width", "word_embed_proj_dim", "conv_dim"), 48),
    **dict.fromkeys(("ffn_dim", "n_inner", "block_dim", "block_ff_dim", "ffn_hidden_size"), 80),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), 3),
    **MOE,
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"), 2),
    "moe_shared_expert_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": ROUTED_IN_GROUPS["first_k_dense_replace"],
    "n_positions": 128,
    "sliding_window": WINDOW,
    "attention_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "rotary_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 3,
    **NEMOTRON_H,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_headdim": 16,
    "n_mamba_heads": 6,
    "mamba_d_state": 16,
    "mamba_d_ssm": 96,
    "mamba_dt_rank": 8,
    "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "mamba_chunk_size": 8,
    "index_topk": 64,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB,
    "laurel_rank": 8,
    "swa_num_attention_heads": 3,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# What a class wants otherwise; None: nothing is said of it.
OTHERWISE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "layer_types": None},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
    "diffllama": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
    "codegen": {"n_head": 4, "n_embd": 64, "rotary_dim": 8},
    "falcon": {"head_dim": None},
    "falcon_mamba": {"layer_types": None},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "kimi_linear": {"qk_rope_head_dim": 8},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "mamba": {"layer_types": None},
    "mamba2": {"layer_types": None, "num_heads": 6, "head_dim": 16},
    "mimo_v2_flash": {"num_attention_heads": 4, "head_dim": 12, "v_head_dim": 12},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 2,
    },
}
AT_RANDOM = {"phimoe": "its router draws experts at random in training"}


@dataclass(frozen=True)
class Found:
    """What became of a class."""

    family: str
    outcome: str
    """`as stock`, `refused`, `not tried`, `not compared`, and what no page may say: `crashed`,
    `differs`.
    """
    why: str = ""


def decoders() -> list[str]:
    """Return the families that are looked at: causal language models that encode nothing, and that
    have no line in the table of tests.
    """
    known = {case.model_type or family for family, case in FAMILIES.items()}
    return [
        name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in known and _decodes(name)
    ]


def _decodes(family: str) -> bool:
    try:
        config = AutoConfig.for_model(family)
    except Exception:  # it has sizes without defaults, or parts in packages that are not here
        return False
    return not config.is_encoder_decoder and getattr(config, "is_decoder", None) is not False


def tiny_config(family: str) -> Any:
    default = AutoConfig.for_model(family)
    text = default.get_text_config()
    sizes = {name: value for name, value in BY_NAME.items() if _has(text, name)}
    if hasattr(text, "kv_lora_rank"):
        sizes |= {name: value for name, value in LATENT.items() if _has(text, name)}
    kinds = [*dict.fromkeys(getattr(text, "layer_types", None) or ())]
    layers = max(2, len(kinds))
    sizes |= {name: layers for name in LAYERS if _has(text, name)}
    if kinds:
        sizes["layer_types"] = (2 * kinds)[:layers]
    sizes |= {name: 0.0 for name in dir(text) if _has(text, name) and _drops(text, name)}
    sizes |= OTHERWISE.get(family, {})
    told = {name: value for name, value in sizes.items() if value is not None}
    if text is not default:
        told = {"text_config": told, "tie_word_embeddings": told["tie_word_embeddings"]}
    return AutoConfig.for_model(family, **told)


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # each layer has its own, and the class says so by an error of its own
        return False


def _drops(config: Any, name: str) -> bool:
    return ("dropout" in name or "pdrop" in name) and isinstance(getattr(config, name), float)


def looked_at(family: str, number: int, folder: Path) -> Found:
    """Take a tiny model of a family the way of every model; number: decides its levers."""
    try:
        tiny_model(tiny_config(family), folder / "original")
    except Exception as error:
        return Found(family, "not tried", f"{type(error).__name__}: {error}")
    try:
        describe_folder(folder / "original")
        quantized(folder / "original", folder / "nf4")
        with process_group("cpu", timeout_s=MOST_S) as world:
            ours = run_family(folder, world, "of-1", fused=True, break_checks=False, number=number)
    except UserError as error:
        return Found(family, "refused", str(error))
    if family in AT_RANDOM:
        return Found(family, "not compared", AT_RANDOM[family])
    difference = difference_from_stock(ours, folder)
    return Found(family, "differs", difference) if difference else Found(family, "as stock")


def survey(families: Iterable[str]) -> Iterator[Found]:
    """Yield what becomes of families, each in a process of its own."""
    waiting, running = list(zip(families, count(), strict=False)), {}
    while waiting or running:
        while waiting and len(running) < TOGETHER:
            family, number = waiting.pop(0)
            folder = Path(tempfile.mkdtemp())
            running[_forked(family, number, folder)] = family, folder, time.monotonic() + MOST_S
        time.sleep(0.05)
        for pid, (family, folder, until) in [*running.items()]:
            late = time.monotonic() > until
            if late:
                os.kill(pid, signal.SIGKILL)
            if os.waitpid(pid, 0 if late else os.WNOHANG) == (0, 0):
                continue
            del running[pid]
            yield _result(family, folder / "found.json", late=late)
            shutil.rmtree(folder)


def _result(family: str, file: Path, *, late: bool) -> Found:
    if file.is_file():
        return Found(**json.loads(file.read_text()))
    if late:
        return Found(family, "not tried", f"no result within {MOST_S:.0f} s")
    return Found(family, "crashed", "its process ended without a word")


def _forked(family: str, number: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ.update(ALONE)
        try:
            found = looked_at(family, number, folder)
        except Exception:
            found = Found(family, "crashed", traceback.format_exc())
        (folder / "found.json").write_text(json.dumps(asdict(found)))
    finally:
        os._exit(0)


TOLD = {
    "as stock": f"As the stock model trains, of Transformers {transformers.__version__}",
    "refused": "Refused",
    "not tried": "Not tried, because no tiny model could be made",
    "not compared": "Not compared, because its router draws experts at random",
}


def lists(found: Iterable[Found]) -> str:
    by_outcome: dict[str, list[str]] = {}
    for one in sorted(found, key=lambda one: one.family):
        by_outcome.setdefault(one.outcome, []).append(f"`{one.family}`")
    assert by_outcome.keys() <= TOLD.keys(), by_outcome
    return "\n".join(
        textwrap.fill(f"{told}: {', '.join(by_outcome[outcome])}.", WIDTH, break_long_words=False)
        + "\n"
        for outcome, told in TOLD.items()
        if outcome in by_outcome
    )


def written(page: str, found: Iterable[Found]) -> str:
    before, rest = page.split(MARKS[0])
    return before + MARKS[0] + lists(found) + MARKS[1] + rest.split(MARKS[1])[1]


if __name__ == "__main__":
    results = []
    for one in survey(sys.argv[1:] or decoders()):
        print(one.family, one.outcome, one.why[-1500:], flush=True)
        results.append(one)
    if not sys.argv[1:]:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
