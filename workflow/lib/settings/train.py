"""Settings of the base model, its quantization, the adapter, the optimization and the hardware."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from workflow.lib.settings.objectives import ObjectiveName
from workflow.lib.settings.optimizer_kinds import OptimizerName
from workflow.lib.settings.section_base import Affects, Name, Section, Share, label

Rank = Annotated[int, Field(ge=1, le=1024)]
CALIBRATING = ("calibrated", "auto")
MOST_SHARERS = 64  # processes to a row
ALL_LINEARS = (".+",)  # as an expression of `quantize.keep`
BITS = Affects(stages=("quantize_base", "preflight_run", "write_card"))
CALIBRATED_ONLY = Affects(stages=BITS.stages, needs=("method", *CALIBRATING))
NF4_ONLY = Affects(needs=("method", "absmax", *CALIBRATING))
TEXT_ONLY = Affects(needs=("reads_text", "yes"))
RESTARTS_ONLY = Affects(needs=("lr_schedule", "cosine_with_restarts"))
STABLE_ONLY = Affects(needs=("lr_schedule", "warmup_stable_decay"))
SCALED_ONLY = Affects(needs=("rope_type", "yarn", "linear", "llama3"))
YARN_ONLY = Affects(needs=("rope_type", "yarn"))
LLAMA3_ONLY = Affects(needs=("rope_type", "llama3"))
FLOAT8_ONLY = Affects(needs=("matmul_dtype", "float8", "auto"))
Alpha = Annotated[float, Field(gt=0.0, le=65536.0)]
Layers = Annotated[int, Field(ge=0, le=10_000)]
Gib = Annotated[float, Field(gt=0.0, le=1e6)]


class RopeScaling(Section):
    """Rotary positions for rows beyond the context that the model was made for. A copy of the model
    has the scaling in its config.json, so every later stage uses it."""

    affects: ClassVar = Affects("result", stages=("extend_model", "finetune", "write_card"))

    rope_type: Literal["family", "yarn", "linear", "llama3"] = "family"
    """Method of Transformers: yarn (arXiv 2309.00071), linear (arXiv 2306.15595), llama3; family =
    the model's own, unchanged."""
    factor: Annotated[float | None, SCALED_ONLY] = Field(None, gt=1.0, le=1024.0)
    """Required with a method: new context / original context."""
    original_max_position_embeddings: Annotated[int | None, SCALED_ONLY] = Field(
        None, ge=1, le=2**40
    )
    """Context without scaling; null = the model's, before a scaling of its own."""
    beta_fast: Annotated[float, YARN_ONLY] = Field(32.0, gt=0.0, le=1024.0)
    """yarn: rotations within the original context from which a frequency stays as it is."""
    beta_slow: Annotated[float, YARN_ONLY] = Field(1.0, gt=0.0, le=1024.0)
    """yarn: rotations below which a frequency is divided by the factor."""
    low_freq_factor: Annotated[float, LLAMA3_ONLY] = Field(1.0, gt=0.0, le=1024.0)
    """llama3: frequencies with fewer rotations are divided by the factor."""
    high_freq_factor: Annotated[float, LLAMA3_ONLY] = Field(4.0, gt=0.0, le=1024.0)
    """llama3: frequencies with more rotations stay as they are."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The settings of this method under Transformers' names; {} for the family's own."""
        if self.rope_type == "family":
            return {}
        methods = {key: self.affected_by(key).needs for key in type(self).model_fields}
        read = {key for key, needs in methods.items() if not needs or self.rope_type in needs}
        return self.model_dump(mode="json", include=read, exclude_none=True)

    def context(self, original: int) -> int:
        """Return the tokens of the scaled model's context; original: without scaling."""
        return int((self.factor or 1) * (self.original_max_position_embeddings or original))

    @model_validator(mode="after")
    def _method_and_factor(self) -> "RopeScaling":
        if self.rope_type != "family" and self.factor is None:
            raise ValueError(
                f"rope_type = {self.rope_type}: it needs a factor, new context / original context. "
                "Set factor, as 4"
            )
        for key, field in type(self).model_fields.items():
            _, *methods = self.affected_by(key).needs or (None, self.rope_type)
            if self.rope_type not in methods and getattr(self, key) != field.default:
                raise ValueError(
                    f"{key} = {getattr(self, key)}: rope_type = {self.rope_type} does not read it. "
                    f"Set rope_type to {' or '.join(methods)}, or remove it"
                )
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor = {self.low_freq_factor}: must be below high_freq_factor = "
                f"{self.high_freq_factor}. Change one"
            )
        if self.rope_type == "yarn" and self.beta_slow >= self.beta_fast:
            raise ValueError(
                f"beta_slow = {self.beta_slow}: must be below beta_fast = {self.beta_fast}. Change "
                "one"
            )
        return self


