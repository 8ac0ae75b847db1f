"""What layers hand on beside hidden states, kept as tensors and put back."""

import torch
from transformers import cache_utils

from workflow.lib.quantization.layer_stream import LayerCarry, Watched, carry_of

KVSharingDict = getattr(cache_utils, "KVSharingDict", dict)  # an ordinary one in early versions
HIDDEN, CHOSEN, WEIGHTS = torch.ones(1, 3, 2), torch.arange(3), torch.zeros(1, 3, 3)


def test_what_was_kept_as_tensors_is_the_same_again():
    keys = {"shared_kv_states": {"full_attention": (HIDDEN, -HIDDEN), "sliding": (2 * HIDDEN,)}}
    for beside in (LayerCarry(), LayerCarry((None, CHOSEN)), LayerCarry((), keys)):
        again = carry_of(beside.tensors())
        assert str(again) == str(beside)


def test_of_an_output_is_kept_what_the_layer_behind_gets():
    watched = Watched(((HIDDEN,), {}))
    behind = (HIDDEN,), {"prev_topk_indices": CHOSEN}
    kept = watched.handed_on((HIDDEN, WEIGHTS, CHOSEN), LayerCarry(), behind)
    assert kept.others[0] is None
    assert torch.equal(kept.others[1], CHOSEN)


def test_keys_that_a_layer_shares_reach_the_layers_behind_it():
    first, later = KVSharingDict(), KVSharingDict()
    watched = Watched(((HIDDEN,), {"shared_kv_states": first}))
    first["full"] = (HIDDEN, -HIDDEN)
    kept = watched.handed_on(HIDDEN, LayerCarry(), None)
    kept.put_into(((HIDDEN,), {"shared_kv_states": later}))
    assert torch.equal(later["full"][1], -HIDDEN)
