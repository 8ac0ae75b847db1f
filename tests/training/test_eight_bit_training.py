"""Training in 8 bits on a trained model: what it costs the held-out loss, and the check of the base
before the first step."""

import gzip
import json
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.support.built_models import built_model
from tests.support.distributed import run_in_group
from tests.support.mixtures import tiny_mixture
from tests.support.models import adapted, base_fixture, heldout_from, quantized, random_store
from tests.support.plans import make_plan
from tests.support.token_arrays import token_arrays
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.model import backends
from workflow.lib.model.layers.frozen_linear import frozen_linears
from workflow.lib.model.layers.frozen_stack import FrozenStack
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.system.dtype_choice import MatmulHardware
from workflow.lib.system.errors import UserError
from workflow.lib.training.best_adapter import HeldOut
from workflow.lib.training.build import plan_of_device
from workflow.lib.training.loop import Trainer, make_optimizer
from workflow.lib.training.startup_checks import check_precision

RESOURCES = Path("workflow/resources")
SEQ_LEN, ROWS, STEPS = 64, 80, 40
DOCUMENTS = 199  # with more tokens than are needed
KEPT = {"activation_checkpointing": False}
# Of what training in the compute dtype gains of the held-out loss. Seen: at most 0.3%.
BOUND = 0.02
KINDS = [("float8", "both"), ("float8", "backward")]


