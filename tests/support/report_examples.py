"""Synthetic inputs of the report: complete run folders with the fields of the records."""

import math
from pathlib import Path
from typing import Any

from tests.support.plans import make_forecast, make_plan, tried_plan
from workflow.lib.artifacts.evaluation_record import ITEMS
from workflow.lib.artifacts.records import AdapterEffect, Provenance, ServedCheck
from workflow.lib.kernels.attention.answer_rows import LengthGroup
from workflow.lib.settings.forms import SUBJECTS
from workflow.lib.system.checksums import read_lines, write_lines
from workflow.lib.system.files import (
    read_checked_json,
    write_checked_json,
    write_checksums,
    write_json,
)

HOSTILE = (
    "<script>alert('x')</script></script><img src=x onerror=alert(1)> \x1b[31mred\x1b[0m "
    '\u202eabc & "q" {{ 7*7 }} <!--'
)
GIB = 2**30
SERVED_CHECK = ServedCheck(
    server="vLLM 9.9",
    subject="tuned_on_original",
    compute_dtype="float32",
    max_lora_rank=32,
    documents=61,
    loss=1.52,
    evaluated_loss=1.5199,
    trained_loss=1.5,
    bound=1e-3,
    worst_document=2e-4,
    prompts=7,
    answers=8,
    equal_answers=8,
    answer_gap=0.0,
    adapter=AdapterEffect(effect=0.5, served_effect=0.5, share=1.0, difference=1e-4),
    provenance=Provenance.now(),
)
ADAPTER_CONFIG = {"revision": "c0ffee", "r": 16, "lora_alpha": 32.0}


def provenance(stage: str) -> dict[str, Any]:
    return {
        "stage": stage,
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "packages": {"python": "3.12.3", "torch": "2.11.0", "transformers": "5.17.0"},
        "platform": "Linux x86_64",
        "cpu_count": 16,
        "created_utc": "2026-01-02T03:04:05Z",
    }


def metrics(num_steps: int, *, rate: float) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "loss": 1.4 + 1.9 * math.exp(-step * rate / 0.0046) + 0.06 * math.sin(step * 1.7),
            "grad_norm": 0.31 + 1.1 * math.exp(-step / 9) + 0.04 * math.cos(step * 2.3),
            "learning_rate": rate * min(step / 5, 0.5 * (1 + math.cos(math.pi * step / num_steps))),
            "trained_tokens": 1511 * step,
            "tokens": 4099 * step,
            "tokens_per_s": 12_931.5 + 211 * math.sin(step),
            "peak_bytes": int(21.3 * GIB) + 1013 * step,
            "elapsed_s": 0.317 * step,
        }
        for step in range(1, num_steps + 1)
    ]


def summary(run: str, num_steps: int, *, rate: float) -> dict[str, Any]:
    return {
        "run": run,
        "fingerprint": "abcdef012345",
        "device": "cuda",
        "device_name": "NVIDIA H100 80GB HBM3",
        "processes": 2,
        "shard_size": 2,
        "num_steps": num_steps,
        "resumed_from_steps": [37],
        "settings": settings(rate),
        "global_batch_size": 17,
        "micro_batch_size": 3,
        "accumulation_steps": 5,
        "seq_len": 257,
        "trainable_parameters": 20_971_523,
        "trainable_by_module": {"self_attn": 6_291_456, "experts": 14_680_067},
        "total_parameters": 8_051_232_771,
        "final_loss": 1.4123456789,
        "first_loss": 3.2718281828,
        "tokens": 4099 * num_steps,
        "trained_tokens": 1511 * num_steps,
        "elapsed_s": 4021.7,
        "process_s": 8043.4,
        "base": "results/base/demo-0123",
        "times": {"predicted_step_s": 0.5, "measured_step_s": 0.6, "parts_s": {}},
        "logged_steps": num_steps,
        "parity_sha256": "0" * 64,
        "tokens_per_s": 12_931.5,
        "peak_bytes": {
            "predicted": int(20.1 * GIB),
            "measured": int(21.3 * GIB),
            "kind": "cuda_allocated",
        },
        "checks": [
            {
                "name": "Gathered weights equal the checkpoint byte for byte",
                "passed": True,
                "detail": "224 tensors, 4,023,517,184 bytes",
            },
            {
                "name": "Every row trains at least one token",
                "passed": True,
                "detail": "least 13 of 257",
            },
            {"name": "Gradient norm above 0 at every step", "passed": True, "detail": "least 0.27"},
        ],
        "provenance": provenance("finetune"),
    }


