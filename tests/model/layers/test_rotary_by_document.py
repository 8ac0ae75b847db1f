"""That a document is rotated by its own length, whatever it is packed with."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from tests.support.models import adapted, quantized
from tests.support.rounding import PLAIN, lost
from workflow.lib.model.layers.rotary_by_document import (
    RotaryByDocument,
    document_lengths,
    rotate_by_document_,
)

SHORT = 16  # positions of the original context
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * n for n in range(8)],
    "long_factor": [4.0 + n for n in range(8)],
    "original_max_position_embeddings": SHORT,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
# Documents of two rows: a short one beside a long one; as long as the limit and one longer, and a
# long padding tail.
LENGTHS = [[9, 40, 1], [SHORT, SHORT + 1, 17]]
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


@pytest.fixture(scope="module", params=["phi3", "llama", "dynamic"])
def base(request, tmp_path_factory):
    """An NF4 folder of a model with LongRoPE; or with dynamic NTK scaling."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    rope = {"rope_parameters": DYNAMIC if request.param == "dynamic" else LONG_ROPE}
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, **rope))
    if request.param == "phi3":
        long = {"original_max_position_embeddings": SHORT}
        model = Phi3ForCausalLM(Phi3Config(**SIZES, **long, **rope))
    model.save_pretrained(folder / "original")
    return quantized(folder / "original", folder / "nf4")


@torch.no_grad()
def logits(model, ids, positions):
    every = torch.arange(ids.numel())
    return model.logits(ids, positions, every).unflatten(0, ids.shape)


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_document_has_the_same_logits_packed_and_alone(base, attention):
    model = adapted(base, attention=attention)
    ids = torch.randint(0, 101, POSITIONS.shape, generator=torch.Generator().manual_seed(1))
    packed = logits(model, ids, POSITIONS)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            alone = logits(model, ids[row : row + 1, part], torch.arange(length)[None])
            assert lost(packed[row, part], alone[0]) <= PLAIN
            start += length


@pytest.mark.parametrize("length", [SHORT, SHORT + 1, 50])
def test_a_document_alone_has_the_familys_own_logits(length):
    torch.manual_seed(0)
    model = Phi3ForCausalLM(
        Phi3Config(**SIZES, original_max_position_embeddings=SHORT, rope_parameters=LONG_ROPE)
    ).eval()
    ids, positions = torch.arange(length)[None], torch.arange(length)[None]
    with torch.no_grad():
        theirs = model(ids, position_ids=positions, use_cache=False).logits
        rotate_by_document_(model)
        ours = model(ids, position_ids=positions, use_cache=False).logits
    assert isinstance(model.model.rotary_emb, RotaryByDocument)
    assert torch.equal(ours, theirs)


@torch.no_grad()
def test_packed_documents_beyond_dynamic_ntks_limit_have_the_familys_own_logits():
    """Each has frequencies of its own length, as a fresh stock model has for it alone."""
    lengths = (9, 40, 17, 33)
    changes: dict[str, Any] = {"max_position_embeddings": SHORT, "rope_parameters": DYNAMIC}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | changes))).eval()
    ids = torch.randint(0, 101, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    alone = [deepcopy(model)(x, use_cache=False).logits for x in ids.split(lengths, 1)]
    rotate_by_document_(model)
    packed = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


def test_models_of_fixed_frequencies_are_left_as_they_are():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    rotary = model.model.rotary_emb
    rotate_by_document_(model)
    assert model.model.rotary_emb is rotary


def test_length_of_a_tokens_document():
    assert document_lengths(torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])).tolist() == [
        [3, 3, 3, 1, 2, 2],
        [6] * 6,
    ]


@pytest.mark.parametrize("rope", [LONG_ROPE, DYNAMIC], ids=lambda rope: rope["rope_type"])
def test_nothing_waits_for_what_the_device_knows(rope):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope))
    rotate_by_document_(model)
    rotary: Any = model.model.rotary_emb
    rotary.copies(torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        cos, _ = rotary(torch.empty(1), torch.zeros(2, 3 * SHORT, dtype=torch.int64))
    assert cos.shape == (2, 3 * SHORT, 16)


class ByLayerType(torch.nn.Module):
    """A rotary embedding whose layers of one type have LongRoPE; tells its frequencies and the
    positions it got."""

    def __init__(self) -> None:
        super().__init__()
        self.rope_type = {"full": "longrope", "sliding": "default"}
        self.config = LlamaConfig(**SIZES)
        self.config.rope_parameters = {
            "full": LONG_ROPE | {"original_max_position_embeddings": 2},
            "sliding": {},
        }
        self.full_inv_freq = torch.nn.Buffer(torch.zeros(8))
        self.sliding_inv_freq = torch.nn.Buffer(torch.zeros(8))

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.rope_type == {"full": "default", "sliding": "default"}
        first = self.get_buffer(f"{layer_type}_inv_freq")[:1]
        return first.expand(*position_ids.shape, 1), position_ids[..., None]


@pytest.mark.parametrize(
    ("kind", "frequencies"), [("full", [0, 0, 0.25, 0.25, 0.25, 0.25]), ("sliding", [0] * 6)]
)
def test_type_of_layers_has_its_own_limit(kind, frequencies):
    rotary = RotaryByDocument(ByLayerType())
    found, positions = rotary(torch.zeros(1), torch.tensor([[0, 1, 0, 1, 2, 3]]), layer_type=kind)
    assert found[0, :, 0].tolist() == frequencies
    assert positions[0, :, 0].tolist() == [0, 1, 0, 1, 2, 3]
