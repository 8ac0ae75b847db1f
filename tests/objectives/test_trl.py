"""TRL's own trainers on the same examples, start and reference: loss, implicit rewards and adapter
gradients of a step of each objective, by stock Transformers and PEFT on the same NF4 base.

Needs envs/peers.txt."""

import numpy as np
import pytest
import torch

from tests.objectives.dense import assert_gradients
from tests.objectives.test_objective import one_step
from tests.support.built_models import built_model
from tests.support.distributed import run_distributed, run_in_group
from tests.support.models import quantized, tiny_llama
from tests.support.plans import make_plan
from tests.support.scored_rows import ROWS, GivenScores, scored_rows
from tests.support.stock_training import stock_peft
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.settings.config import load_config

trl = pytest.importorskip("trl", reason="TRL is not installed (envs/peers.txt)")

PAD, B = 0, 0.03
# Ours, and what TRL calls the same.
CASES = {
    **{
        f"dpo {name}": (
            {"beta": 0.3, "loss_type": name, "label_smoothing": e},
            {"beta": 0.3, "loss_type": [name], "label_smoothing": e},
        )
        for name, e in {
            "sigmoid": 0.0, "sigmoid_norm": 0.0, "hinge": 0.0, "robust": 0.2, "exo_pair": 0.05,
            "nca_pair": 0.0, "bco_pair": 0.0, "sppo_hard": 0.0, "apo_zero": 0.0, "apo_down": 0.0,
            "discopop": 0.0,
        }.items()
    },
    "dpo with sft": (
        {"beta": 0.3, "sft_weight": 0.5},
        {"beta": 0.3, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
    "ipo": ({"beta": 0.2}, {"beta": 0.2, "loss_type": ["ipo"]}),
    "simpo": (
        {"beta": 2.0, "gamma": 0.7, "sft_weight": 0.4, "label_smoothing": 0.1},
        {
            "beta": 2.0, "loss_type": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.4,
            "label_smoothing": 0.1,
        },
    ),
    "orpo": ({"beta": 0.2}, {"beta": 0.2}),
    "kto": (
        {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.8},
        {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.8},
    ),
}  # fmt: skip
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def configured(case):
    train = {
        "objective": case.partition(" ")[0], "epochs": None, "max_steps": 1,
        "global_batch_size": len(ROWS), "max_grad_norm": None,
    }  # fmt: skip
    preferences = CASES[case][0]
    document = {"train": train, "lora": LORA, "preferences": preferences, "runs": {"a": {}}}
    return load_config(document)[1]["a"]


def store_of(case, reference):
    store = scored_rows("rated" if case == "kto" else "pairs", all_trained=True)
    return store.with_scores(GivenScores(store.loss_mask, reference))


def documents(store):
    """Return token ids of all documents but padding, and whether they are desirable."""
    found = []
    for row, lengths in enumerate(ROWS):
        start = 0
        for length in lengths:
            ids = [int(i) for i in store.input_ids[row, start : start + length]]
            good = store.desirable is not None and bool(store.desirable[row, start])
            found.append((ids, good))
            start += length
    return found


def padded(ids):
    """Return ids, and masks of all tokens and of all but the first of each."""
    width = max(map(len, ids))
    rows = torch.tensor([row + [PAD] * (width - len(row)) for row in ids])
    there = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    answers = there.clone()
    answers[:, 0] = 0
    return {"input_ids": rows, "attention_mask": there, "completion_mask": answers}


def inputs_of(case, store):
    """Return the batch of the whole step, as TRL's collators make it."""
    every = documents(store)
    first, second = ([ids for ids, _ in every[place::2]] for place in (0, 1))
    if case == "kto":
        other = {f"KL_{name}": value for name, value in padded(second).items()}
        return {**padded(first), **other, "label": torch.tensor([good for _, good in every[::2]])}
    if case in ("simpo", "orpo"):
        batch = {}
        for side, ids in (("chosen", first), ("rejected", second)):
            of = padded(ids)
            batch |= {f"{side}_{name}": of[name] for name in ("input_ids", "attention_mask")}
            labels = of["input_ids"].masked_fill(of["completion_mask"] == 0, -100)
            batch[f"{side}_labels"] = labels
        return batch
    return padded(first + second)


def trainer_of(case, model, tokenizer, folder):
    from datasets import Dataset

    options = {
        **CASES[case][1], "output_dir": str(folder), "use_cpu": True, "report_to": [],
        "bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": 2,
    }  # fmt: skip
    pair = {"prompt": "a", "chosen": " b", "rejected": " c"}
    answer = {"prompt": "a", "completion": " b", "label": True}
    kind = case.partition(" ")[0]
    if kind == "kto":
        from trl import KTOConfig as Options
        from trl import KTOTrainer as Trainer
    elif kind == "simpo":
        from trl.experimental.cpo import CPOConfig as Options
        from trl.experimental.cpo import CPOTrainer as Trainer
    elif kind == "orpo":
        from trl.experimental.orpo import ORPOConfig as Options
        from trl.experimental.orpo import ORPOTrainer as Trainer
    else:
        from trl import DPOConfig as Options
        from trl import DPOTrainer as Trainer
    data = Dataset.from_list([answer if kind == "kto" else pair] * 4)
    return Trainer(
        model=model, args=Options(**options), train_dataset=data, processing_class=tokenizer
    )


def by_trl(base, tokenizer_folder, folder):
    """Return loss, rewards and gradients of every case by TRL, and the reference of every token."""
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    found = {}
    for case in CASES:
        model, params = stock_peft(base, configured(case).lora)
        trainer = trainer_of(case, model, tokenizer, folder)
        for name, param in params.items():
            torch.manual_seed(len(name))
            value = torch.randn(param.shape) / 8
            # TRL casts adapters of 4-bit models to bfloat16
            param.data = torch.full_like(value, B) if ".lora_B." in name else value
        trainer._peft_has_been_casted_to_bf16 = False
        store = store_of(case, None)
        model.train()
        loss = trainer.compute_loss(model, inputs_of(case, store))
        loss.backward()
        told = getattr(trainer, "_metrics", None) or trainer._stored_metrics
        rewards = {
            key.removeprefix("rewards/"): float(np.mean(values))
            for key, values in told["train"].items()
            if key.startswith("rewards/") or key == "kl"
        }
        gradients = {name: param.grad.clone() for name, param in params.items()}
        values = {name: param.detach().numpy().copy() for name, param in params.items()}
        found[case] = float(loss.detach()), rewards, gradients, values
    with torch.no_grad(), model.disable_adapter():
        lines = []
        for ids, _ in documents(store):
            logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)
            lines += logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return found | {"reference": np.array(lines, dtype=np.float32)}


def by_engine(world, base, values, reference):
    found = {}
    for case in CASES:
        config = configured(case)
        model = built_model(base, config, make_plan(), world)
        for name, param in trainable_parameters(model.training).items():
            param.data.copy_(torch.from_numpy(values[case][name]))
        store = store_of(case, reference)
        found[case] = one_step(model, config, world, 1, store=store)
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory, tokenizer_folder):
    folder = tmp_path_factory.mktemp("trl")
    base = quantized(tiny_llama(folder / "original", num_hidden_layers=2), folder / "nf4")
    (theirs,) = run_distributed(by_trl, base, tokenizer_folder, folder / "trainer", world_size=1)
    values = {case: theirs[case][3] for case in CASES}
    (ours,) = run_in_group(by_engine, base, values, theirs["reference"], world_size=1)
    return ours, theirs


@pytest.mark.parametrize("case", CASES)
def test_step_is_that_of_trl(both, case):
    (loss, figures, gradients), (their_loss, rewards, their_gradients, _) = (
        of[case] for of in both
    )
    assert loss == pytest.approx(their_loss, rel=1e-5, abs=1e-6)
    pairs = {"chosen": "reward_chosen", "rejected": "reward_rejected"}
    pairs |= {"margins": "reward_margin", "accuracies": "reward_accuracy"}
    if case == "kto":
        pairs = {"chosen": "reward_desirable", "rejected": "reward_undesirable", "kl": "kl"}
    for theirs, ours in pairs.items():
        expected = max(0.0, figures[ours]) if ours == "kl" else figures[ours]
        assert rewards[theirs] == pytest.approx(expected, rel=1e-4, abs=1e-5), theirs
    assert_gradients(gradients, their_gradients)
