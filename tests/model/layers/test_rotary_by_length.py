"""Which documents a stock model may take in one batch, where frequencies depend on lengths."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from tests.model.layers.test_rotary_by_document import LONG_ROPE, SHORT
from tests.model.layers.test_rotary_by_document import SIZES as FAMILY
from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.models import quantized, stock_base
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.distributed.world import process_group
from workflow.lib.evaluation.heldout_loss import heldout_losses
from workflow.lib.evaluation.sample_answers import AnswerSettings, Prompt, generate_answers
from workflow.lib.export.sharded_models import load_sharded_base
from workflow.lib.model.layers.rotary_by_length import in_groups, rotated_alike

CPU = torch.device("cpu")
LIMIT = 32  # of dynamic NTK scaling
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
SIZES: dict[str, Any] = FAMILY | {"eos_token_id": None}
LENGTHS = (10, 12, 40, 14, SHORT, SHORT + 1, 32, 33, 40, 45)
NEW_TOKENS = 9


def long_rope():
    rope: dict[str, Any] = {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": SHORT}
    return Phi3ForCausalLM(Phi3Config(**SIZES, **rope))


def dynamic():
    sizes = SIZES | {"max_position_embeddings": LIMIT, "rope_parameters": DYNAMIC}
    return LlamaForCausalLM(LlamaConfig(**sizes))


MODELS = {"longrope": long_rope, "dynamic": dynamic}


@pytest.fixture(scope="module", params=MODELS)
def base(request, tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    MODELS[request.param]().save_pretrained(folder / "original")
    return quantized(folder / "original", folder / "nf4")


def documents():
    draw = np.random.default_rng(0)
    return [
        (draw.integers(3, 101, size=length, dtype=np.uint32), np.arange(length) > 0)
        for length in LENGTHS
    ]


def test_loss_of_a_document_is_that_of_a_fresh_model_for_it_alone(base):
    alone = [
        heldout_losses(stock_base(base), [document], batch_size=1, device=CPU)[0][0]
        for document in documents()
    ]
    for size in (2, 10):
        together = heldout_losses(stock_base(base), documents(), batch_size=size, device=CPU)
        assert [loss for loss, _ in together] == pytest.approx(alone, rel=1e-5)


def test_answer_is_that_of_a_fresh_model_for_the_prompt_alone(base):
    """Also where it crosses the limit."""
    prompts = [Prompt(n, ids.tolist(), []) for n, (ids, _) in enumerate(documents())]
    settings = AnswerSettings(stop_ids=[], max_new_tokens=NEW_TOKENS, batch_size=10)
    together = generate_answers(stock_base(base), prompts, settings=settings, device=CPU)
    for prompt, answer in zip(prompts, together, strict=True):
        ids = torch.tensor([prompt.prompt])
        theirs = stock_base(base).generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert answer == theirs[0, ids.shape[1] :].tolist()


def sharded_answers(base):
    """In a process of its own: what a model whose weights are sliced generates."""
    prompts = [Prompt(n, ids.tolist(), []) for n, (ids, _) in enumerate(documents())]
    settings = AnswerSettings(stop_ids=[], max_new_tokens=NEW_TOKENS, batch_size=10)
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        model = load_sharded_base(
            Checkpoint(base), world=world, compute_dtype=torch.float32, attention="sdpa"
        )
        return generate_answers(model, prompts, settings=settings, device=CPU)


def test_model_with_sliced_weights_answers_as_the_stock_model(base):
    prompts = [Prompt(n, ids.tolist(), []) for n, (ids, _) in enumerate(documents())]
    settings = AnswerSettings(stop_ids=[], max_new_tokens=NEW_TOKENS, batch_size=10)
    theirs = generate_answers(stock_base(base), prompts, settings=settings, device=CPU)
    assert run_distributed(sharded_answers, base, world_size=1)[0] == theirs


def test_only_documents_on_one_side_of_the_limit_are_alike():
    config = long_rope().config
    assert rotated_alike(config, 3) == rotated_alike(config, SHORT)
    assert rotated_alike(config, SHORT + 1) == rotated_alike(config, 100)
    assert rotated_alike(config, SHORT) != rotated_alike(config, SHORT + 1)
    crossing = [rotated_alike(config, tokens, new_tokens=5) for tokens in (13, 14, 14)]
    assert crossing[0] != crossing[1] == crossing[2]


def test_results_of_groups_come_in_the_order_of_the_items():
    groups = []

    def doubled(items):
        groups.append(items)
        return [2 * item for item in items]

    assert in_groups([5, 2, 3, 4], lambda item: item % 2, doubled) == [10, 4, 6, 8]
    assert groups == [[5, 3], [2, 4]]
