"""A model run one layer at a time, on packed rows, computes what the whole stock model does for
each document alone."""

from contextlib import contextmanager

import pytest
import torch
from transformers import AutoConfig

from tests.support.families import (
    FAMILIES,
    LATENT,
    LONG_ROPE,
    MAMBA_2,
    ROUTED_IN_GROUPS,
    SIZES,
    VOCAB,
    by_kind,
    tiny_model,
)
from tests.support.models import tiny_llama
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.meta_model import auto_class
from workflow.lib.quantization.layer_stream import Batch, LayerStream
from workflow.lib.system.errors import UserError

CPU = torch.device("cpu")
LENGTHS = (9, 5, 10, 1)  # longer and shorter than windows and convolutions
INDEXED = LATENT | {
    "index_n_heads": 16,  # of few heads none may find a key, and equal scores are chosen by chance
    "index_head_dim": 16,
    "index_topk": 4,
    "v_head_dim": 16,
    "head_dim": None,
    "num_hidden_layers": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "indexer_types": ["full", "shared", "full"],
}
OTHERS = {
    "bamba": ("bamba", MAMBA_2 | {"attn_layer_indices": [1], "mamba_n_groups": 1}),
    "glm_moe_dsa": ("glm_moe_dsa", ROUTED_IN_GROUPS | INDEXED),
    "phi3, LongRoPE": (
        "phi3",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 6},
    ),
}
"""Model type and sizes of decoders that are in no list of families."""
ORDINARY = {
    *("llama", "gemma2", "gemma3", "gemma4_text", "qwen3_5_text", "falcon_h1", "nemotron_h_moe"),
    *("gpt_oss", "afmoe", "granitemoehybrid", "jamba", "zaya", *OTHERS),
}
"""One of each kind: the others are nightly."""


def folder_of(name, folder):
    if name in FAMILIES:
        return tiny_model(FAMILIES[name].config(name), folder)
    model_type, changes = OTHERS[name]
    sizes = {key: x for key, x in (SIZES | changes).items() if x is not None}
    return tiny_model(AutoConfig.for_model(model_type, **sizes), folder)


@contextmanager
def streamed(folder, *, device=CPU, dtype=torch.float32):
    with Checkpoint(folder).weights() as reader:
        yield LayerStream(Checkpoint(folder), reader, device=device, dtype=dtype)


def through_all_layers(stream, batch):
    hidden = stream.first_hidden(batch)
    for number in range(len(stream.layers)):
        with stream.loaded(number):
            hidden = stream.run(number, batch, hidden)
    return hidden


@torch.no_grad()
@pytest.mark.parametrize("name", by_kind((*FAMILIES, *OTHERS), ORDINARY))
def test_packed_documents_have_the_logits_of_the_stock_model_for_each_alone(tmp_path, name):
    """Rounding in float32 is a ten-thousandth of the largest logit and less on any processor; a
    document that sees another changes them by a tenth and more."""
    folder = folder_of(name, tmp_path)
    ids = torch.randint(3, VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with streamed(folder) as stream:
        batch = Batch(ids, positions)
        hidden = through_all_layers(stream, batch)
        found = stream.logits(batch, hidden, torch.arange(sum(LENGTHS)))
    attention = Checkpoint(folder).attention_needs.stock
    whole = (
        auto_class(AutoConfig.from_pretrained(folder))
        .from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
        .eval()
    )
    alone = [whole(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
    expected = torch.cat(alone, 1)
    assert float((found - expected).abs().max()) < 1e-3 * float(expected.abs().max())


@torch.no_grad()
def test_same_rows_go_through_two_models_that_share_keys_without_a_mix_up(tmp_path):
    """Gemma 4's later layers attend to keys of earlier ones, which wait beside hidden states."""
    folder = folder_of("gemma4_text", tmp_path)
    ids = torch.randint(3, VOCAB, (1, 11), generator=torch.Generator().manual_seed(0))
    with streamed(folder) as stream:
        alone = through_all_layers(stream, Batch(ids, None))
        one = Batch(ids, None)
        hidden = stream.first_hidden(one)
        other, changed = one.for_another_model(), -hidden
        for number in range(len(stream.layers)):
            with stream.loaded(number):
                hidden = stream.run(number, one, hidden)
                changed = stream.run(number, other, changed)
    assert torch.equal(hidden, alone)
    assert not torch.allclose(changed, alone, atol=0.1)


@torch.no_grad()
def test_layer_can_be_run_as_often_as_it_is_asked_for(tmp_path):
    """Zaya's layers get states of the router of the layer before, and return theirs."""
    folder = folder_of("zaya", tmp_path)
    ids = torch.randint(3, VOCAB, (1, 11), generator=torch.Generator().manual_seed(0))
    with streamed(folder) as stream:
        batch = Batch(ids, None)
        hidden = stream.first_hidden(batch)
        for number in range(len(stream.layers)):
            with stream.loaded(number):
                once, hidden = hidden, stream.run(number, batch, hidden)
                assert torch.equal(stream.run(number, batch, once), hidden)


@torch.no_grad()
def test_family_that_hands_on_more_than_is_followed_is_refused(tmp_path, monkeypatch):
    """A decoder that adds up what its layers return, and gives it to the next."""
    folder = tiny_llama(tmp_path)
    with streamed(folder) as stream:
        decoder = stream.model.get_decoder()

        def adding(input_ids, **_):
            hidden, total = decoder.embed_tokens(input_ids), 0.0
            for layer in decoder.layers:
                total = total + hidden
                rotary = decoder.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
                hidden = layer(hidden + total, attention_mask=None, position_embeddings=rotary)

        monkeypatch.setattr(decoder, "forward", adding)
        with pytest.raises(UserError, match=r"layers\.2 is given more of the layers before it"):
            through_all_layers(stream, Batch(torch.arange(1, 8)[None], None))


@pytest.mark.parametrize(("family", "heads"), [("gemma2", 3), ("qwen3", 0)])
def test_heads_that_make_all_scores_are_told(tmp_path, family, heads):
    folder = folder_of(family, tmp_path)
    with streamed(folder) as stream:
        assert stream.eager_heads == heads


def test_no_more_than_one_layer_has_weights(tmp_path):
    folder = tiny_llama(tmp_path)

    def on_the_device(stream):
        return [
            number
            for number, layer in enumerate(stream.layers)
            if any(tensor.device.type != "meta" for tensor in layer.parameters())
        ]

    with streamed(folder) as stream:
        assert on_the_device(stream) == []
        with stream.loaded(1):
            assert on_the_device(stream) == [1]
        assert on_the_device(stream) == []
        assert [len(stream.stored_names(number)) for number in range(3)] == [9, 9, 9]