class ModelConfig(Section):
    """The base model."""

    affects: ClassVar = Affects(
        "result",
        stages=(
            "sample_answers",
            "score_tokens",
            "preflight_run",
            "finetune",
            "consolidate",
            "export_step",
            "convert_merged",
            "evaluate_run",
            "check_served",
            "write_card",
        ),
    )

    name: Name = "model"
    """Label of the base model, part of its artifacts' folder names; by default the last part of
    `source`."""
    source: str = Field("", max_length=1024)
    """Required: local directory (config.json, tokenizer, *.safetensors), or a Hugging Face hub id
    `owner/name`."""
    revision: str | None = Field(None, min_length=1, max_length=256)
    """Hub branch, tag or commit; null = `main`. It is resolved to a commit once and recorded."""
    add_tokens: Annotated[
        tuple[str, ...], Affects(stages=("extend_model", "finetune", "write_card"))
    ] = ()
    """New tokens, such as `<think>`: their rows of embedding and head are added, and trained beside
    LoRA (PEFT's `trainable_token_indices`)."""
    rope_scaling: Annotated[
        RopeScaling, Affects(stages=("extend_model", "finetune", "write_card"))
    ] = RopeScaling()
    """Scaled rotary positions, for rows beyond the model's context."""
    attention: Literal[
        "auto", "eager", "sdpa", "varlen", "flex", "flash_attention_2", "flash_attention_3"
    ] = "auto"
    """Attention implementation. `auto`: on GPUs varlen (torch's FlashAttention, cuDNN, kernels of
    this project); for soft caps flash_attention_2 if installed, else flex; on CPUs sdpa or
    eager."""
    attention_dropout: Annotated[
        Literal[0, "family"], Affects(stages=("preflight_run", "finetune"))
    ] = 0
    """Dropout of attention weights in training: none, or the model family's own. `family` uses
    sdpa, which is slower, because varlen and flex have no dropout."""
    compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of activations and matmuls. `auto`: bfloat16 on GPUs that have it, float16 on older
    ones (not yet measured), float32 on CPUs."""

    @model_validator(mode="before")
    @classmethod
    def _named_after_its_source(cls, document: Any) -> Any:
        if not isinstance(document, Mapping):
            return document
        return {"name": label(str(document.get("source") or ""), default="model"), **document}

    @property
    def is_copied(self) -> bool:
        """Whether a copy of the model, with more tokens or another context, is trained."""
        return bool(self.add_tokens) or bool(self.rope_scaling.parameters)

    @field_validator("add_tokens")
    @classmethod
    def _tokens_can_be_added(cls, tokens: tuple[str, ...]) -> tuple[str, ...]:
        for token in tokens:
            if not token.isprintable() or token != token.strip():
                raise ValueError(
                    f"{token!r} has blanks around it, or characters without a glyph: a tokenizer "
                    "would not find it in texts. Write it without them, or remove it"
                )
        return tokens


class QuantizeConfig(Section):
    """Bits of the frozen base: NF4 (QLoRA, arXiv 2305.14314), or 16."""

    affects: ClassVar = Affects(
        "result", stages=("measure_sensitivity", "quantize_base", "preflight_run", "write_card")
    )

    block_size: Annotated[Literal[64, 128, 256, 512], NF4_ONLY] = 64
    """Weights that share one scale (absmax)."""
    double_quant: Annotated[bool, NF4_ONLY] = True
    """Quantize the scales too: 0.127 instead of 0.5 bits per weight of overhead at block size
    64."""
    method: Annotated[Literal["absmax", "calibrated", "auto", "none"], BITS] = "absmax"
    """absmax: like bitsandbytes. calibrated: least change of outputs on calibration tokens (like
    GPTQ). auto: calibrated if one H200 needs at most an hour. none: 16 bits (plain LoRA)."""
    keep: Annotated[tuple[str, ...] | Literal["auto"], BITS] = ()
    """Linears and experts that stay in 16 bits: regular expressions for consecutive parts of a
    path, as `down_proj`, `self_attn`, `layers.0`, `layers.(0|31).mlp`. `auto`: those whose loss in
    4 bits is largest, as many as the GPUs hold without a slower plan."""
    calibration_tokens: Annotated[int, CALIBRATED_ONLY] = Field(24_576, ge=256, le=2**24)
    """Training tokens for calibration; never held-out tokens."""
    calibration_text: Annotated[str | None, TEXT_ONLY] = Field(None, min_length=1, max_length=4096)
    """UTF-8 text file for half of these tokens, so that other kinds of text lose nothing; null =
    only training rows. `keep: auto` measures on it too."""

    @property
    def calibrates(self) -> bool:
        """Whether the base depends on tokens, or may."""
        return self.method in CALIBRATING

    @property
    def kept(self) -> tuple[str, ...]:
        """Expressions of all linears in 16 bits: with `method: none` that of any path."""
        return ALL_LINEARS if self.method == "none" else self.patterns

    @property
    def patterns(self) -> tuple[str, ...]:
        """The expressions of `keep`; none before `auto` is decided."""
        return () if self.keep == "auto" else self.keep

    @property
    def measures(self) -> bool:
        """Whether the kept linears follow from their sensitivities."""
        return self.keep == "auto"

    @property
    def reads_text(self) -> str:
        """`yes` if a base depends on `calibration_text`."""
        return "yes" if self.calibrates or self.measures else "no"

    def keeping(self, patterns: Iterable[str]) -> "QuantizeConfig":
        """Return the settings with a decided `keep`."""
        return self.model_copy(update={"keep": tuple(patterns)})

    @model_validator(mode="after")
    def _keep_fits(self) -> "QuantizeConfig":
        if self.keep and self.method == "none":
            raise ValueError(
                f"keep = {list(self.patterns) or self.keep}: method = none keeps all linears in 16 "
                "bits. Remove keep, or set method to absmax to have the others in 4 bits"
            )
        if "auto" in self.patterns:
            raise ValueError(
                f"keep = {list(self.patterns)}: auto decides the bits of every linear, and others "
                "are named beside it. Write keep: auto, or name linears alone"
            )
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"keep = {pattern!r} is no regular expression ({error}). Write a name "
                    "(down_proj), a module (self_attn) or a layer (layers.0)"
                ) from None
        return self


class LoraSettings(Section):
    """The adapter (LoRA, arXiv 2106.09685), as PEFT understands it."""

    affects: ClassVar = Affects("result", stages=("preflight_run", "finetune"))

    r: Rank = 16
    """Rank of the update."""
    alpha: Alpha = 32.0
    """Scale numerator: the update is multiplied by alpha / r (alpha / sqrt(r) with
    `use_rslora`)."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout on the adapter's input, probability. Rounded to a multiple of 1 / 65,536. Training on
    preferences has no dropout of any kind, as in TRL."""
    target_modules: tuple[str, ...] | str = "all-linear"
    """Linear layers with an adapter: names (ends of paths: `q_proj`), a regular expression for
    whole paths, or `all-linear`."""
    rank_pattern: dict[str, Rank] = Field({})
    """Other ranks for some layers: a regular expression for the end of a path, and its rank. The
    first match counts."""
    alpha_pattern: dict[str, Alpha] = Field({})
    """Other values of `alpha`, in the same form."""
    use_rslora: bool = False
    """Rank-stabilized scale, arXiv 2312.03732."""
    use_dora: bool = False
    """Train the length of every weight row separately from its direction (DoRA, arXiv 2402.09353).
    Slower, with more memory."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained whole in fp32 (16 bytes a weight) and exported: untied `lm_head`,
    `embed_tokens`; routers of a mixture (`mlp.gate`, `mlp.router`)."""

    @property
    def names_modules(self) -> bool:
        """Whether the settings name modules, which the model may lack."""
        patterns = self.rank_pattern or self.alpha_pattern
        return bool(patterns or self.modules_to_save or self.target_modules != "all-linear")

    @model_validator(mode="after")
    def _expressions_compile(self) -> "LoraSettings":
        if not self.target_modules:
            raise ValueError("target_modules = []: name at least one linear layer, or all-linear")
        expressions = {
            "target_modules": [self.target_modules],
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
        }
        for key, value in expressions.items():
            for expression in [text for text in value if isinstance(text, str)]:
                try:
                    re.compile(expression)
                except re.error as error:
                    why = f"{key}: {expression!r} is no regular expression ({error}). Correct it"
                    raise ValueError(why) from None
        return self


class TrainConfig(Section):
    """The optimization."""

    affects: ClassVar = Affects("result", stages=("preflight_run", "finetune"))

    objective: Annotated[
        ObjectiveName, Affects(stages=("preflight_run", "finetune", "evaluate_run"))
    ] = "sft"
    """Objective: the next token (`sft`), pairs (`dpo`, `ipo`, `simpo`, `orpo`), rated answers
    (`kto`, see `preferences`), a teacher's predictions (see `distill`), or rewards (see `grpo`)."""
    start_from: Annotated[str | None, Affects(stages=("finetune",))] = Field(
        None, min_length=1, max_length=4096
    )
    """Adapter to continue: a run's name, a folder (`./name` if a run has this name), or a hub id;
    null = a new one. It sets `lora` defaults (not for a hub id)."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of adapter initialization, data order and dropout."""
    epochs: float | None = Field(3.0, gt=0.0, le=1000.0)
    """Passes over the training rows; null if `max_steps` is set, which alone sets the length."""
    max_steps: int | None = Field(None, ge=1, le=10**9)
    """Optimizer steps, in place of `epochs`."""
    global_batch_size: int = Field(16, ge=1, le=2**20)
    """Rows per optimizer step over all processes; the number of GPUs does not change it."""
    micro_batch_size: Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], Affects("plan")] = (
        "auto"
    )
    """Rows per process and forward pass, a divisor of the rows per process; `auto` = the fastest
    that fits by preflight."""
    optimizer: OptimizerName = "adamw"
    """`adamw`: torch's. `adamw_8bit`: bitsandbytes', with moments in 8 bits."""
    learning_rate: float = Field(2e-4, gt=0.0, le=1.0)
    """Peak learning rate."""
    loraplus_lr_ratio: float | None = Field(None, ge=1.0, le=1000.0)
    """LoRA+ (arXiv 2402.12354): learning rate of LoRA's B matrices as a multiple of
    `learning_rate`; null = the same."""
    lr_schedule: Literal[
        "cosine", "linear", "constant", "cosine_with_restarts", "warmup_stable_decay"
    ] = "cosine"
    """Decay after the warm-up, as in Transformers."""
    lr_cycles: Annotated[int, RESTARTS_ONLY] = Field(1, ge=1, le=10_000)
    """Cosines of `cosine_with_restarts`."""
    decay_share: Annotated[Share, STABLE_ONLY] = 0.1
    """Share of the last steps in which `warmup_stable_decay` falls by a cosine."""
    warmup_share: Share = 0.03
    """Share of steps in which the rate rises linearly from 0."""
    warmup_steps: int | None = Field(None, ge=0, le=10**9)
    """The same in steps, in place of `warmup_share`; null = the share."""
    min_lr_share: Share = 0.0
    """Final learning rate as a share of the peak (not `constant`)."""
    weight_decay: float = Field(0.0, ge=0.0, le=1.0)
    """AdamW weight decay of the adapter."""
    router_aux_loss_coef: float | None = Field(None, ge=0.0, le=100.0)
    """Factor of a mixture's load-balancing loss. null = config.json's if the routers are trained,
    else 0. Above 0, micro-batches change the result slightly."""
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """AdamW first-moment decay."""
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """AdamW second-moment decay."""
    adam_eps: float = Field(1e-8, gt=0.0, le=1e-2)
    """AdamW denominator term."""
    max_grad_norm: float | None = Field(1.0, gt=0.0)
    """Largest global gradient norm; null = no clipping."""
    activation_checkpointing: Annotated[bool | int | float | Literal["auto"], Affects("plan")] = (
        "auto"
    )
    """Layers to recompute in backward: true = all, false = none, k = every k-th, 0.625 = 5 of 8;
    `auto` = the fastest that fits."""
    keep_attention: Annotated[bool | Literal["auto"], Affects("plan")] = "auto"
    """Recomputed layers keep attention's results (varlen, heads up to 256 wide), in host memory
    where activations are offloaded; `auto`: where that is faster, in rows of 16,384 tokens and
    more."""
    matmul_dtype: Literal["compute_dtype", "float8", "auto"] = "compute_dtype"
    """Dtype of matmuls with frozen weights in training. `float8`: e4m3, compute capability 8.9
    (CPUs emulate it). `auto`: float8 if possible within `max_matmul_loss_rise`."""
    matmul_passes: Annotated[Literal["both", "forward", "backward"], FLOAT8_ONLY] = "both"
    """Passes that use `matmul_dtype`; `backward` changes the result least."""
    max_matmul_loss_rise: Annotated[
        float, Affects("none", needs=("matmul_dtype", "float8", "auto"))
    ] = Field(0.05, ge=0.0, le=10.0)
    """The run stops if `matmul_dtype` raises the base's loss by more, nats per trained token. It is
    measured before the first step."""
    fused_layers: bool = True
    """Fused norms, rotary embeddings and gated feed-forwards: faster, with fewer saved activations.
    Only rounding differs."""
    fused_loss: bool = True
    """On GPUs, loss kernels without fp32 logits: faster, and up to 0.9 GiB less memory. Only
    rounding differs."""
    evaluate_every_steps: int | None = Field(None, ge=1, le=10**9)
    """Optimizer steps between held-out losses; one more is measured after the last step. null =
    none."""
    evaluate_documents: int | None = Field(256, ge=1, le=10**9)
    """Most held-out documents to measure per source, drawn by `seed`; null = all."""
    early_stopping_patience: int | None = Field(None, ge=1, le=10_000)
    """Training ends after this many held-out losses without a new lowest; null = never. Needs
    `evaluate_every_steps`; `select: best` keeps the best adapter."""
    select: Literal["last", "best"] = "last"
    """The adapter to keep: of the `last` step, or with the lowest held-out loss (`best`; needs
    `evaluate_every_steps`)."""
    checkpoint_every_steps: Annotated[int, Affects("none")] = Field(50, ge=1, le=10**9)
    """Optimizer steps between checkpoints; one more is written after step 1."""
    checkpoint_every_minutes: Annotated[float | None, Affects("none")] = Field(
        20.0, gt=0.0, le=100_000.0
    )
    """Most minutes between checkpoints; null = no limit."""
    keep_checkpoints: Annotated[int, Affects("plan")] = Field(2, ge=1, le=1000)
    """Number of newest checkpoints to keep during training."""
    grace_seconds: Annotated[float, Affects("none")] = Field(60.0, ge=1.0, le=86_400.0)
    """Seconds to finish the step and save after a signal to stop; a second start waits this long
    for the first."""
    hang_seconds: Annotated[float, Affects("none")] = Field(45.0, ge=5.0, le=86_400.0)
    """The run stops after this many seconds without progress in a step, or after ten times the
    longest step if that is more."""
    deterministic: bool = False
    """Use only deterministic GPU kernels. Slower, but the same GPUs give the same adapter bit for
    bit."""
    log_every_steps: Annotated[int, Affects("none")] = Field(1, ge=1, le=10**9)
    """Optimizer steps between lines of metrics.jsonl."""

    @property
    def begins_longer_runs(self) -> bool:
        """Whether no step depends on how many follow, so that more of them continue the run."""
        counted = self.warmup_steps is not None or self.warmup_share == 0
        steady = self.lr_schedule == "constant" and counted
        return steady and not self.chooses_by_heldout

    @property
    def chooses_by_heldout(self) -> bool:
        """Whether held-out losses decide the exported adapter."""
        return self.select == "best" or self.early_stopping_patience is not None

    @model_validator(mode="before")
    @classmethod
    def _steps_in_place_of_epochs(cls, document: Any) -> Any:
        if not isinstance(document, Mapping) or document.get("max_steps") is None:
            return document
        return {"epochs": None, **document}

    @model_validator(mode="after")
    def _one_warmup(self) -> "TrainConfig":
        usual = type(self).model_fields["warmup_share"].default
        if self.warmup_steps is not None and self.warmup_share != usual:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} and warmup_share = {self.warmup_share}: one "
                "of them sets the warm-up. Remove the other"
            )
        return self

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        if (self.epochs is None) == (self.max_steps is None):
            change = "Set one of them" if self.epochs is None else "Set the other to null"
            raise ValueError(
                f"epochs = {self.epochs} and max_steps = {self.max_steps}: exactly one sets the "
                f"length. {change}"
            )
        if self.micro_batch_size != "auto" and self.micro_batch_size > self.global_batch_size:
            raise ValueError(
                f"micro_batch_size = {self.micro_batch_size}: must be at most global_batch_size = "
                f"{self.global_batch_size}. Lower it, or set auto"
            )
        if self.select == "best" and self.evaluate_every_steps is None:
            raise ValueError(
                "select = best: the best adapter is the one with the lowest held-out loss, and "
                "evaluate_every_steps is null. Set it to a number of steps, or set select to last"
            )
        if self.early_stopping_patience is not None and self.evaluate_every_steps is None:
            raise ValueError(
                f"early_stopping_patience = {self.early_stopping_patience}: it counts held-out "
                "losses, and evaluate_every_steps is null. Set it to a number of steps, or set "
                "early_stopping_patience to null"
            )
        for key, schedule in (
            ("lr_cycles", "cosine_with_restarts"),
            ("decay_share", "warmup_stable_decay"),
        ):
            value = getattr(self, key)
            if self.lr_schedule != schedule and value != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key} = {value}: lr_schedule = {self.lr_schedule} does not read it. Remove "
                    f"it, or set lr_schedule to {schedule}"
                )
        level = self.activation_checkpointing
        if isinstance(level, float) and not 0 < level < 1:
            raise ValueError(
                f"activation_checkpointing = {level}: a share of the layers must be above 0 and "
                "below 1. Set it to a share, to a whole number k for every k-th layer, or to true"
            )
        if level != "auto" and level is not False and level <= 0:
            raise ValueError(
                f"activation_checkpointing = {level}: a number of layers must be at least 1. Set "
                "it to false to recompute none"
            )
        return self