def preflight() -> dict[str, Any]:
    terms = {
        "nf4_weights": (int(2.4 * GIB), "4 bits a parameter, sharded over 2 processes"),
        "nf4_scales": (int(0.07 * GIB), "absmax per block, sharded"),
        "embedding_and_head": (int(1.9 * GIB), "in the compute dtype, sharded"),
        "norms_and_biases": (700_001, "in the compute dtype, sharded"),
        "lora_weights": (int(0.08 * GIB), "adapter masters in fp32, sharded"),
        "adam_moments": (int(0.16 * GIB), "both moments in fp32, sharded"),
        "lora_gradients": (int(0.08 * GIB), "in fp32, sharded"),
        "gathered_layer": (int(0.9 * GIB), "one decoder layer gathered from all processes"),
        "gather_buffer": (int(0.9 * GIB), "the next layer is gathered into it"),
        "layer_inputs": (int(8.8 * GIB), "kept for recomputation, 3 x 257 tokens"),
        "logits": (int(4.81 * GIB), "one chunk of rows, and its gradient"),
    }
    total = sum(amount for amount, _ in terms.values())
    forecast = make_forecast(
        reason="The predicted peak leaves 2.9 GiB of 23.3 GiB free.",
        plan=make_plan(
            device="cuda",
            processes=2,
            micro_batch_size=3,
            accumulation_steps=5,
            gpu_memory_bytes=int(23.3 * GIB),
            compute_dtype="bfloat16",
            num_steps=211,
            document_lengths=(LengthGroup(64, 7.0, 301.0, 13000.0),),
        ),
        method="replay",
        terms=[
            {"name": name, "bytes": amount, "explanation": text}
            for name, (amount, text) in terms.items()
        ],
        phases={"forward": int(15.2 * GIB), "backward": total},
        peak_phase="backward",
        peak_bytes=total,
        allocator_slack_bytes=GIB // 2,
        reserved_bytes=total + GIB // 2,
        outside_allocator_bytes=int(1.5 * GIB),
        capacity_bytes=int(23.3 * GIB),
        margin_bytes=int(0.5 * GIB),
        host_bytes=9 * GIB,
        host_capacity_bytes=120 * GIB,
        disk_bytes={"base": 5 * GIB, "adapter": 84_000_001},
        disk_free_bytes=900 * GIB,
        time={
            "step_s": 0.31,
            "total_h": 1.05,
            "tokens_per_s_per_process": 6500.0,
            "cost": None,
            "parts_s": {"matmuls": 0.05, "elementwise": 0.012},
            "basis": "roofline at 45% of the peak of this GPU",
        },
        candidates=[
            tried_plan(micro_batch_size=3, peak_bytes=total),
            tried_plan(
                micro_batch_size=7,
                context_parallel=2,
                activation_checkpointing=False,
                peak_bytes=2 * total,
                fits=False,
                relative_time=0.7,
                why="3.10 GiB too much",
            ),
        ],
        model={"order": [0] * 33, "hidden_size": 4099},
    )
    return forecast.model_dump() | {"provenance": provenance("preflight_run")}


def parity() -> dict[str, Any]:
    return {
        "rms_difference": 0.0078125,
        "tolerance": 0.05,
        "relative_tolerance": 0.0016,
        "adapter_effect": 3.5,
        "identical_values": True,
        "passed": True,
        "rows": 2,
        "positions": 513,
        "compute_dtype": "bfloat16",
        "reference": "finetune/parity.safetensors",
        "reloaded": "Transformers and PEFT",
        "rms_logit": 31.25,
        "argmax_agreement": 1.0,
        "provenance": provenance("consolidate"),
    }


def quantization(**changes: Any) -> dict[str, Any]:
    return {
        "quantized_linears": 224,
        "quantized_parameters": 6_979_321_856,
        "total_bytes": 5_700_000_000,
        "settings": {"block_size": 64, "double_quant": True},
        "method": "absmax",
        "device": "cuda",
        "only_here": None,
        "provenance": provenance("quantize_base"),
    } | changes


def metric(value: float, stderr: float | None) -> dict[str, Any]:
    return {"value": value, "stderr": stderr, "higher_is_better": True}


def difference(value: float, ci95: list[float] | None, p_value: float | None) -> dict[str, Any]:
    paired = {"difference": value, "difference_ci95": ci95, "p_value": p_value}
    counts = dict.fromkeys(("test", "gained", "lost"))
    return (
        paired | counts
        if ci95 is None
        else paired | {"test": "exact McNemar", "gained": 140, "lost": 20}
    )


