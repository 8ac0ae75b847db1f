"""Micro-batches as CUDA graphs, on a GPU."""

import os

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.objectives.test_objective import HEADS, configured, store_of
from tests.support.distributed import run_distributed
from tests.support.gathering import full
from tests.support.models import base_fixture, quantized, random_store, tiny_llama
from tests.support.plans import PLANNED, make_plan
from tests.support.scored_rows import PROMPTED, prompted_rows
from tests.support.stock_training import ROWS, SEQ_LEN, settings
from workflow.lib.training.cuda_capture import CudaCapture

pytestmark = pytest.mark.gpu

STEPS = 6
# Little that leaves is on the device at a time, or all of it: then nothing comes back. Of a large
# window only larger tensors leave.
STASHED = {"offload_activations": True, "offload_window_bytes": 2**15}
STAYING = {"offload_activations": True, "offload_window_bytes": 2**21}
TOO_SMALL = {"offload_activations": True, "offload_window_bytes": 2**30}
STORED = {"reference": "original"}  # the reference's scores are the store's
LORA = ("dropout", "use_dora", "modules_to_save")
KINDS = {
    "plain": {},
    "recomputed, dropout": {"dropout": 0.1},
    "float8": {"matmul_dtype": "float8"},
    "weights kept decoded": {"keep_decoded": 2},
    "weights of a layer kept in float8": {"matmul_dtype": "float8", "keep_decoded": 1},
    "flex": {"attention": "flex"},
    "flex, recomputed, dropout": {"attention": "flex", "dropout": 0.1},
    "embedding on the host": {"offload_embedding": True},
    "kept on the host": STASHED,
    "inputs of recomputed layers on the host": STASHED | {"dropout": 0.1},
    "attention of recomputed layers kept": {"keep_attention": True, "dropout": 0.1},
    "the same on the host": STASHED | {"keep_attention": True, "dropout": 0.1},
    "all is on the device still when forward ends": STAYING,
    "nothing is large enough to leave": TOO_SMALL,
    "DoRA": {"use_dora": True},
    "head and embedding trained": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "DoRA, recomputed, dropout": {"use_dora": True, "dropout": 0.1},
    "weights of a layer on the host": {"offload_layers": 1},
    "weights of all layers on the host, recomputed": {"offload_layers": 2, "dropout": 0.1},
    "dpo of the start": {"objective": "dpo"},
    "dpo of the start, shared prompts": {"objective": "dpo", "shares_prompts": True},
    "dpo, head trained": {"objective": "dpo", "modules_to_save": ["lm_head"]} | STORED,
    "orpo, flex": {"objective": "orpo", "attention": "flex"},
    "kto, shared prompts": {"objective": "kto", "shares_prompts": True},
    "distill": {"objective": "distill"},
    "distill, head trained": {"objective": "distill", "modules_to_save": ["lm_head"]},
    "grpo by token": {"objective": "grpo by token"},
    "grpo by answer, shared prompts": {"objective": "grpo by answer", "shares_prompts": True},
}
ON_TWO = {
    "sharded": {},
    "recomputed, weights kept to backward": {"dropout": 0.1, "reshard_after_forward": False},
    "float8, embedding on the host": {"matmul_dtype": "float8", "offload_embedding": True},
    "two micro-batches": {"micro_batch_size": 1},
    "weights kept in float8": {"matmul_dtype": "float8", "keep_decoded": 2},
    "replicas": {"replicas": 2},
    "flex": {"attention": "flex"},
    "kept on the host": STASHED,
    "those of two layers on the host": STASHED | {"offload_activations": 2},
    "weights of a layer on the host": {"offload_layers": 1},
    "head and embedding trained, two micro-batches": {
        "modules_to_save": ["lm_head", "embed_tokens"],
        "micro_batch_size": 1,
    },
    "DoRA, two micro-batches": {"use_dora": True, "micro_batch_size": 1},
    "weights and activations on the host": STASHED | {"offload_layers": 2},
    "dpo of the start, shared prompts": {"objective": "dpo", "shares_prompts": True},
    "kto": {"objective": "kto"},
    "distill, embedding on the host": {"objective": "distill", "offload_embedding": True},
}


