"""Steps of examples that share their prompts are those of whole documents."""

import pytest
import torch

from tests.objectives.test_objective import build, configured, one_step
from tests.support.captures import ALONE
from tests.support.distributed import run_in_group
from tests.support.models import adapted
from tests.support.scored_rows import PROMPTED, prompted_rows
from tests.support.training_loops import settings
from workflow.benchmark.random_pairs import pair_rows, random_pairs
from workflow.lib.objectives.from_settings import objective_of
from workflow.lib.training.loop import Trainer, make_optimizer
from workflow.lib.training.startup_checks import check_shared_prompts

# Examples, and the tokens that are left of the first row.
OBJECTIVES = {"dpo": ("pairs", 38), "kto": ("rated", 38), "grpo by answer": ("groups", 29)}


def survey(world, base):
    found = {}
    for name, (examples, _) in OBJECTIVES.items():
        config, store = configured(name, "frozen head"), prompted_rows(examples)
        train = config.train.model_copy(update={"global_batch_size": len(PROMPTED)})
        config = config.model_copy(update={"train": train})
        model = build(base, config, world)
        of = config.train.objective, config.preferences, config.distill, config.grpo
        model.training.objective = objective_of(*of)
        for shares in (False, True):
            model.training.shares_prompts = shares
            checks = check_shared_prompts(model.training.eval(), store, world)
            found[name, shares, "checks"] = [check.detail for check in checks]
            for rows in {1, len(PROMPTED) // world.size}:
                step = one_step(model, config, world, rows, store=store)
                found.setdefault((name, shares), []).append(step)
    return found


def test_rows_with_shared_prompts_have_few_lengths(base):
    """Each is a shape with CUDA graphs of its own: at most 16, in blocks of 64 tokens."""
    training, config = adapted(base, r=4), settings()
    training.shares_prompts = True
    store = pair_rows(random_pairs(300, seq_len=2048, vocab_size=97), seq_len=2048)
    optimizer = make_optimizer(training, config.train)
    batches = Trainer.over(training, optimizer, store, config.train, 1, ALONE).batches
    lengths = {group.row_tokens for step in range(40) for group in batches.rows(step).groups}
    assert len(lengths) > 4
    assert {length % 128 for length in lengths} == {0}


# With two processes the embedding's rows are exchanged, equally many.
@pytest.mark.parametrize("processes", [1, 2])
def test_step_with_shared_prompts_is_that_of_whole_documents(base, processes):
    found = run_in_group(survey, base, world_size=processes)[-1]
    for name in OBJECTIVES:
        assert found[name, False, "checks"] == []
        (detail,) = found[name, True, "checks"]
        assert detail.endswith(f"{OBJECTIVES[name][1]} of 53 tokens are left")
    for name in OBJECTIVES:
        (loss, figures, gradients), *_ = found[name, False]
        for step in found[name, True]:
            assert step[0] == pytest.approx(loss, rel=1e-5)
            assert step[1] == pytest.approx(figures, rel=1e-4, abs=1e-5)
            for key, gradient in gradients.items():
                largest = float(gradient.abs().max())
                assert largest > 0
                torch.testing.assert_close(step[2][key], gradient, rtol=1e-3, atol=1e-4 * largest)
