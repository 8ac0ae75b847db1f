"""Head and embedding trained whole: against stock PEFT's `modules_to_save`, over processes, copies
of slices and a resumed run, to the export.

Three processes have slices of 71, 71 and 69 rows of the vocabulary of 211.
"""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.models import PLAN, VOCAB, adapted, quantized, random_store, tiny_llama
from workflow.lib.distributed.world import World, process_group
from workflow.lib.export.adapter_files import merged_tensors, read_sharded_adapter, save_adapter
from workflow.lib.export.parity import compare_logits, save_logits, trained_logits
from workflow.lib.export.sharded_models import load_sharded_adapter
from workflow.lib.export.stock_models import ADAPTER_WEIGHTS, load_adapter, load_base
from workflow.lib.model.architecture import vocabulary_slices
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.model.nf4_model import build_nf4_on_meta
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.model.trained_modules import unfreeze_
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.settings.schedule import learning_rate, step_rows
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json, write_json
from workflow.lib.training.batches import make_batch
from workflow.lib.training.build import build_training_model
from workflow.lib.training.checkpoint import CheckpointWriter, resume_
from workflow.lib.training.checkpoint import save_adapter as save_sharded
from workflow.lib.training.loop import make_optimizer, steps
from workflow.lib.training.startup_checks import startup_checks

STEPS, BATCH, ROWS, SEQ_LEN, CLIP = 3, 12, 13, 23, 0.5
CPU = torch.device("cpu")
HEAD, EMBEDDING = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"
KINDS = {
    "head": ["lm_head"],
    "embedding": ["embed_tokens"],
    "both": ["model.embed_tokens", "lm_head"],
}
TRAIN = TrainConfig(
    epochs=None,
    max_steps=STEPS,
    global_batch_size=BATCH,
    learning_rate=1e-2,
    max_grad_norm=CLIP,
    weight_decay=0.1,
    adam_eps=1e-4,
)
# fp32 on both sides, sums in another order. AdamW divides gradients by their own magnitude, so
# adam_eps is far above their rounding errors.
GRADIENT_TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
WEIGHT_TOLERANCE = {"rtol": 0.0, "atol": 2e-4}


def config(kind: str, **train: Any) -> RunConfig:
    lora = LoraSettings(r=4, modules_to_save=tuple(KINDS[kind]))
    return RunConfig(lora=lora, train=TRAIN.model_copy(update=train))


def build(base: Path, kind: str, world: World, **options: Any) -> Any:
    options = {"compute_dtype": torch.float32, "attention": "sdpa"} | options
    plan = PLAN | {"activation_checkpointing": 2}
    return build_training_model(base, config(kind), plan, world, **options)


def full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def take(
    model: Any, optimizer: Any, world: World, *, first: int = 0, count: int = STEPS
) -> list[Any]:
    """Make up to `count` steps of two micro-batches, from step `first` on."""
    found = steps(
        model.training,
        optimizer,
        random_store(rows=ROWS, seq_len=SEQ_LEN),
        TRAIN,
        first_step=first,
        num_steps=STEPS,
        micro_batch_size=BATCH // world.size // 2,
        elapsed_s=0.0,
        world=world,
    )
    return list(islice(found, count))


def train_kinds(base: Path, folder: Path, enough_slices: int, kinds: list[str]) -> dict[str, Any]:
    vocabulary_slices.ENOUGH_SLICES = enough_slices
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        return {kind: train_one(base, kind, folder / kind, world) for kind in kinds}