def evaluation(run: str, subject: str) -> dict[str, Any]:
    tuned = subject == "tuned"
    answers = {
        "base": "The function the function the function returns the function.",
        "tuned": "Return a copy of the list, sorted in ascending order.",
    }
    result = {
        "subject": subject,
        "run": run,
        "served": tuned,
        "comparisons": {},
        "heldout": {
            "loss": 1.5123456789 if tuned else 2.9876543211,
            "loss_ci95": [1.4511, 1.5732] if tuned else [2.8801, 3.0912],
            "perplexity": 4.5373 if tuned else 19.8391,
            "documents": 127,
            "trained_tokens": 6131,
            "sources": {},
            "per_document": [{"document": 0, "source": "qa", "loss_sum": 71.25, "tokens": 47}],
        },
        "tasks": {
            "pydocs_mc": {
                "metrics": {
                    "acc": metric(0.6137 if tuned else 0.2519, 0.0241),
                    "acc_norm": metric(0.6331 if tuned else 0.2777, None),
                },
                "items": 331,
                "version": 1,
            }
        },
        "samples": [
            {
                "document": number,
                "prompt": (
                    f"Write the docstring of this function.\n\ndef sort_{number}(values, *, "
                    "reverse=False):\n    return sorted(values, reverse=reverse)"
                ),
                "reference": "Return a new sorted list from the items in values.",
                "answer": answers[subject],
            }
            for number in (3, 11, 29)
        ],
        "provenance": provenance("evaluate_run"),
    }
    if tuned:
        result["comparisons"]["base"] = {
            "loss_difference": 1.4753086422,
            "loss_difference_ci95": [1.3711, 1.5802],
            "p_value": 0.000999,
            "documents": 127,
            "sources": {},
            "tasks": {
                "pydocs_mc": {
                    "acc": difference(0.3618, [0.3021, 0.4214], 0.00021),
                    "acc_norm": difference(0.3554, None, None),
                }
            },
        }
    return result


def items(run: str) -> dict[str, Any]:
    """Return the items of an evaluation without subjects: of four items of the task one is too
    short to judge, two have a fifth of their tokens in training rows, one has all of them."""
    return {
        "run": run,
        "served": "tuned",
        "subjects": {},
        "overlap": {"pydocs_mc": [0.0, None, 0.25, 1.0]},
        "provenance": provenance("evaluate_run"),
    }


def manifest() -> dict[str, Any]:
    split = {
        "rows_read": 2003,
        "rows_kept": 1997,
        "rows_dropped": 6,
        "truncated": 41,
        "tokens": 211_019,
        "trained_tokens": 77_003,
        "length_percentiles": {"p50": 89, "p90": 201, "p99": 255, "max": 257},
        "duplicates": 2,
        "longest": [
            {"file": "train.jsonl", "row": 1201, "tokens": 313},
            {"file": "train.jsonl", "row": 17, "tokens": 301},
        ],
    }
    source = {"file": "train.jsonl", "sha256": "cc" * 32, "rows": 2003, "split": "train"}
    return {
        "format_version": 1,
        "seq_len": 257,
        "vocab_size": 4099,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "format": "prompt_completion",
        "tokenizer_sha256": "aa" * 32,
        "chat_template_sha256": "bb" * 32,
        "template_kwargs": {"enable_thinking": False},
        "sources": [
            source
            | {"documents": 1997, "tokens": 211_019, "trained_tokens": 77_003, "token_share": 1.0}
            | {
                "format": "prompt_completion",
                "columns": ["prompt", "completion"],
                "not_read": {"lang": 2001, "id (message)": 40_123},
                "dropped_by_reason": {"empty completion": 5, "not an object": 1},
                "special_token_texts": 17,
            }
        ],
        "splits": {
            "train": split | {"packed_rows": 853, "fill": 0.9631},
            "heldout": split | {"documents": 127},
        },
        "dropped_by_reason": {"empty completion": 5, "not an object": 1},
        "train_heldout_overlap": 3,
        "train_heldout_near_duplicates": 2,
        "licences": {"model": "apache-2.0", "data": None},
        "files": {"heldout.input_ids.npy": "dd" * 32},
        "samples": [
            [
                ["<user>\ndef area(r):\n    return 3.14159 * r ** 2\n<assistant>\n", False],
                ["Return the area of a circle of radius r.", True],
                ["\n", False],
            ],
            [
                ["<user>\ndef first(x): return x[0]\n<assistant>\n", False],
                ["Return the first item of x.", True],
            ],
        ],
        "provenance": provenance("tokenize_dataset"),
    }


