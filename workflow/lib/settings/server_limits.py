"""Known limits of the servers, by which runs are checked before anything is trained.

`LIMITS` has those of vLLM 0.32 (`export.serve`) and of llama.cpp's converters (`export.gguf`), as
measured. Limits of settings are found while these are read, the others when the model is described.
What is not in the table, `check_gguf` and `check_served` find by the programs themselves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from workflow.lib.settings.forms import FORMS

Run = Any  # a `RunConfig`, whose module imports this one
VLLM_MAX_RANK = 512  # the last of its `MaxLoRARanks`
# Multimodal classes that vLLM 0.32 imports without torchvision (each was tried on 2026-11-28; 67
# of its 112 modules failed).
WITHOUT_TORCHVISION = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        *("Aria", "AudioFlamingo3", "Blip2", "Ernie4_5_VLMoe", "FunAudioChat", "Gemma3n", "GlmAsr"),
        *("GraniteSpeech", "GraniteSpeechPlus", "Idefics3", "KimiK25", "KimiVL", "Molmo2"),
        *("PaddleOCRVL", "PaliGemma", "Qwen2Audio", "Qwen4Exp", "SmolVLM", "Voxtral"),
    )
)


@dataclass(frozen=True)
class ServedModel:
    """What a description tells of a model, and of vLLM's environment."""

    architecture: str  # its class by config.json
    multimodal: bool
    has_experts: bool
    adapted_expert: str | None  # path of a stack of experts with an adapter
    vllm_on_cpu: bool
    torchvision: bool  # whether vLLM's environment has it
    compute_dtype: str


class Limit(NamedTuple):
    """`cause` returns the setting or part of the model in the way, in words, or None. Without a
    description its second argument is None."""

    server: Literal["vllm", "gguf"]
    adapter_only: bool  # a merged model has no such limit
    reason: str
    cause: Callable[[Run, ServedModel | None], str | None]
    cure: str | None = None


def _rank(run: Run, _: ServedModel | None) -> str | None:
    ranks = {"lora.r": run.lora.r, **run.lora.rank_pattern}
    name, rank = max(ranks.items(), key=lambda item: item[1])
    return f"{name} = {rank}" if rank > VLLM_MAX_RANK else None


def _beside_lora(run: Run, _: ServedModel | None) -> str | None:
    """Settings that give the adapter more than LoRA's pairs of matrices."""
    settings = {
        "lora.use_dora": run.lora.use_dora,
        "lora.modules_to_save": ", ".join(run.lora.modules_to_save),
        "model.add_tokens": ", ".join(run.model.add_tokens),
    }
    return ", ".join(f"{name} = {value}" for name, value in settings.items() if value) or None


def _mixture_on_cpu(_: Run, model: ServedModel | None) -> str | None:
    return model.architecture if model and model.has_experts and model.vllm_on_cpu else None


def _lacks_torchvision(_: Run, model: ServedModel | None) -> str | None:
    if model is None or model.torchvision or model.architecture in WITHOUT_TORCHVISION:
        return None
    return model.architecture if model.multimodal else None


def _compute_dtype(run: Run, model: ServedModel | None) -> str | None:
    form = FORMS[run.served]
    if model is None or model.compute_dtype in form.vllm or run.export.serve != "vllm":
        return None
    return f"{form.label} in {model.compute_dtype}"


LIMITS = (
    Limit("vllm", True, "its LoRA has pairs of matrices alone", _beside_lora),
    Limit("vllm", True, f"its largest rank is {VLLM_MAX_RANK}", _rank),
    Limit(
        "vllm",
        True,
        "on CPUs it serves no adapter of a mixture of experts, for want of Triton",
        _mixture_on_cpu,
    ),
    Limit(
        "vllm",
        False,
        "its module of this class needs torchvision, which its environment lacks (the package "
        "index has none for its torch on CPUs)",
        _lacks_torchvision,
        "Set export.serve to llama_cpp with export.gguf, or to none and serve on a machine with "
        "GPUs; or install a torchvision that fits into .venv-serving",
    ),
    Limit(
        "vllm",
        False,
        "it has no kernel of this form for the compute dtype",
        _compute_dtype,
        "Set model.compute_dtype to bfloat16, or export.serve to none",
    ),
    Limit("gguf", True, "a GGUF adapter has pairs of matrices alone", _beside_lora),
    Limit(
        "gguf",
        True,
        "its converter takes no adapter on experts",
        lambda _, model: model.adapted_expert if model else None,
    ),
)
CURES = {
    "vllm": "Set export.merged to true and evaluate.served to auto, change it, or set export.serve "
    "to none",
    "gguf": "Set export.merged to true and gguf_of to [merged], or change it",
}
CURE_OF_SAMPLING = "Change it, or set answers.sampler to engine"


def first_limit(run: Run, model: ServedModel | None = None) -> str | None:
    """Return the first limit that is in a run's way, in words."""
    export, contents = run.export, ", ".join(run.export.gguf_of)
    # whether a setting starts a server, and whether it has the adapter as such
    used = {
        "export.serve = vllm": (export.serve == "vllm", FORMS[run.served].adapter is not None),
        f"export.gguf_of = {contents}": (bool(export.gguf), "adapter" in export.gguf_of),
        "answers.sampler = vllm": (run.serves_answers, True),
    }
    for setting, (starts, has_adapter) in used.items():
        server = "gguf" if "gguf" in setting else "vllm"
        for limit in LIMITS:
            relevant = starts and limit.server == server and (has_adapter or not limit.adapter_only)
            if relevant and (cause := limit.cause(run, model)) is not None:
                cure = CURE_OF_SAMPLING if "sampler" in setting else limit.cure or CURES[server]
                return f"{setting}: {limit.reason}: {cause}. {cure}"
    return None