def train_one(base: Path, kind: str, folder: Path, world: World) -> dict[str, Any]:
    model = build(base, kind, world)
    checks = startup_checks(model, random_store(rows=ROWS, seq_len=SEQ_LEN), base, world)
    params = trainable_parameters(model.training)
    initial = {name: full(p) for name, p in params.items()}
    optimizer = make_optimizer(model.training, TRAIN)
    gradients: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append({name: full(p.grad) for name, p in params.items()})
    )
    metrics = take(model, optimizer, world)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter").mkdir(exist_ok=True)
    save_sharded(model.training, folder / "adapter", world=world)
    logits = trained_logits(
        model.training, random_store(rows=ROWS, seq_len=SEQ_LEN), device=world.device
    )
    if world.is_main:
        save_logits(logits, folder / "parity.safetensors")
        write_json(folder / "adapter_config.json", model.adapter_config())
    return {
        "checks": [check["passed"] for check in checks],
        "initial": initial,
        "counted": model.num_parameters(),
        "losses": [m.loss for m in metrics],
        "norms": [m.grad_norm for m in metrics],
        "gradients": gradients,
        "weights": {name: full(p) for name, p in params.items()},
    }


def stock(base: Path, kind: str, initial: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The same by PEFT's own wrapper on stock layers, one process, one batch a step."""
    model: Any = load_base(base, device=CPU, compute_dtype=torch.float32, attention="sdpa")
    settings = config(kind).lora
    model = get_peft_model(
        model,
        LoraConfig(
            r=4,
            lora_alpha=int(settings.alpha),
            target_modules="all-linear",
            modules_to_save=KINDS[kind],
            task_type="CAUSAL_LM",
        ),
    )
    params = {
        n.replace(".modules_to_save.default", "").replace(".default", ""): p
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    assert params.keys() == initial.keys()
    for name, param in params.items():
        if ".lora_" not in name:  # PEFT's own copy of the base's
            assert torch.equal(param.detach(), initial[name])
        param.data.copy_(initial[name])
    optimizer = torch.optim.AdamW(
        params.values(), weight_decay=TRAIN.weight_decay, eps=TRAIN.adam_eps
    )
    store = random_store(rows=ROWS, seq_len=SEQ_LEN)
    result: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = learning_rate(TRAIN, step=step, num_steps=STEPS)
        rows = step_rows(num_rows=ROWS, global_batch_size=BATCH, seed=0, step=step)
        batch = make_batch(
            store.input_ids[rows].astype("int64"),
            store.position_ids[rows].astype("int64"),
            store.loss_mask[rows],
            device=CPU,
        )
        logits = model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        ).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1)[batch.positions], batch.targets
        )
        loss.backward()
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(params.values(), CLIP)))
        result["gradients"].append({n: full(p.grad) for n, p in params.items()})
        optimizer.step()
        optimizer.zero_grad()
        result["losses"].append(float(loss.detach()))
    return result | {"weights": {n: full(p) for n, p in params.items()}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    quantized(tiny_llama(folder / "original", pad_token_id=5), folder / "nf4")
    return folder


@pytest.fixture(
    scope="module", params=[(1, 8), (2, 8), (3, 8), (4, 2)], ids=lambda p: f"{p[0]} processes"
)
def trained(request: pytest.FixtureRequest, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Four processes have two copies of two slices, as sixteen have of eight."""
    processes, enough = request.param
    target = folder / f"of-{processes}"
    results = run_distributed(
        train_kinds, folder / "nf4", target, enough, list(KINDS), world_size=processes
    )
    return target, results


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Both modules, by one process."""
    target = folder / "alone"
    (result,) = run_distributed(train_kinds, folder / "nf4", target, 8, ["both"], world_size=1)
    return target / "both", result["both"]


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, Any]:
    """Filled as tests ask; initial values do not depend on the number of processes."""
    return {}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_run_is_that_of_stock_peft(
    folder: Path, trained: tuple[Path, list[dict[str, Any]]], references: dict[str, Any], kind: str
) -> None:
    """Losses, norms over adapters and modules together, clipped gradients, and values after all
    steps; on every process.
    """
    initial = trained[1][0][kind]["initial"]
    theirs = references.get(kind) or references.setdefault(
        kind, stock(folder / "nf4", kind, initial)
    )
    for process in trained[1]:
        ours = process[kind]
        torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=2e-5, atol=0)
        torch.testing.assert_close(ours["norms"], theirs["norms"], rtol=1e-4, atol=0)
        for one, other in zip(ours["gradients"], theirs["gradients"], strict=True):
            torch.testing.assert_close(one, other, **GRADIENT_TOLERANCE)
        torch.testing.assert_close(ours["weights"], theirs["weights"], **WEIGHT_TOLERANCE)
    expected = {"head": {HEAD}, "embedding": {EMBEDDING}, "both": {HEAD, EMBEDDING}}[kind]
    assert {name for name in initial if ".lora_" not in name} == expected
    for name in expected:
        moved = (theirs["weights"][name] - initial[name]).abs().max()
        assert moved > 20 * WEIGHT_TOLERANCE["atol"]