def settings(rate: float) -> dict[str, Any]:
    return {
        "model": {"name": "base-8b", "source": "example/base-8b", "revision": None},
        "lora": {"r": 16, "alpha": 32.0, "target_modules": ["q_proj", "v_proj"]},
        "train": {
            "seed": 7,
            "learning_rate": rate,
            "lr_schedule": "cosine",
            "epochs": 3.0,
            "max_steps": None,
        },
    }


def write_run(root: Path, name: str, *, num_steps: int = 211, rate: float = 2e-4) -> Path:
    """Write a complete run `name` and its tokens folder below `root`; return the run's folder."""
    folder = root / "runs" / name
    write_checked_json(folder / "preflight_run" / "preflight.json", preflight())
    write_checked_json(folder / "finetune" / "summary.json", summary(name, num_steps, rate=rate))
    write_lines(folder / "finetune" / "metrics.jsonl", metrics(num_steps, rate=rate))
    write_checked_json(folder / "consolidate" / "parity.json", parity())
    write_json(folder / "consolidate" / "adapter" / "adapter_config.json", ADAPTER_CONFIG)
    write_checksums(folder / "consolidate" / "adapter")
    for subject in ("base", "tuned"):
        write_checked_json(folder / "evaluate_run" / f"{subject}.json", evaluation(name, subject))
    write_checked_json(folder / "evaluate_run" / ITEMS, items(name))
    write_checked_json(root / "tokens" / f"{name}-data" / "manifest.json", manifest())
    return folder


def add_gguf(folder: Path) -> None:
    """Add the checks of GGUF files to the run in `folder`: the merged model, and the adapter."""
    merged = {
        "form": "merged",
        "format": "q4_k_m",
        "file": "demo-q4_k_m.gguf",
        "bytes": 3 * 2**20,
        "adapter": None,
        "adapter_bytes": None,
        "prompts": 3,
        "loss": 1.5625,
        "reference_loss": 1.5,
        "bound": 0.3,
        "tokens": 96,
        "answers": 4,
        "equal_answers": 1,
    }
    adapter = {"adapter": "demo-adapter.gguf", "adapter_bytes": 2**20}
    base = merged | adapter | {"form": "adapter", "file": "demo-base-q4_k_m.gguf"}
    document = {"files": [merged, base], "provenance": provenance("convert_gguf")}
    write_checked_json(folder / "convert_gguf" / "gguf.json", document)


def rewards(accuracy: float, *, ratio: bool = True) -> dict[str, Any]:
    """Return what a subject prefers; ratio: there is a reference."""
    found = {
        "of": "pairs",
        "examples": 61,
        "accuracy": accuracy,
        "accuracy_ci95": [accuracy - 0.0625, accuracy + 0.0625],
        "margin": 0.375,
        "margin_ci95": [0.25, 0.5],
        "margins": [1.0 if n < accuracy * 61 else -1.0 for n in range(61)],
    }
    ratios = {"chosen_log_ratio": -0.03125, "chosen_log_ratio_ci95": [-0.0625, -0.015625]}
    ratios |= {"rejected_log_ratio": -0.5, "rejected_log_ratio_ci95": [-0.75, -0.25]}
    return found | (ratios if ratio else {})


def objective_loss(gain: float, *, against: str) -> dict[str, Any]:
    """Return a loss of pairs by the objective, with a gain and its interval of 0.125."""
    return {
        "of": "pairs",
        "against": against,
        "loss": 0.625,
        "loss_ci95": [0.5, 0.75],
        "loss_difference": gain,
        "loss_difference_ci95": [gain - 0.0625, gain + 0.0625],
        "p_value": 0.5,
        "documents": 61,
        "per_example": [[0.625, 1.0]] * 61,
    }