class HardwareConfig(Section):
    """Machines and memory."""

    affects: ClassVar = Affects("plan", stages=("preflight_run",))

    gpus: Annotated[int, Field(ge=0, le=4096)] | Literal["auto"] = "auto"
    """GPUs of a run on each node; `auto` = all visible ones; 0 = train on the CPU."""
    nodes: int = Field(1, ge=1, le=512)
    """Machines that train one run together; more than one needs a cluster profile (`--profile
    workflow/profiles/slurm`)."""
    gpu_model: str | None = Field(None, min_length=1, max_length=128)
    """GPUs to plan for if none is visible, like `H100` or `A100 40GB`; another kind has its figures
    behind its name, as below. null = only visible ones."""
    cpu_processes: int = Field(2, ge=1, le=64)
    """Processes (gloo ranks) per node of a run on CPUs."""
    gpu_memory_gib: Gib | Literal["auto"] = "auto"
    """Usable memory of each GPU, GiB; `auto` = as the driver reports. A smaller value is
    enforced."""
    host_memory_gib: Gib | Literal["auto"] = "auto"
    """Usable host memory of a node's processes together, GiB; `auto` = the available memory."""
    memory_margin_gib: float = Field(0.5, ge=0.0, le=64.0)
    """GPU memory that must stay free in the prediction, GiB."""
    shard_size: Annotated[int, Field(ge=2)] | Literal["auto"] = "auto"
    """Processes that share one copy of the model, a divisor of all; several groups are replicas
    (HSDP). `auto` = all processes."""
    context_parallel: Annotated[int, Field(ge=1, le=MOST_SHARERS)] | Literal["auto"] = "auto"
    """Neighbouring processes that share the tokens of each row: a divisor of `shard_size`, at most
    the model's heads. `auto` = the fewest GPUs with which the run fits; on CPUs 1."""
    price_per_gpu_hour: float | None = Field(None, gt=0.0, le=1e6)
    """Price of a GPU hour, for the predicted cost; null = none."""
    offload_activations: bool | Layers | Literal["auto"] = "auto"
    """Offload activations to page-locked host memory: of all layers, or of this many. `auto` = if
    the run then fits or is faster."""
    offload_embedding: bool | Literal["auto"] = Field("auto", union_mode="left_to_right")
    """Read embedding rows from the model's file on the host, without a table on GPUs. `auto` = with
    several GPUs."""
    offload_layers: Layers | Literal["auto"] = "auto"
    """Decoder layers, spread evenly, with packed weights in page-locked host memory. `auto` = the
    fewest with which the plan fits."""
    keep_decoded: Layers | Literal["auto"] = "auto"
    """Decoder layers, spread evenly (or all), whose frozen weights stay decoded on the GPUs.
    `auto` = as many as fit where all activations are kept."""
    tile_tokens: Annotated[int, Field(ge=0, le=2**24)] | Literal["auto"] = "auto"
    """Tokens that feed-forwards and experts of long rows compute at a time; 0 = all. `auto` = 8,192
    where rows of at least 16,384 need it. Only rounding differs."""
    reshard_after_forward: bool | Literal["auto"] = Field("auto", union_mode="left_to_right")
    """Free gathered weights after forward (FULL_SHARD). false = keep them for backward
    (SHARD_GRAD_OP): more memory, half the traffic."""
    cuda_graphs: bool = True
    """Launch a micro-batch as one CUDA graph, on one machine with FlashAttention or flex. Only
    rounding differs."""
