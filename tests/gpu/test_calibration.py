"""The compiled kernel that rounds columns against PyTorch's loop, bit by bit; packed documents on
their way through the layers."""

import pytest
import torch

from tests.quantization.test_layer_stream import LENGTHS, streamed, through_all_layers
from tests.support.families import VOCAB, tiny_family
from tests.support.rounding_cases import columns
from workflow.lib.quantization.calibrated_rounding import round_columns
from workflow.lib.quantization.layer_stream import Batch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(4096, 128), (1001, 128), (9, 40), (4, 1)], ids=str)
def test_kernel_rounds_as_the_loop_does(one_gpu, shape):
    assert round_columns.works_on(torch.device("cuda", 0))
    kernel, loop = columns(shape, device="cuda")
    for ours, expected in zip(kernel, loop, strict=True):
        assert torch.equal(ours, expected)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "afmoe", "jamba", "zaya"])
def test_packed_documents_go_through_layers_as_each_alone(one_gpu, tmp_path, family):
    """Packed rows attend as in training, by varlen or flex, documents alone as in stock
    Transformers, both in bf16: a few percent, where a document that sees another is off by half."""
    device, folder = torch.device("cuda"), tiny_family(family, tmp_path)
    ids = torch.randint(3, VOCAB, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)
    with streamed(folder, device=device, dtype=torch.bfloat16) as stream:
        packed = through_all_layers(stream, Batch(ids, positions)).flatten(0, 1).float()
        parts = [through_all_layers(stream, Batch(x, None))[0] for x in ids.split(LENGTHS, 1)]
    alone = torch.cat(parts).float()
    assert float((packed - alone).norm() / alone.norm()) < 0.15