@pytest.mark.parametrize("processes", [1, 2])
def test_family_that_scales_its_embedding_and_caps_its_logits_is_that_of_stock_peft(
    tmp_path: Path, processes: int
) -> None:
    """Gemma 3 with a head of its own."""
    settings = AutoConfig.for_model(
        "gemma3_text",
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=False,
        final_logit_softcapping=3.0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path / "original")
    base = quantized(tmp_path / "original", tmp_path / "nf4")
    arguments = (base, tmp_path / "run", 8, ["both"])
    for ours in run_distributed(train_kinds, *arguments, world_size=processes):
        theirs = stock(base, "both", ours["both"]["initial"])
        assert ours["both"]["checks"] == [True] * 4
        torch.testing.assert_close(ours["both"]["losses"], theirs["losses"], rtol=2e-5, atol=0)
        for one, other in zip(ours["both"]["gradients"], theirs["gradients"], strict=True):
            torch.testing.assert_close(one, other, **GRADIENT_TOLERANCE)


def test_start_up_checks_hold_and_count_the_modules(
    trained: tuple[Path, list[dict[str, Any]]], kind: str
) -> None:
    for process in trained[1]:
        assert process[kind]["checks"] == [True] * 4
        trainable, total = process[kind]["counted"]
        assert trainable == sum(t.numel() for t in process[kind]["initial"].values())
        assert total == process["both"]["counted"][1]


def test_all_processes_have_the_same_values_bit_for_bit(
    trained: tuple[Path, list[dict[str, Any]]], kind: str
) -> None:
    """Each gathers the slices of its own copies."""
    first = trained[1][0][kind]["weights"]
    for process in trained[1]:
        assert all(torch.equal(first[n], t) for n, t in process[kind]["weights"].items())


def export(run: Path) -> Path:
    adapter = read_sharded_adapter(run / "adapter")
    save_adapter(adapter, read_json(run / "adapter_config.json"), run / "exported")
    return run / "exported"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stock_peft_reloads_the_export_as_it_was_trained(
    folder: Path, trained: tuple[Path, list[dict[str, Any]]], kind: str, dtype: torch.dtype
) -> None:
    run = trained[0] / kind
    exported = export(run)
    assert read_json(exported / "adapter_config.json")["modules_to_save"] == sorted(KINDS[kind])
    base = load_base(folder / "nf4", device=CPU, compute_dtype=dtype, attention="sdpa")
    parity = compare_logits(
        load_adapter(base, exported), run / "parity.safetensors",
        exported=exported / ADAPTER_WEIGHTS, compute_dtype=dtype, device=CPU,
    )  # fmt: skip
    assert parity["identical_values"]
    assert parity["adapter_effect"] > 0.1 * parity["max_abs_logit"]
    if dtype == torch.float32:
        assert parity["passed"]