@cache
def documentation():
    tokenizer = Tokenizer.from_file(str(RESOURCES / "base" / "tokenizer.json"))
    texts = {
        name: gzip.decompress((RESOURCES / "pydocs" / f"{name}.jsonl.gz").read_bytes()).decode()
        for name in ("train", "heldout")
    }
    ids = {}
    for name, text in texts.items():
        rows = [json.loads(line) for line in text.splitlines()[:DOCUMENTS]]
        words = " ".join(f"{row['prompt']} {row['completion']}" for row in rows)
        ids[name] = np.array(tokenizer.encode(words).ids, dtype=np.uint32)
    shape = (ROWS, SEQ_LEN)
    heldout = ids["heldout"][: 32 * SEQ_LEN]
    mask = np.ones(shape, dtype=bool)
    mask[:, 0] = False
    train = ids["train"][: ROWS * SEQ_LEN].reshape(shape)
    positions = np.tile(np.arange(SEQ_LEN, dtype=np.int32), (ROWS, 1))
    trained, offsets = np.arange(len(heldout)) % SEQ_LEN > 0, range(0, len(heldout) + 1, SEQ_LEN)
    arrays = token_arrays(train, mask, positions, heldout=(heldout, trained, np.array(offsets)))
    manifest = {"seq_len": SEQ_LEN, "vocab_size": 4000}
    manifest |= heldout_from(documentation=len(heldout) // SEQ_LEN)
    return TokenStore(manifest=manifest, arrays=arrays)


def settings(dtype, where="both", **train):
    fixed = {"epochs": None, "max_steps": STEPS, "global_batch_size": 2, "learning_rate": 1e-3}
    chosen = {"matmul_dtype": dtype, "matmul_passes": where}
    return RunConfig(lora=LoraSettings(r=8), train=TrainConfig(**(fixed | chosen | train)))


def built(base, config, world, *, dtype):
    """Layers are not recomputed, which would take longer and change no bit."""
    return built_model(base, config, make_plan(**KEPT), world, matmul_dtype=dtype)


def trained_losses(world, base):
    """Train in each way; return the held-out losses in the compute dtype."""
    torch.set_num_threads(1)
    losses, store = {}, documentation()
    for dtype, where in [("compute_dtype", "both"), *KINDS]:
        config = settings(dtype, where)
        model = built(base, config, world, dtype=dtype)
        optimizer = make_optimizer(model.training, config.train)
        trainer = Trainer.over(model.training, optimizer, store, config.train, 2, world)
        heldout = HeldOut(store, every=1, num_steps=STEPS, at_most=None, seed=0, micro_batch_size=8)
        if not losses:
            losses["before", ""] = heldout.losses(model.training, world=world).whole
        assert len(list(trainer.steps(first_step=0, num_steps=STEPS))) == STEPS
        losses[dtype, where] = heldout.losses(model.training, world=world).whole
    return losses


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    base = quantized(RESOURCES / "base", tmp_path_factory.mktemp("trained") / "nf4")
    (found,) = run_in_group(trained_losses, base, world_size=1)
    print(found)
    return found


@pytest.mark.parametrize(("dtype", "where"), KINDS)
def test_training_in_8_bits_costs_little_held_out_loss(losses, dtype, where):
    plain = losses["compute_dtype", "both"]
    assert plain < losses["before", ""] - 0.05, "the training has to teach something"
    assert losses[dtype, where] != plain
    assert losses[dtype, where] - plain <= BOUND * (losses["before", ""] - plain)


random_base = base_fixture(hidden_size=64, intermediate_size=192, num_attention_heads=4)


def gate(world, base):
    """What the check says of some runs: its report, its error, and whether 8 bits stay on."""
    found = {}
    # Rows on which float8 costs a little; long ones, as the check reads as many tokens of any.
    store = random_store(rows=11, seq_len=821)
    for name, config in {
        "allowed": settings("float8"),
        "backward": settings("float8", "backward"),
        "none": settings("compute_dtype"),
        "auto": settings("auto", max_matmul_loss_rise=0.0),
        "refused": settings("float8", max_matmul_loss_rise=0.0),
    }.items():
        dtype = "float8" if config.train.matmul_dtype == "auto" else config.train.matmul_dtype
        training = built(base, config, world, dtype=dtype).training
        try:
            found[name] = check_precision(training, store, config.train, world)
        except UserError as error:
            found[name] = str(error)
        found[name, "on"] = training.matmul_precision.by_pass != (False, False)
    return found


@pytest.fixture(scope="module")
def gates(random_base):
    return run_in_group(gate, random_base, world_size=2)


def test_check_has_both_losses_and_is_the_same_on_all_processes(gates):
    one, other = gates
    (check,) = one["allowed"]
    assert check.passed
    assert "nats per token in the compute dtype" in check.detail
    plain, rounded = (float(word) for word in check.detail.split() if word[:2] in ("5.", "6."))
    assert 0 < abs(plain - rounded) < 0.05
    assert one == other


def test_run_without_8_bits_in_forward_measures_no_loss(gates):
    assert gates[0]["none"] == []
    assert not gates[0]["none", "on"]
    (check,) = gates[0]["backward"]
    assert check.detail == "only gradients are in float8"


def test_rise_above_the_bound_stops_the_run_with_both_numbers(gates):
    message = gates[0]["refused"]
    assert message.startswith("train.matmul_dtype = 'float8': the base has")
    assert "allowed is a rise of 0. Set it to compute_dtype" in message


def test_auto_goes_on_without_8_bits_where_they_cost_too_much(gates):
    (check,) = gates[0]["auto"]
    assert check.name == "matmuls in 8 bits are off where they cost the base more than allowed"
    assert not gates[0]["auto", "on"]
    assert gates[0]["allowed", "on"]


def decoded_runs(world, base):
    """Train with weights decoded at each use, and kept decoded; return losses and norms, and the
    forms that are kept."""
    found, store = [], random_store(rows=5, seq_len=21)
    config = settings("float8", max_steps=3)
    for count in (0, 2):
        plan = make_plan(**KEPT, keep_decoded=count)
        training = built_model(base, config, plan, world, matmul_dtype="float8").training
        optimizer = make_optimizer(training, config.train)
        trainer = Trainer.over(training, optimizer, store, config.train, 1, world)
        check_precision(training, store, config.train, world)
        kept = [x.kept for _, x in frozen_linears(training.peft_model) if x.kept is not None]
        assert not any(kept), "a check is no step"
        found.append([(m.loss, m.grad_norm) for m in trainer.steps(first_step=0, num_steps=3)])
        forms = {form for x in kept for form in x}
    return *found, forms


def test_weights_that_stay_in_float8_change_no_bit(random_base):
    ((plain, decoded, forms),) = run_in_group(decoded_runs, random_base, world_size=1)
    assert plain == decoded
    assert forms == {(torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True)}


def test_experts_are_in_float8_with_linears(tmp_path):
    source = tiny_mixture("qwen3_moe", tmp_path / "original", moe_intermediate_size=64)
    training = adapted(quantized(source, tmp_path / "nf4"), attention="eager")
    training.multiply_in_("float8", "both")
    linears = [module for _, module in frozen_linears(training.peft_model)]
    assert {isinstance(x, FrozenStack) for x in linears} == {False, True}
    assert all(x.matmul_precision is training.matmul_precision for x in linears)


def dtypes_here(world, base):
    """The matmul dtype of `auto` on a device with float8, for plans in either."""
    hardware = MatmulHardware(cuda=True, float8=True)
    config = RunConfig(
        model={"compute_dtype": "bfloat16", "attention": "sdpa"}, train={"matmul_dtype": "auto"}
    )
    with patch.object(backends, "matmul_hardware", lambda device: hardware):
        return [
            plan_of_device(make_plan(matmul_dtype=x), Checkpoint(base), config, world).matmul_dtype
            for x in ("float8", "compute_dtype")
        ]


def test_plan_without_8_bits_stays_so_where_the_device_has_them(random_base):
    """Its weights' shapes may be in the way."""
    assert run_in_group(dtypes_here, random_base, world_size=1) == [["float8", "compute_dtype"]]
