"""Settings of the stages after training: export, evaluation and report."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from workflow.lib.settings.errors_in_words import HUB_REPO
from workflow.lib.settings.forms import EXPORTS, REFERENCES, HubForm, Served, SubjectName
from workflow.lib.settings.section_base import Affects, Section

HELDOUT_LOSS, OTHER_TEXT_LOSS = "heldout_loss", "other_text_loss"
# Of held-out pairs or rated answers: the required number is the value, no gain over a model.
REWARDS = ("reward_accuracy", "reward_margin")
REWARD = "reward"  # of sampled answers to held-out prompts: the gain since the first round
CONVERTER = "convert_hf_to_gguf.py"  # of a llama.cpp checkout
ADAPTER_CONVERTER = "convert_lora_to_gguf.py"
# Of xllamacpp, as in envs/pins.txt, whose last number is llama.cpp's; and its source's SHA-256 by
# pypi.org on 2026-11-23.
LLAMA_CPP_RELEASE = "2026.10.11549"
LLAMA_CPP_SHA256 = "c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b"
# Own names of `require`, and the setting that measures each.
MEASURED_BY = {
    HELDOUT_LOSS: "heldout",
    OTHER_TEXT_LOSS: "forgetting",
    **dict.fromkeys(REWARDS, "heldout"),
    REWARD: None,
}
CHECKED_BEFORE = Affects(stages=("preflight_run", "evaluate_run"))
GGUF_STAGES = Affects(stages=("convert_gguf", "publish_run"))
ID_STAGES = Affects(stages=("consolidate", "export_step", "write_card"))
PUBLISHED = Affects(stages=("publish_run",))
GgufFormat = Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m"]
GgufForm = Literal["merged", "adapter"]


class ExportConfig(Section):
    """What `consolidate` leaves besides the adapter."""

    affects: ClassVar = Affects("result", stages=("consolidate",))

    steps: Annotated[
        tuple[Annotated[int, Field(ge=1, le=10**9)], ...],
        Affects("plan", stages=("preflight_run", "finetune")),
    ] = ()
    """Also export the adapters after these optimizer steps. Their checkpoints are kept in addition
    to `train.keep_checkpoints`."""
    merged: Annotated[
        bool,
        Affects(stages=("consolidate", "convert_gguf", "publish_run")),
    ] = False
    """Also write a merged bf16 model (streamed, one shard in memory at a time)."""
    merge_onto: Literal["dequantized", "original"] = "original"
    """Weights to merge the adapter into: the original ones, or the dequantized NF4 base."""
    w4a16: Annotated[bool, PUBLISHED] = False
    """Also write the merged model in 4 bits, for vLLM (compressed-tensors, scheme W4A16)."""
    shard_gib: Annotated[float, Affects(stages=("consolidate", "convert_merged"))] = Field(
        1.0, gt=0.0, le=64.0
    )
    """Largest file of the merged model, GiB."""
    gguf: Annotated[tuple[GgufFormat, ...], GGUF_STAGES] = ()
    """Formats of GGUF files (llama.cpp, Ollama); each is checked in llama.cpp, which must know the
    model's class and tokenizer (not the demo's)."""
    gguf_of: Annotated[tuple[GgufForm, ...], GGUF_STAGES] = Field(("merged",), min_length=1)
    """Contents of the GGUF files: the merged model (`merged`), the adapter beside the original
    model (`adapter`), or both."""
    llama_cpp: Annotated[
        str | None,
        Affects(stages=("check_gguf", "convert_gguf")),
    ] = None
    """Folder of a llama.cpp checkout; its converters run with your rights. null = a pinned release
    from the package index."""
    serve: Annotated[
        Literal["none", "vllm", "llama_cpp"],
        Affects(stages=("check_served",)),
    ] = "none"
    """Local server to compare with the evaluation. It serves the merged model or the adapter on the
    original; llama.cpp serves the first format of `gguf`."""
    base_id: Annotated[str | None, ID_STAGES] = Field(None, pattern=HUB_REPO)
    """Hub id (owner/name) of the model in the folder `model.source`, for `adapter_config.json` and
    the model card. It is not checked."""
    nf4_base_id: Annotated[str | None, ID_STAGES] = Field(None, pattern=HUB_REPO)
    """Hub id of a copy of the folder below `results/base`, if Transformers cannot make this 4-bit
    base. It is not checked."""
    hub_repo: Annotated[str | None, PUBLISHED] = Field(None, pattern=HUB_REPO)
    """Hugging Face hub repository (owner/name) for `snakemake --cores 1 publish`."""
    hub_form: Annotated[HubForm, PUBLISHED] = "adapter"
    """The form to upload."""
    hub_public: Annotated[bool, PUBLISHED] = False
    """Make a new repository public."""

    @property
    def exported(self) -> tuple[str, ...]:
        """The exported forms besides the adapter."""
        return tuple(name for name in EXPORTS if getattr(self, name))

    @model_validator(mode="after")
    def _published_is_exported(self) -> "ExportConfig":
        if self.hub_form not in ("adapter", *self.exported):
            raise ValueError(
                f"hub_form = {self.hub_form}: it is not exported. Set {self.hub_form}, or publish "
                "the adapter"
            )
        return self

    @model_validator(mode="after")
    def _exports_have_their_source(self) -> "ExportConfig":
        for name in self.exported:
            source = EXPORTS[name].made_of
            if source in (None, *self.exported) or (name == "gguf" and source not in self.gguf_of):
                continue
            value, change = getattr(self, name), f"Set {source} to true"
            if name == "gguf":
                value, change = ", ".join(self.gguf), f"{change}, or gguf_of to [adapter]"
            raise ValueError(
                f"{name} = {value}: it is made of the {source} model ({source} = False). {change}"
            )
        return self


# Bounds of gains: shares lie between 0 and 1, correlations between -1 and 1, scores of texts up to
# 100, and a guess among 2^28 tokens costs 19.4 nats.
MOST_GAIN = {
    **dict.fromkeys(
        ("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "acc_all", "exact_match", "f1", "em"),
        1.0,
    ),
    **dict.fromkeys(("mcc", "brier_score"), 2.0),
    **dict.fromkeys(("bleu", "chrf", "chrf++"), 100.0),
    HELDOUT_LOSS: 20.0,
    OTHER_TEXT_LOSS: 20.0,
    "reward_accuracy": 1.0,
}


def is_loss(requirement: str) -> bool:
    """Whether a gain of held-out loss is required, of all documents or of one source."""
    return requirement.partition("/")[0] == HELDOUT_LOSS


class EvaluateConfig(Section):
    """What is measured, and on which models."""

    affects: ClassVar = Affects("result", stages=("evaluate_run",))

    subjects: tuple[SubjectName, ...] | Literal["auto"] = "auto"
    """Forms to measure. `auto`: the 16-bit original, the NF4 base, the adapter on it, the start
    adapter, the exported models, the served model."""
    served: Annotated[
        Served | Literal["auto"], Affects(stages=("evaluate_run", "check_served"))
    ] = "auto"
    """The served model, for the verdict: the adapter on NF4 (`tuned`), on the original, or an
    export. `auto`: the last exported of these, else `tuned`."""
    heldout: Annotated[bool, CHECKED_BEFORE] = True
    """Held-out loss and perplexity per trained token, with intervals."""
    max_documents: int | None = Field(None, ge=1)
    """Most held-out documents to use; null = all."""
    forgetting: bool = True
    """Loss of 43 shipped texts of other kinds (prose, code, chats), to see what training made
    worse."""
    tasks: Annotated[tuple[str, ...], CHECKED_BEFORE] = ()
    """lm-evaluation-harness tasks, by name; local ones are looked up in `tasks_dir` first."""
    tasks_dir: Annotated[str | None, CHECKED_BEFORE] = None
    """Folder with task YAML files; null = only the tasks shipped with the harness."""
    task_code: Annotated[bool, CHECKED_BEFORE] = False
    """Allow task files of `tasks_dir` to run Python code (`!function`, `class`). It runs with your
    rights."""
    task_limit: int | None = Field(None, ge=1)
    """Most items per task; null = all."""
    num_fewshot: Annotated[int, CHECKED_BEFORE] = Field(0, ge=0, le=64)
    """Examples before each task item."""
    apply_chat_template: bool = True
    """Wrap task items in the tokenizer's chat template."""
    samples: int = Field(8, ge=0, le=1000)
    """Held-out prompts that every form answers greedily, for comparison by reading."""
    max_new_tokens: Annotated[int, Affects(stages=("evaluate_run", "check_served"))] = Field(
        96, ge=1, le=8192
    )
    """Most tokens of a sample answer."""
    batch_size: Annotated[
        Annotated[int, Field(ge=1, le=4096)] | Literal["auto"], Affects("none")
    ] = "auto"
    """Most sequences per forward pass, halved if memory runs out; `auto` = as free memory
    allows."""
    processes: Annotated[Annotated[int, Field(ge=1, le=64)] | Literal["auto"], Affects("none")] = (
        "auto"
    )
    """Processes that share the items; `auto` = one per GPU."""
    shard: Annotated[bool | Literal["auto"], Affects("none")] = "auto"
    """Shard the weights over processes; `auto` = if they do not fit on one GPU. `false`: one
    process fills GPU after GPU."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the choice of documents and samples, and of tasks."""
    require: Annotated[dict[str, float], Affects(stages=("preflight_run", "require_gain"))] = Field(
        {}
    )
    """Least gain of the served model over the original: `heldout_loss` (by the objective),
    `heldout_loss/<source>`, `other_text_loss` or `task/metric`; -0.02 allows a loss of 0.02. For
    preferences the least `reward_accuracy` or `reward_margin` itself; of sampled answers `reward`:
    the gain of held-out prompts since the first round. If it is missed, the workflow fails."""
    require_by: Annotated[Literal["estimate", "interval"], Affects(stages=("require_gain",))] = (
        "estimate"
    )
    """The value to compare: the gain itself, or the lower end of its 95% interval."""

    @model_validator(mode="after")
    def _something_is_compared(self) -> "EvaluateConfig":
        if self.subjects == "auto":
            return self
        if not set(REFERENCES) & set(self.subjects):
            raise ValueError(
                f"subjects = {', '.join(self.subjects) or '[]'}: gains are measured against one "
                f"of {', '.join(REFERENCES)}. Add it, or set auto"
            )
        return self

    def judged(self, *, last_round: bool) -> "EvaluateConfig":
        """Return the settings of a verdict: rounds before the last one need no reward."""
        return self.model_copy(
            update={"require": {k: x for k, x in self.require.items() if k != REWARD or last_round}}
        )

    @model_validator(mode="after")
    def _requirements_are_measured(self) -> "EvaluateConfig":
        for name in self.require:
            own = HELDOUT_LOSS if is_loss(name) else name
            setting = MEASURED_BY.get(own)
            if own == REWARD:
                continue
            if setting is not None and not getattr(self, setting):
                raise ValueError(
                    f"require = {name}: it is not measured ({setting} = False). Set {setting} to "
                    "true, or remove the requirement"
                )
            if setting is None and not all(name.partition("/")):
                raise ValueError(
                    f"require = {name}: must be {', '.join(MEASURED_BY)} or task/metric, as "
                    "arc_easy/acc. Correct the name"
                )
            metric = own.rpartition("/")[2].partition(",")[0]
            most = MOST_GAIN.get(metric)
            if most is not None and self.require[name] > most:
                least = f"require = {name}: {self.require[name]:g}"
                if name in REWARDS:
                    raise ValueError(
                        f"{least}: a share is at most {most:g}. Ask for less: 0.6 is 60% of the "
                        "examples"
                    )
                raise ValueError(
                    f"{least}: no model can gain more than {most:g} by {metric}. Ask for less: "
                    "gains are differences in the metric's own unit (0.05 of an accuracy is 5 "
                    "percentage points)"
                )
        return self


class ReportConfig(Section):
    """The report."""

    affects: ClassVar = Affects("result", stages=("render_report",))

    title: str = Field("Fine-tuning report", min_length=1, max_length=200)
    """Title of the page."""
    max_samples: int = Field(8, ge=0, le=1000)
    """Sample answers shown per run."""