def trained(base, levers, graphed, attention, capturing=CudaCapture):
    """Train in this process; graphed: `no`, `yes`, `layout`: as graphs do, but launched by Python,
    or `fails`: the last process captures by `capturing`, which fails."""
    from tests.support.built_models import built_model
    from workflow.lib.distributed.world import process_group
    from workflow.lib.model.lora import trainable_parameters
    from workflow.lib.training.launch import DEFAULTS
    from workflow.lib.training.loop import Trainer, make_optimizer
    from workflow.lib.training.micro_batch_graphs import MicroBatchGraphs

    os.environ |= DEFAULTS
    torch.use_deterministic_algorithms(True)
    config, store = settings(), random_store(rows=ROWS, seq_len=SEQ_LEN)
    if "objective" in levers:
        config, store = objective_run(**levers)
    lora = {"dropout": 0.0} | {k: v for k, v in levers.items() if k in LORA}
    lora = config.lora.model_copy(update=lora)
    config = config.model_copy(update={"lora": lora})
    plan = make_plan(
        device="cuda", processes=levers.get("replicas", 1), num_steps=STEPS,
        activation_checkpointing="dropout" in levers,
        **({"micro_batch_size": 2} | {k: v for k, v in levers.items() if k in PLANNED}),
    )  # fmt: skip
    with process_group(
        "cuda", timeout_s=120.0, shard_size=plan.shards if "replicas" in levers else None
    ) as world:
        model = built_model(
            base, config, plan, world,
            dtype=torch.bfloat16, attention=attention,
            matmul_dtype=levers.get("matmul_dtype", "compute_dtype"),
        )  # fmt: skip
        make_capture = {"yes": CudaCapture, "layout": launched_by_python, "fails": CudaCapture}
        if graphed == "fails" and world.rank == world.size - 1:
            make_capture["fails"] = capturing
        graphs = None
        if graphed != "no":
            graphs = MicroBatchGraphs(model.training, world, make_capture[graphed])
        optimizer, size = make_optimizer(model.training, config.train), plan.micro_batch_size
        trainer = Trainer.over(model.training, optimizer, store, config.train, size, world, graphs)
        found = []
        for metrics in trainer.steps(first_step=0, num_steps=STEPS):
            found.append((metrics.loss, metrics.grad_norm))
            use_page_locked_memory()
            torch.rand(1, device="cuda")  # as dropout of a family's own would
            if metrics.step == STEPS // 2:
                trainer.release_graphs()
        final = {n: full(p).cpu() for n, p in trainable_parameters(model.training).items()}
    return {"metrics": found, "final": final, "off": graphs.off if graphs else None}


def objective_run(*, objective, shares_prompts=False, reference="start", **_):
    """Return settings and rows of an objective."""
    (head, *_), rows = HEADS, 6
    config, store = configured(objective, head), store_of(objective)
    if shares_prompts:
        rows, store = len(PROMPTED), prompted_rows(store.examples)
    train = config.train.model_copy(update={"global_batch_size": rows, "learning_rate": 1e-2})
    preferences = config.preferences.model_copy(update={"reference": reference})
    return config.model_copy(update={"train": train, "preferences": preferences}), store


def launched_by_python():
    return lambda function: function


def waiting_capture():
    """Return what waits for the device within a capture, which ends it."""
    capture = CudaCapture()

    def waiting(function):
        def work():
            result = function()
            torch.cuda.synchronize()
            return result

        return capture(work)

    return waiting


def breaking_capture():
    """Return what breaks off when the second decoder layer is reached, as where memory runs out."""
    capture, reached = CudaCapture(), [0]

    def fail(module, inputs):
        reached[0] += "DecoderLayer" in type(module).__name__
        if reached[0] == 2:
            raise RuntimeError("out of memory")

    def breaking(function):
        hook = register_module_forward_pre_hook(fail)
        try:
            return capture(function)
        finally:
            hook.remove()

    return breaking


def use_page_locked_memory():
    """Write over small blocks that were free: a graph that still reads one goes wrong."""
    for size in 2 ** torch.arange(3, 14):
        blocks = [torch.full((int(size),), -7).pin_memory() for _ in range(32)]
        for block in blocks:
            block.to("cuda", non_blocking=True)
    torch.cuda.synchronize()


