"""Settings of the base model, its quantization, the adapter, the optimization and the hardware."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from workflow.lib.settings.effects import Affects
from workflow.lib.settings.optimizers import OptimizerName
from workflow.lib.settings.section_base import Name, Section, Share

Rank = Annotated[int, Field(ge=1, le=1024)]
Alpha = Annotated[float, Field(gt=0.0, le=65536.0)]


class ModelConfig(Section):
    """The base model."""

    affects: ClassVar = Affects(
        "result",
        read_by=("preflight_run", "finetune", "consolidate", "evaluate_run", "write_card"),
    )

    name: Name = "pydocs-base"
    """Label of the base model; part of its artifacts' folder names."""
    source: str = Field("workflow/resources/base", min_length=1, max_length=1024)
    """Local directory (config.json, tokenizer, *.safetensors), or a Hugging Face hub id
    `owner/name`."""
    revision: str | None = Field(None, min_length=1, max_length=256)
    """Hub branch, tag or commit (hub ids only; null = `main`). It is resolved to a commit once and
    recorded."""
    attention: Literal[
        "auto", "eager", "sdpa", "varlen", "flex", "flash_attention_2", "flash_attention_3"
    ] = "auto"
    """Attention implementation; `auto` = on a GPU flash_attention_2 if its package is installed,
    else varlen (FlashAttention as built into torch, with kernels of ours for heads of 257 to 512
    columns), or flex (torch's flex_attention, compiled) for
    what varlen cannot do, as soft-capped scores; on a CPU sdpa, or eager or flex where sdpa would
    leave something out. Evaluation takes sdpa or eager for varlen and flex."""
    attention_dropout: Annotated[
        Literal[0, "family"], Affects(read_by=("preflight_run", "finetune"))
    ] = 0
    """Share of attention weights that training drops: none, or what the model's config.json or its
    class says (Seed-OSS 0.1). Neither varlen nor flex can drop any, so `family` trains such a model
    by sdpa, at about a quarter of the speed. For adapters see `lora.dropout`."""
    compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of activations and matrix products; `auto` = bfloat16 on GPUs that have it (compute
    capability 8.0 and more), float16 with a scaled loss on older ones, float32 on CPUs (preflight
    says where bfloat16 would be faster). float16 is not yet measured on GPUs."""


class QuantizeConfig(Section):
    """NF4 quantization of the base (QLoRA, arXiv 2305.14314)."""

    affects: ClassVar = Affects("result", read_by=("quantize_base", "preflight_run", "write_card"))

    block_size: Literal[64, 128, 256, 512] = 64
    """Weights that share one scale (absmax)."""
    double_quant: bool = True
    """Quantize the scales too: 0.127 instead of 0.5 bits per weight of overhead at block size
    64."""
    method: Literal["absmax", "calibrated", "auto"] = "absmax"
    """How codes and scales are chosen; the stored format is the same. absmax = each block's largest
    weight scales it, as bitsandbytes does; calibrated = so that the outputs for tokens of
    calibration change least (scales searched, errors fed back to later columns as in GPTQ); auto =
    calibrated for models that one H200 calibrates in an hour, else absmax: the model decides, not
    the machine."""
    calibration_tokens: Annotated[int, Affects(needs=("method", "calibrated", "auto"))] = Field(
        24_576, ge=256, le=2**24
    )
    """Tokens that calibrate, of the run's training rows; never of held-out ones. Not read
    by absmax."""
    calibration_text: Annotated[str | None, Affects(needs=("method", "calibrated", "auto"))] = (
        Field(None, min_length=1, max_length=4096)
    )
    """A UTF-8 text file of which half of these tokens are taken, so that calibration on one kind of
    text does not cost others; null = training rows alone."""


def _check_expression(key: str, expression: str) -> None:
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(
            f"{key}: {expression!r} is no regular expression ({error}). Correct it"
        ) from None


class LoraSettings(Section):
    """The adapter (LoRA, arXiv 2106.09685), as PEFT understands it."""

    affects: ClassVar = Affects("result", read_by=("preflight_run", "finetune"))

    r: Rank = 16
    """Rank of the update."""
    alpha: Alpha = 32.0
    """Scale numerator: the update is multiplied by alpha / r (alpha / sqrt(r) with
    `use_rslora`)."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout on the adapter's input, probability. Rounded to a multiple of 1 / 65,536."""
    target_modules: tuple[str, ...] | str = "all-linear"
    """Which linear layers get an adapter: a list of names (the end of their path: `q_proj`,
    `self_attn.q_proj`), a regular expression for the whole path
    (`model.layers.3.self_attn.q_proj`), or `all-linear`."""
    rank_pattern: dict[str, Rank] = Field({})
    """Other ranks: a regular expression for the end of a path, and the rank there; the first that
    matches counts."""
    alpha_pattern: dict[str, Alpha] = Field({})
    """Other values of `alpha`, likewise."""
    use_rslora: bool = False
    """Rank-stabilized scale, arXiv 2312.03732."""
    use_dora: bool = False
    """Train the length of every weight row apart from its direction (DoRA, arXiv 2402.09353).
    Somewhat slower, and takes more memory; with dropout more so."""
    modules_to_save: Annotated[tuple[str, ...], Affects(later=True)] = ()
    """Modules that are trained whole beside the adapter and exported with it, by the names that
    PEFT knows them by: the output head (`lm_head`), the input embedding (`embed_tokens`), or both;
    of models that do not tie the two. 16 bytes a weight over the GPUs that share the vocabulary
    (weights, gradient and moments in fp32); with `embed_tokens` the table is on the GPUs. Of a
    mixture of experts also its routers (`mlp.gate`; `mlp.router` of gpt-oss), which choose the
    experts of a token; see `train.router_aux_loss_coef`."""

    @model_validator(mode="after")
    def _some_target(self) -> "LoraSettings":
        if not self.target_modules or not all(self.target_modules):
            raise ValueError(
                "target_modules has an empty name or none at all: name at least one linear layer, "
                "or all-linear"
            )
        expressions = {
            "target_modules": [self.target_modules],
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
        }
        for key, given in expressions.items():
            for expression in given:
                if isinstance(expression, str):
                    _check_expression(key, expression)
        return self

    @model_validator(mode="after")
    def _modules_have_names(self) -> "LoraSettings":
        if not all(self.modules_to_save):
            raise ValueError(
                "modules_to_save has an empty name: name lm_head, embed_tokens or both, or leave "
                "the list empty"
            )
        return self


