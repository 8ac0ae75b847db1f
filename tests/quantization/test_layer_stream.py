"""A model run one layer at a time computes what the whole model does."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model.test_nf4_model import FAMILIES, tiny
from tests.support.models import VOCAB, tiny_llama
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.quantization.layer_stream import Batch, LayerStream, attention_of

CPU = torch.device("cpu")
LENGTHS = (9, 5, 10)


def through_all_layers(stream: LayerStream, batch: Batch) -> torch.Tensor:
    stream.record([batch])
    assert batch.first_hidden is not None
    hidden = batch.first_hidden
    for number in range(len(stream.layers)):
        with stream.loaded(number):
            hidden = stream.run(number, batch, hidden)
    return hidden


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_kind_of_family_are_those_of_the_whole_model(
    tmp_path: Path, family: str
) -> None:
    folder = tiny(family, tmp_path)
    ids = torch.randint(1, VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    whole = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention_of(folder)
    )
    with CheckpointReader(folder) as reader:
        stream = LayerStream(folder, reader, device=CPU, dtype=torch.float32)
        batch = Batch(ids, None)
        hidden = through_all_layers(stream, batch)
        places = torch.tensor([0, 3, 16])
        found = stream.logits(batch, hidden, places)
    expected = whole.eval()(input_ids=ids).logits[:, places]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    ids = torch.randint(1, VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with CheckpointReader(folder) as reader:
        stream = LayerStream(folder, reader, device=CPU, dtype=torch.float32)
        together = through_all_layers(stream, Batch(ids, positions))
        alone = [through_all_layers(stream, Batch(part, None)) for part in ids.split(LENGTHS, 1)]
    expected = torch.cat(alone, 1)
    bound = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=bound)


@pytest.mark.parametrize(("family", "heads"), [("gemma2", 5), ("qwen3", 0)])
def test_heads_that_make_all_scores_are_told(tmp_path: Path, family: str, heads: int) -> None:
    folder = tiny(family, tmp_path)
    with CheckpointReader(folder) as reader:
        stream = LayerStream(folder, reader, device=CPU, dtype=torch.float32)
    assert stream.eager_heads == heads


def test_no_more_than_one_layer_has_weights(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)

    def on_the_device(stream: LayerStream) -> list[int]:
        return [
            number
            for number, layer in enumerate(stream.layers)
            if any(tensor.device.type != "meta" for tensor in layer.parameters())
        ]

    with CheckpointReader(folder) as reader:
        stream = LayerStream(folder, reader, device=CPU, dtype=torch.float32)
        assert on_the_device(stream) == []
        with stream.loaded(1):
            assert on_the_device(stream) == [1]
        assert on_the_device(stream) == []
        assert [len(stream.stored_names(number)) for number in range(3)] == [9, 9, 9]