# 8 bits need whole blocks of 64
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4}
base = base_fixture(**SIZES)
in_16_bits = base_fixture(**SIZES, keep=("down_proj", r"layers\.1"))


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_are_bit_equal_to_the_same_kernels_launched_one_by_one(base, one_gpu, kind):
    check_same_run(base, KINDS[kind], processes=one_gpu)


DECODED = [
    ("plain", "weights kept decoded"),
    ("float8", "weights of a layer kept in float8"),
]


@pytest.mark.parametrize(("usual", "decoded"), DECODED)
@pytest.mark.parametrize("stored", ["base", "in_16_bits"])
def test_weights_that_stay_decoded_change_no_bit(stored, one_gpu, request, usual, decoded):
    folder = request.getfixturevalue(stored)
    one, other = (
        run_distributed(trained, folder, KINDS[kind], "yes", "varlen", world_size=one_gpu)[0]
        for kind in (usual, decoded)
    )
    assert one["off"] is other["off"] is None
    assert one["metrics"] == other["metrics"]
    for name, weight in one["final"].items():
        assert torch.equal(weight, other["final"][name]), name


@pytest.mark.parametrize("kind", ["plain", "float8", "DoRA", "weights of a layer on the host"])
def test_graphs_of_weights_in_16_bits_are_bit_equal_too(in_16_bits, one_gpu, kind):
    check_same_run(in_16_bits, KINDS[kind], processes=one_gpu)


@pytest.mark.parametrize("kind", ["sharded", "float8, embedding on the host"])
def test_sharded_graphs_of_weights_in_16_bits_are_bit_equal_too(in_16_bits, two_gpus, kind):
    check_same_run(in_16_bits, ON_TWO[kind], processes=two_gpus)


@pytest.mark.parametrize("head_dim", [64, 320])
def test_graphs_of_kernels_of_documents_are_bit_equal_too(tmp_path, one_gpu, head_dim):
    """Whose documents change from one replay to the next."""
    model = quantized(tiny_llama(tmp_path / "original", head_dim=head_dim), tmp_path / "nf4")
    check_same_run(model, {}, processes=one_gpu)


@pytest.mark.parametrize("kind", ON_TWO)
def test_sharded_graphs_are_bit_equal_too(base, two_gpus, kind):
    check_same_run(base, ON_TWO[kind], processes=two_gpus)


def check_same_run(base, levers, *, processes):
    attention = levers.get("attention", "varlen")
    found = {
        graphed: run_distributed(trained, base, levers, graphed, attention, world_size=processes)
        for graphed in ("no", "layout", "yes")
    }
    for rank in range(processes):
        no, layout, yes = (found[graphed][rank] for graphed in ("no", "layout", "yes"))
        assert yes["off"] is None
        assert yes["metrics"] == layout["metrics"]
        for name, weight in layout["final"].items():
            assert torch.equal(weight, yes["final"][name]), name
        (losses, norms), (same_losses, same_norms) = (
            zip(*run["metrics"], strict=True) for run in (no, yes)
        )
        assert losses == pytest.approx(same_losses, rel=2e-2)
        assert norms[0] == pytest.approx(
            same_norms[0], rel=2e-2
        )  # later weights differ by rounding


@pytest.mark.parametrize("capturing", [waiting_capture, breaking_capture])
@pytest.mark.parametrize("kind", ["sharded", "recomputed, weights kept to backward"])
def test_no_process_has_graphs_where_one_cannot_capture(base, two_gpus, kind, capturing):
    layout, fails = (
        run_distributed(
            trained, base, ON_TWO[kind], graphed, "varlen", capturing, world_size=two_gpus
        )
        for graphed in ("layout", "fails")
    )
    assert fails[0]["off"] == fails[1]["off"] is not None
    for one, other in zip(layout, fails, strict=True):
        assert one["metrics"][0] == other["metrics"][0]
        assert [loss for loss, _ in one["metrics"]] == pytest.approx(
            [loss for loss, _ in other["metrics"]], rel=2e-2
        )