def test_merged_model_has_the_trained_modules(
    folder: Path, trained: tuple[Path, list[dict[str, Any]]], kind: str
) -> None:
    run = trained[0] / kind
    exported = export(run)
    adapter, settings = (
        read_sharded_adapter(run / "adapter"),
        read_json(run / "adapter_config.json"),
    )
    original = AutoModelForCausalLM.from_pretrained(folder / "original", dtype=torch.float32)
    theirs = load_adapter(original, exported).merge_and_unload().state_dict()  # type: ignore[operator]
    with CheckpointReader(folder / "original") as source, CheckpointReader(folder / "nf4") as nf4:
        ours = dict(merged_tensors(adapter, settings, original=source, nf4=nf4, onto="original"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name].bfloat16(), rtol=2**-7, atol=1e-6)
    for name in {HEAD, EMBEDDING} & adapter.keys():
        assert torch.equal(ours[name.removeprefix("base_model.model.")], adapter[name].bfloat16())


def test_trained_module_that_the_model_has_not_is_refused(folder: Path) -> None:
    adapter = {"base_model.model.embed_out.weight": torch.ones(1)}
    with CheckpointReader(folder / "original") as source, CheckpointReader(folder / "nf4") as nf4:
        tensors = merged_tensors(adapter, {}, original=source, nf4=nf4, onto="original")
        with pytest.raises(UserError, match=r"tensors for base_model.model.embed_out.weight, wh"):
            list(tensors)


def evaluate_sharded(base: Path, exported: Path) -> tuple[torch.Tensor, torch.Tensor]:
    with process_group("cpu", timeout_s=TIMEOUT_S) as world, torch.no_grad():
        tuned = load_sharded_adapter(
            base, exported, world=world, compute_dtype=torch.float32, attention="sdpa"
        )
        ids = torch.arange(3, 20)[None]
        inner = tuned.get_base_model()
        on = inner(input_ids=ids).logits
        with tuned.disable_adapter():
            return on, inner(input_ids=ids).logits


