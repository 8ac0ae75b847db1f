"""TRL's GRPOTrainer on the same tokens, advantages and log-probabilities: loss, figures and adapter
gradients of a step, by stock Transformers and PEFT on the same NF4 base.

Needs envs/peers.txt."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from tests.objectives.dense import assert_gradients
from tests.objectives.test_objective import one_step
from tests.objectives.test_trl import LORA, PAD, B
from tests.support.built_models import built_model
from tests.support.distributed import run_distributed, run_in_group
from tests.support.models import quantized, tiny_llama
from tests.support.plans import make_plan
from tests.support.scored_rows import GROUPED, prompted_rows
from tests.support.stock_training import stock_peft
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.settings.config import load_config
from workflow.lib.training.start_reference import StartReference

trl = pytest.importorskip("trl", reason="TRL is not installed (envs/peers.txt)")

CONSTANT = 13
LOSSES = {"token": "dapo", "answer": "grpo", "constant": "dr_grpo"}
TERMS = {
    "plain": {},
    "asymmetric": {"clip_low": 0.1, "clip_high": 0.28},
    "kl": {"kl": 0.3, "kl_reference": "original"},
    "kl to start": {"kl": 0.3},
    "weights": {"importance_cap": 1.05},
    "all": {
        "clip_high": 0.28, "kl": 0.1, "kl_reference": "original", "importance_cap": 1.4,
    },
}  # fmt: skip
CASES = {
    f"{loss} {name}": {"importance_cap": None, "constant": CONSTANT} | terms | {"normalize": loss}
    for loss in LOSSES
    for name, terms in TERMS.items()
}


def configured(case):
    train = {
        "objective": "grpo", "epochs": None, "max_steps": 1, "global_batch_size": len(GROUPED),
        "max_grad_norm": None,
    }  # fmt: skip
    document = {"train": train, "lora": LORA, "grpo": CASES[case], "runs": {"a": {}}}
    document["rewards"] = {"functions": {"exact": {"function": "last_number"}}}
    return load_config(document)[1]["a"]


def documents(store):
    """Return the ids of prompt and answer, advantage, and log p of the answer's tokens by sampler
    and scores, of every document but padding."""
    scores = np.zeros(store.loss_mask.shape, dtype=np.float32)
    scores[store.loss_mask] = store.scores.for_rows(range(len(GROUPED))).log_probs
    sampled, advantages = (store.optional[x] for x in ("sampled_log_probs", "advantages"))
    found = []
    for row, positions in enumerate(store.position_ids):
        for start, stop in pairwise([*np.flatnonzero(positions == 0), store.seq_len]):
            mask = store.loss_mask[row, start:stop]
            ids, *values = (x[row, start:stop] for x in (store.input_ids, sampled, scores))
            if mask.any():
                advantage = float(advantages[row, start])
                found.append((ids[~mask], ids[mask], advantage, *(x[mask] for x in values)))
    return found


def padded(rows, *, side="right", dtype=np.int64):
    """Return rows (rows, longest), and which of them are no padding."""
    width = max(map(len, rows))
    values, present = np.full((len(rows), width), PAD, dtype), np.zeros((len(rows), width), int)
    for number, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        values[number, place], present[number, place] = row, 1
    return torch.from_numpy(values), torch.from_numpy(present)


def inputs_of(store):
    """Return the batch of the whole step, as TRL's generation makes it, and the sampler's log p."""
    prompts, answers, advantages, sampled, scores = zip(*documents(store), strict=True)
    prompt_ids, prompt_mask = padded(prompts, side="left")
    completion_ids, completion_mask = padded(answers)
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": completion_mask.sum(),
    }
    sampled_log_probs, reference = (padded(x, dtype=np.float32)[0] for x in (sampled, scores))
    return inputs, sampled_log_probs, reference


def trainer_of(case, model, tokenizer, folder):
    settings = configured(case).grpo
    weighted = settings.importance_cap is not None
    options = trl.GRPOConfig(
        loss_type=LOSSES[settings.normalize],
        epsilon=settings.clip_low,
        epsilon_high=settings.clip_high,
        beta=settings.kl,
        max_completion_length=CONSTANT,
        num_generations=2,
        per_device_train_batch_size=2,
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        bf16=False,
        gradient_checkpointing=False,
    )
    data = Dataset.from_list([{"prompt": "a"}] * 4)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=options,
        train_dataset=data,
        processing_class=tokenizer,
    )
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = weighted
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    return trainer


def put_values_(params, *, late):
    """Give trained parameters the values of the round's start, or those after some steps."""
    for name, param in params.items():
        torch.manual_seed(len(name))
        value = torch.randn(param.shape) / 8
        start = torch.full_like(value, B) if ".lora_B." in name else value
        change = torch.randn(param.shape) / 40 if ".lora_B." in name else 0.0
        param.data = start + late * change


def by_trl(base, tokenizer_folder, folder, store):
    """Return loss, figures and gradients of every case by TRL."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    found = {}
    for case in CASES:
        settings = configured(case).grpo
        model, params = stock_peft(base, configured(case).lora)
        trainer = trainer_of(case, model, tokenizer, folder)
        inputs, sampled, scores = inputs_of(store)
        put_values_(params, late=False)
        ids, there = (
            torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], dim=1)
            for x in ("ids", "mask")
        )
        length = inputs["completion_ids"].shape[1]
        with torch.no_grad():
            old, *_ = trainer._get_per_token_logps_and_entropies(model, ids, there, length)
        inputs["old_per_token_logps"] = old
        if settings.importance_cap is not None:
            ratio = ((old - sampled) * inputs["completion_mask"]).exp()
            inputs["importance_sampling_ratio"] = ratio.clamp(max=settings.importance_cap)
        if settings.kl:
            is_start = settings.kl_reference == "start"
            inputs["ref_per_token_logps"] = old if is_start else scores
        put_values_(params, late=True)
        model.train()
        loss = trainer.compute_loss(model, inputs)
        loss.backward()
        told = {key: float(np.mean(x)) for key, x in trainer._metrics["train"].items()}
        gradients = {name: param.grad.clone() for name, param in params.items()}
        found[case] = float(loss.detach()), told, gradients
    return found


def by_engine(world, base, store):
    found = {}
    for case in CASES:
        config = configured(case)
        model = built_model(base, config, make_plan(), world)
        params = trainable_parameters(model.training)
        put_values_(params, late=False)
        model.training.reference = StartReference(model.training)
        put_values_(params, late=True)
        other = config.grpo.kl_reference != "start"
        scored = store if other else store.with_scores(None)
        found[case] = one_step(model, config, world, 1, store=scored)
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory, tokenizer_folder):
    folder = tmp_path_factory.mktemp("trl")
    base = quantized(tiny_llama(folder / "original", num_hidden_layers=2), folder / "nf4")
    store = prompted_rows("groups")
    (theirs,) = run_distributed(by_trl, base, tokenizer_folder, folder / "t", store, world_size=1)
    (ours,) = run_in_group(by_engine, base, store, world_size=1)
    return ours, theirs


@pytest.mark.parametrize("case", CASES)
def test_step_is_that_of_trl(both, case):
    (loss, figures, gradients), (their_loss, told, their_gradients) = (of[case] for of in both)
    assert loss == pytest.approx(their_loss, rel=1e-5, abs=1e-6)
    assert figures["clipped"] == pytest.approx(told["clip_ratio/region_mean"])
    assert 0 < figures["clipped"] < 1
    if "kl" in told:
        assert figures["reference_kl"] == pytest.approx(told["kl"], rel=1e-4)
    assert_gradients(gradients, their_gradients)