def add_preferences(
    folder: Path,
    objective: str = "dpo",
    *,
    accuracy: float = 0.75,
    fall: float = 0.5,
    gain: float = 0.25,
) -> None:
    """Make the run in `folder` one on pairs: rewards of chosen answers end `fall` below 0. gain: of
    the objective's held-out loss."""
    ratio = objective == "dpo"

    def told(step: int) -> dict[str, float]:
        chosen, rejected = -fall * step / 13, -(fall + 1) * step / 13
        sums = {"log_probs_chosen": 10 * chosen - 40, "log_probs_rejected": 10 * rejected - 50}
        both = {"reward_chosen": chosen, "reward_rejected": rejected}
        return both | sums | {"reward_margin": chosen - rejected, "reward_accuracy": 0.6875}

    lines = folder / "finetune" / "metrics.jsonl"
    write_lines(lines, [step | told(step["step"]) for step in read_lines(lines)])
    chosen = {"reference": "start", "beta": 0.25, "gamma": 0.5}

    def trained(document: Any) -> None:
        document["settings"]["train"]["objective"] = objective
        document["settings"]["preferences"] = chosen

    edit(folder / "finetune" / "summary.json", trained)
    for subject in ("tuned",) if ratio else ("base", "tuned"):
        prefers = rewards(accuracy if subject == "tuned" else 0.5, ratio=ratio)
        path = folder / "evaluate_run" / f"{subject}.json"
        edit(path, lambda d, f=prefers: d.update(rewards=f))
    found = objective_loss(gain, against="reference" if ratio else "NF4 base")
    edit(folder / "evaluate_run" / "tuned.json", lambda d: d.update(objective=found))
    if not ratio:
        paired = {"accuracy": 0.25, "accuracy_ci95": [0.125, 0.375], "margin": 0.25}
        edit(
            folder / "evaluate_run" / "tuned.json",
            lambda d: d["comparisons"]["base"].update(rewards=paired | {"margin_ci95": None}),
        )
    for subject in ("base", "tuned"):
        edit(
            folder / "evaluate_run" / f"{subject}.json",
            lambda d: d["heldout"].update(of="chosen answers"),
        )


def text_loss(loss: float) -> dict[str, Any]:
    """Return a loss of 40 texts of two kinds."""
    fields = {"loss": loss, "loss_ci95": [loss - 0.25, loss + 0.25], "perplexity": 8.0}
    whole = fields | {"documents": 40, "trained_tokens": 9001}
    half = fields | {"documents": 20, "trained_tokens": 4500}
    documents = [{"document": 0, "source": "prose", "loss_sum": 99.5, "tokens": 47}]
    return whole | {
        "of": "texts",
        "sources": {"code": half, "prose": half},
        "per_document": documents,
    }


def add_forgetting(folder: Path, rise: float, *, width: float = 0.03125) -> None:
    """Let the served model of the run in `folder` have lost `rise` nats at other texts, with an
    interval of +- `width`."""
    for subject, loss in (("base", 2.0), ("tuned", 2.0 + rise)):
        path = folder / "evaluate_run" / f"{subject}.json"
        edit(path, lambda d, loss=loss: d.update(other_texts=text_loss(loss)))
    paired = {
        "loss_difference": -rise,
        "loss_difference_ci95": [-rise - width, -rise + width],
        "p_value": 0.001,
        "documents": 40,
    }
    sources = {"code": paired | {"documents": 20}, "prose": paired | {"documents": 20}}
    edit(
        folder / "evaluate_run" / "tuned.json",
        lambda d: d["comparisons"]["base"].update(other_texts=paired | {"sources": sources}),
    )


def evaluations(folder: Path) -> list[Path]:
    return [path for path in (folder / "evaluate_run").glob("*.json") if path.name != ITEMS]


def add_subject(folder: Path, subject: str, *, loss: float) -> None:
    """Add an evaluation to the run in `folder`: the tuned one's with this held-out loss, compared
    with all that are there."""
    others = {path.stem: read_checked_json(path) for path in evaluations(folder)}
    document = others["tuned"] | {"subject": subject, "served": False}
    document["heldout"] = document["heldout"] | {"loss": loss}
    document["comparisons"] = {
        name: compared(other, loss=loss)
        for name, other in others.items()
        if SUBJECTS.index(name) < SUBJECTS.index(subject)
    }
    write_checked_json(folder / "evaluate_run" / f"{subject}.json", document)


def add_original(folder: Path, *, loss: float) -> None:
    add_subject(folder, "original", loss=loss)
    original = read_checked_json(folder / "evaluate_run" / "original.json")
    for path in evaluations(folder):
        if path.stem != "original":
            own = read_checked_json(path)["heldout"]["loss"]
            edit(
                path,
                lambda d, own=own: d["comparisons"].update(original=compared(original, loss=own)),
            )


def compared(other: Any, *, loss: float) -> dict[str, Any]:
    """Return the comparison of a subject of this held-out loss with another."""
    gain = other["heldout"]["loss"] - loss
    tuned = evaluation("demo", "tuned")["comparisons"]["base"]
    ends = [gain - 0.125, gain + 0.125]
    return {**tuned, "loss_difference": gain, "loss_difference_ci95": ends}


def edit(path: Path, change: Any) -> None:
    document = read_checked_json(path)
    change(document)
    write_checked_json(path, document)