def test_sharded_evaluation_takes_the_trained_modules(
    folder: Path, alone: tuple[Path, dict[str, Any]]
) -> None:
    """As the stock reload, with the adapter on and off."""
    exported = export(alone[0])
    base = load_base(folder / "nf4", device=CPU, compute_dtype=torch.float32, attention="sdpa")
    plain = base(input_ids=torch.arange(3, 20)[None]).logits.detach()
    tuned = load_adapter(base, exported)(input_ids=torch.arange(3, 20)[None]).logits.detach()
    assert float((plain - tuned).abs().max()) > 1.0
    for on, off in run_distributed(evaluate_sharded, folder / "nf4", exported, world_size=2):
        torch.testing.assert_close(on, tuned, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(off, plain, rtol=1e-4, atol=1e-4)


def resumed(base: Path, folder: Path, count: int, optimizer_kind: str) -> dict[str, Any]:
    """Continue the checkpoint in `folder`, if there is one, by up to `count` steps, and save
    one.
    """
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        model = build(base, "both", world)
        train = TRAIN.model_copy(update={"optimizer": optimizer_kind})
        optimizer = make_optimizer(model.training, train)
        found = resume_(folder, model.training, optimizer, identity="x", world=world)
        taken = take(model, optimizer, world, first=found.step, count=count)
        writer = CheckpointWriter(folder, keep=9, identity="x", world=world)
        with writer.finishing():
            writer.save(model.training, optimizer, step=found.step + len(taken))
        weights = {name: full(p) for name, p in trainable_parameters(model.training).items()}
        return {"step": found.step, "losses": [m.loss for m in taken], "weights": weights}


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_resumed_run_is_the_uninterrupted_one(folder: Path, tmp_path: Path, kind: str) -> None:
    """Bit by bit with as many processes as before; with another number as close as that number
    itself, or as moments of 8 bits are to themselves when they are quantized anew.
    """
    base, saved = folder / "nf4", tmp_path / "saved"
    whole = run_distributed(resumed, base, tmp_path / "none", STEPS, kind, world_size=3)[0]
    run_distributed(resumed, base, saved, 1, kind, world_size=3)
    copytree(saved, tmp_path / "of two")
    again = run_distributed(resumed, base, saved, STEPS, kind, world_size=3)[0]
    other = run_distributed(resumed, base, tmp_path / "of two", STEPS, kind, world_size=2)[0]
    assert (whole["step"], again["step"], other["step"]) == (0, 1, 1)
    assert again["losses"] == whole["losses"][1:]
    for name, tensor in whole["weights"].items():
        assert torch.equal(tensor, again["weights"][name])
        if kind == "adamw":
            torch.testing.assert_close(tensor, other["weights"][name], **WEIGHT_TOLERANCE)
    torch.testing.assert_close(
        other["losses"], again["losses"], rtol=1e-5 if kind == "adamw" else 1e-2, atol=0
    )


def replicas(base: Path) -> dict[str, Any]:
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = build(base, "both", replace(world, mesh=mesh))
        optimizer = make_optimizer(model.training, TRAIN)
        take(model, optimizer, world)
        return {name: full(p) for name, p in trainable_parameters(model.training).items()}


def test_replicas_train_the_same_modules(folder: Path, alone: tuple[Path, dict[str, Any]]) -> None:
    expected = alone[1]["weights"]
    found = run_distributed(replicas, folder / "nf4", world_size=4)
    torch.testing.assert_close(found[0], expected, **WEIGHT_TOLERANCE)
    for weights in found:
        assert all(torch.equal(found[0][name], t) for name, t in weights.items())


def in_sixteen_bits(base: Path, dtype: torch.dtype) -> dict[str, Any]:
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        model = build(base, "both", world, compute_dtype=dtype)
        checks = startup_checks(model, random_store(rows=ROWS, seq_len=SEQ_LEN), base, world)
        optimizer = make_optimizer(model.training, TRAIN)
        metrics = take(model, optimizer, world)
        params = trainable_parameters(model.training)
        return {
            "checks": [check["passed"] for check in checks], "losses": [m.loss for m in metrics],
            "types": {p.dtype for p in params.values()}, "norms": [m.grad_norm for m in metrics],
        }  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_of_sixteen_bit_runs_are_fp32(
    folder: Path, alone: tuple[Path, dict[str, Any]], dtype: torch.dtype, processes: int
) -> None:
    """And losses and the first norm those of fp32 to the types' rounding (8 and 11 bits of
    mantissa).
    """
    expected = alone[1]
    for found in run_distributed(in_sixteen_bits, folder / "nf4", dtype, world_size=processes):
        assert found["checks"] == [True] * 4
        assert found["types"] == {torch.float32}
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=0.02, atol=0)
        torch.testing.assert_close(found["norms"][0], expected["norms"][0], rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["norm"], "= 'norm': only .* in this model they are lm_head and embed_tokens"),
        (["head"], "= 'head': only"),
    ],
)
def test_engine_refuses_other_modules(folder: Path, names: list[str], message: str) -> None:
    with pytest.raises(UserError, match=rf"lora\.modules_to_save {message}"):
        adapted(folder / "nf4", r=4, modules_to_save=names)


def test_engine_refuses_a_tied_model(tmp_path: Path) -> None:
    base = quantized(tiny_llama(tmp_path / "original", tied=True), tmp_path / "nf4")
    with pytest.raises(UserError, match="this model ties its output head to its input embedding"):
        adapted(base, r=4, modules_to_save=["lm_head"])


def test_name_that_peft_would_find_elsewhere_too_is_refused(folder: Path) -> None:
    model = build_nf4_on_meta(folder / "nf4", compute_dtype=torch.float32, attention="sdpa")
    model.model.other_lm_head = torch.nn.Identity()
    settings = LoraSettings(modules_to_save=("lm_head",))
    with pytest.raises(UserError, match=r"'lm_head': model\.other_lm_head ends so too"):
        unfreeze_(model, settings)
