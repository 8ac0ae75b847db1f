import pytest
import torch
from transformers import LlamaConfig

from workflow.lib.evaluation import batch_size
from workflow.lib.evaluation.batch_size import (
    batches,
    fitting_batch_size,
    halving,
    restarting,
    token_bytes,
)
from workflow.lib.system.errors import BatchMemoryError, UserError

CPU = torch.device("cpu")
CONFIG = LlamaConfig(
    vocab_size=1009,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=2,
)


def tries(limit):
    tried = []

    def compute(size):
        tried.append(size)
        if size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
        return f"with {size}"

    return compute, tried


def test_batch_is_halved_until_it_fits():
    compute, tried = tries(3)
    assert halving(compute, start=13, what="tasks") == "with 3"
    assert tried == [13, 6, 3]


def test_single_sequence_that_does_not_fit_is_the_users_to_mend():
    compute, tried = tries(0)
    with pytest.raises(
        UserError, match=r"evaluate\.batch_size = 1: held-out loss runs out of memory .*3\.00 GiB"
    ):
        halving(compute, start=4, what="held-out loss")
    assert tried == [4, 2, 1]


def test_memory_of_the_host_running_out_is_seen():
    """Asks for 2^57 bytes, which no machine has."""

    def compute(size):
        return torch.empty(size, 2**56).shape[0] if size > 1 else size

    assert halving(compute, start=2, what="tasks") == 1


@pytest.mark.parametrize(("sequences", "expected"), [(0.5, 1), (1.0, 1), (5.9, 4), (10**6, 16)])
def test_auto_is_a_power_of_two_that_half_of_free_memory_holds(monkeypatch, sequences, expected):
    free = 2 * 70 * token_bytes(CONFIG, keeps_cache=False) * sequences
    monkeypatch.setattr(batch_size, "available_host_bytes", lambda: int(free) + 1)
    assert fitting_batch_size("auto", config=CONFIG, device=CPU, tokens=70) == expected


def test_generation_counts_keys_and_values_of_all_layers():
    cache = token_bytes(CONFIG, keeps_cache=True) - token_bytes(CONFIG, keeps_cache=False)
    assert cache == 4 * 2 * 3 * 16


def test_processes_in_step_ask_for_a_new_start_instead():
    """The others wait within the forward that failed: trying again here would be out of step."""
    compute, tried = tries(1)
    with pytest.raises(BatchMemoryError) as found:
        halving(compute, start=4, what="tasks", collective=True)
    assert (tried, found.value.size) == ([4], 4)


def test_new_starts_have_half_the_batch_until_it_fits():
    asked = []

    def launch(most):
        asked.append(most)
        size = most or 8
        if size > 2:
            raise BatchMemoryError(size)

    restarting(launch)
    assert asked == [None, 4, 2]


def test_batches_hold_all_and_keep_within_size_and_tokens():
    lengths, alike = [5, 41, 17, 9, 30, 9, 2, 23, 11, 3, 3], [(n % 3 == 0,) for n in range(11)]
    found = list(batches(lengths, alike, size=5, most_tokens=60))
    assert sorted(number for batch in found for number in batch) == list(range(11))
    for batch in found:
        assert len(batch) <= 5
        assert len(batch) * max(lengths[n] for n in batch) <= 60 or len(batch) == 1
        assert len({alike[n] for n in batch}) == 1
    assert len(list(batches(lengths, [()] * 11, size=5))) == 3