class TrainConfig(Section):
    """The optimization."""

    affects: ClassVar = Affects("result", read_by=("preflight_run", "finetune"))

    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of adapter initialization, data order and dropout."""
    epochs: float | None = Field(3.0, gt=0.0, le=1000.0)
    """Passes over the training rows; null if `max_steps` is set."""
    max_steps: int | None = Field(None, ge=1, le=10**9)
    """Optimizer steps; set exactly one of `epochs` and `max_steps`, the other to null."""
    global_batch_size: int = Field(16, ge=1, le=2**20)
    """Rows per optimizer step over all processes; the number of GPUs does not change it."""
    micro_batch_size: Annotated[int | Literal["auto"], Affects("plan")] = "auto"
    """Rows per process and forward pass; `auto` = what preflight predicts to be fastest of all that
    fits. A divisor of the rows per process."""
    optimizer: OptimizerName = "adamw"
    """`adamw`: AdamW of torch, fused on GPUs. `adamw_8bit`: that of bitsandbytes, moments in 8 bits
    with a scale per 256 (arXiv 2110.02861). `muon`: orthogonal momentum (torch.optim.Muon) for the
    adapter's matrices, AdamW for all else; 4 bytes a weight instead of 8."""
    muon_momentum: Annotated[float, Affects(later=True, needs=("optimizer", "muon"))] = Field(
        0.95, ge=0.0, lt=1.0
    )
    """Muon's momentum (Nesterov)."""
    muon_adjust_lr: Annotated[
        Literal["match_rms_adamw", "original"], Affects(later=True, needs=("optimizer", "muon"))
    ] = "match_rms_adamw"
    """What Muon multiplies the learning rate by for a matrix of rows x columns. `match_rms_adamw`:
    0.2 sqrt(max(rows, columns)), so that rates of AdamW suit. `original`: sqrt(max(1, rows /
    columns))."""
    learning_rate: float = Field(2e-4, gt=0.0, le=1.0)
    """Peak learning rate."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warm-up."""
    warmup_share: Share = 0.03
    """Share of steps in which the rate rises linearly from 0."""
    min_lr_share: Share = 0.0
    """Final learning rate as a share of the peak (cosine and linear)."""
    weight_decay: float = Field(0.0, ge=0.0, le=1.0)
    """AdamW weight decay of the adapter."""
    router_aux_loss_coef: Annotated[float | None, Affects(later=True)] = Field(
        None, ge=0.0, le=100.0
    )
    """Of a mixture of experts: what its family's load-balancing loss is multiplied by before it is
    added to the loss, so that tokens go to all experts. null = what the model's config.json says if
    `lora.modules_to_save` names the routers, else 0; a number = that, whether they are trained or
    not; 0 = none. Above 0 the result depends slightly on how many rows all processes take together
    in a micro-batch."""
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """AdamW first-moment decay."""
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """AdamW second-moment decay."""
    adam_eps: float = Field(1e-8, gt=0.0, le=1e-2)
    """AdamW denominator term."""
    max_grad_norm: float | None = Field(1.0, gt=0.0)
    """Clip the global gradient norm to this; null = no clipping (the norm is logged anyway)."""
    activation_checkpointing: Annotated[bool | int | float | Literal["auto"], Affects("plan")] = (
        "auto"
    )
    """Recompute activations in backward instead of keeping them: true = of every decoder layer,
    false = of none, a number k = of every k-th layer, a share such as 0.625 = of 5 of 8; `auto` =
    what preflight predicts to be fastest of all that fits, together with the micro-batch."""
    matmul_dtype: Annotated[Literal["compute_dtype", "float8", "auto"], Affects(later=True)] = (
        "compute_dtype"
    )
    """Precision of matmuls with frozen NF4 weights in training. `float8`: e4m3, weights scaled by
    row, activations by token (GPUs of compute capability 8.9; CPUs emulate it). `auto`: float8
    where the GPUs have it and the base loses no more than `max_matmul_loss_rise`."""
    matmul_passes: Annotated[
        Literal["both", "forward", "backward"],
        Affects(later=True, needs=("matmul_dtype", "float8", "auto")),
    ] = "both"
    """Passes in which `matmul_dtype` holds; `backward` alone changes the result least."""
    max_matmul_loss_rise: Annotated[
        float, Affects("none", later=True, needs=("matmul_dtype", "float8", "auto"))
    ] = Field(0.05, ge=0.0, le=10.0)
    """Largest rise of the base's loss by `matmul_dtype`, nats per trained token; measured on 8,192
    tokens before the first step. Above it the run stops."""
    saved_activations: Annotated[Literal["compute_dtype", "float8"], Affects(later=True)] = (
        "compute_dtype"
    )
    """In what waits for backward what decoder layers save in forward, on the GPU or in host memory.
    `float8` (e4m3, a scale for each 128 neighbours; GPUs of compute capability 8.9 and more) takes
    0.56 of the bytes at 70B width, in memory and on the way to the host; queries and keys stay as
    they are. It rounds gradients, not the loss of a step. Of layers that are recomputed nothing is
    rounded, so `activation_checkpointing` changes the result as much as this does. CPUs emulate
    it."""
    fused_layers: bool = True
    """Compute norms, rotary embeddings and gated feed-forwards by fused operations, which are
    faster and keep less for backward; layers that compute otherwise stay as they are. Only rounding
    differs."""
    fused_loss: bool = True
    """On a GPU, compute the loss by kernels that store no logits in fp32. This is faster and takes
    up to 0.6 GiB less memory, 0.9 where the model soft-caps its logits. Only rounding differs."""
    evaluate_every_steps: int | None = Field(None, ge=1, le=10**9)
    """Optimizer steps between measurements of the held-out loss, also made after the last step;
    null = none."""
    evaluate_documents: int | None = Field(256, ge=1, le=10**9)
    """Held-out documents measured on at most, drawn by `seed`; null = all."""
    select: Literal["last", "best"] = "last"
    """Which adapter is the result: that of the `last` step, or the one with the lowest held-out
    loss (`best`; needs `evaluate_every_steps`)."""
    checkpoint_every_steps: Annotated[int, Affects("none")] = Field(50, ge=1, le=10**9)
    """Optimizer steps between checkpoints; one more is written after step 1, to prove that it can
    be."""
    checkpoint_every_minutes: Annotated[float | None, Affects("none")] = Field(
        20.0, gt=0.0, le=100_000.0
    )
    """Minutes after which a checkpoint is written though `checkpoint_every_steps` is not reached;
    null = never."""
    keep_checkpoints: Annotated[int, Affects("plan")] = Field(2, ge=1, le=1000)
    """Newest checkpoints kept while training."""
    grace_seconds: Annotated[float, Affects("none")] = Field(60.0, ge=1.0, le=86_400.0)
    """Seconds that a signal to stop (SIGTERM, SIGUSR1, SIGINT) leaves to finish the step and save;
    also how long a second start waits for the first."""
    hang_seconds: Annotated[float, Affects("none")] = Field(45.0, ge=5.0, le=86_400.0)
    """Seconds without any progress within a step after which the run is stopped and the process
    that hangs is named; ten times the longest step so far if that is more."""
    deterministic: bool = False
    """Use deterministic GPU kernels alone, slower: the same GPUs then give the same adapter bit for
    bit. On CPUs results are so anyway."""
    log_every_steps: Annotated[int, Affects("none")] = Field(1, ge=1, le=10**9)
    """Optimizer steps between lines of metrics.jsonl."""

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        if (self.epochs is None) == (self.max_steps is None):
            raise ValueError(
                f"epochs = {self.epochs} and max_steps = {self.max_steps}: exactly one sets the "
                "length. Set the other to null"
            )
        if (
            self.micro_batch_size != "auto"
            and not 1 <= self.micro_batch_size <= self.global_batch_size
        ):
            raise ValueError(
                f"micro_batch_size = {self.micro_batch_size}: must be between 1 and "
                f"global_batch_size = {self.global_batch_size}. Lower it, or set auto"
            )
        if self.select == "best" and self.evaluate_every_steps is None:
            raise ValueError(
                "select = best: the best adapter is the one with the lowest held-out loss, and "
                "evaluate_every_steps is null. Set it to a number of steps, or set select to last"
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
    """What a run may use."""

    affects: ClassVar = Affects("plan", read_by=("preflight_run",))

    gpus: int | Literal["auto"] = Field("auto", union_mode="left_to_right")
    """GPUs of a run, on each of its nodes; `auto` = all visible ones; 0 = train on the CPU."""
    nodes: int = Field(1, ge=1, le=512)
    """Machines that train one run together; more than one needs a cluster profile (`--profile
    workflow/profiles/slurm`)."""
    gpu_model: str | None = Field(None, min_length=1, max_length=64)
    """GPUs to plan for where none is visible (the login node of a cluster), like `H100` or `A100
    40GB`; null = only visible ones."""
    cpu_processes: int = Field(2, ge=1, le=64)
    """Processes (gloo ranks) when no GPU is used, on each node."""
    gpu_memory_gib: float | Literal["auto"] = "auto"
    """Memory of each GPU that may be used, GiB; `auto` = what the driver reports. A smaller value
    is enforced."""
    host_memory_gib: float | Literal["auto"] = "auto"
    """Host memory that may be used by all processes of a node together, GiB; `auto` = what is
    available."""
    memory_margin_gib: float = Field(0.5, ge=0.0, le=64.0)
    """GPU memory that must stay free in the prediction, GiB."""
    shard_size: int | Literal["auto"] = Field("auto", union_mode="left_to_right")
    """Processes that share one copy of the model; several such groups train as replicas (HSDP) and
    sum their gradients. `auto` = all processes, the least memory. A divisor of their number; on
    several nodes, the GPUs of one node keep the gathering of weights inside it."""
    price_per_gpu_hour: float | None = Field(None, gt=0.0, le=1e6)
    """Price of one GPU for an hour, in any currency, for the predicted cost of the run; null = no
    cost is shown."""
    offload_activations: bool | int | Literal["auto"] = "auto"
    """Keep what backward needs of the decoder layers in page-locked host memory: with recomputation
    the layers' inputs, without it all their activations. A number = of so many layers, spread
    evenly, first of those that are not recomputed. Saves GPU memory, and costs time where the host
    link is slower than the layers; `auto` = where preflight predicts that it makes a run fit or
    faster."""
    offload_embedding: bool | Literal["auto"] = Field("auto", union_mode="left_to_right")
    """Look embedding rows up in host memory (the model's file, mapped once per node) instead of
    keeping the table on GPUs; `auto` = where several GPUs train a run. On one GPU it saves
    vocabulary x hidden size x 2 bytes and costs some milliseconds per micro-batch."""
    offload_layers: int | Literal["auto"] = Field("auto", union_mode="left_to_right")
    """Decoder layers, spread evenly, whose packed weights wait in page-locked host memory, each
    process's share of them; they are copied to the GPU while the layer before computes. At most the
    model's layers. Adapters, their gradients and the optimizer's state stay on the GPU. `auto` = as
    many as preflight predicts that a run needs to fit, or to be faster."""
    reshard_after_forward: bool | Literal["auto"] = Field("auto", union_mode="left_to_right")
    """Free gathered weights after forward (FULL_SHARD); false = keep them to backward
    (SHARD_GRAD_OP), which takes more memory and half the traffic; `auto` = what preflight predicts
    to be fastest of all that fits."""
    cuda_graphs: bool = True
    """Launch forward and backward of a micro-batch as one CUDA graph, so that the GPU does not wait
    for Python: on the GPUs of one machine, with FlashAttention or flex attention, no layers in host
    memory, no module trained whole and no DoRA; otherwise they stay off, and preflight says why. Of
    models with recurrent layers, while the lengths of packed documents differ little. Changes the
    result by no more than rounding."""
    calibration: str | None = Field(None, min_length=1, max_length=4096)
    """Output of `workflow.scripts.benchmark_run` on GPUs of this run's kind, to which the predicted
    times are fitted; null = constants measured on H200, scaled by data sheets."""

    @model_validator(mode="after")
    def _positive(self) -> "HardwareConfig":
        if self.gpus != "auto" and not 0 <= self.gpus <= 4096:
            raise ValueError(
                f"gpus = {self.gpus}: must be 0 to 4096. Set auto to use all visible GPUs"
            )
        if self.shard_size != "auto" and self.shard_size < 2:
            raise ValueError(
                f"shard_size = {self.shard_size}: a model is sharded over at least 2 processes. "
                "Set auto to shard over all"
            )
        for key in ("offload_layers", "offload_activations"):
            count = getattr(self, key)
            if count != "auto" and not 0 <= count <= 10_000:
                raise ValueError(
                    f"{key} = {count}: must be 0 to 10000. Set auto to take as many as a run needs"
                )
        for key in ("gpu_memory_gib", "host_memory_gib"):
            value = getattr(self, key)
            if value != "auto" and value <= 0:
                raise ValueError(f"{key} = {value}: must be above 0. Set auto to use what is there")
        return self
