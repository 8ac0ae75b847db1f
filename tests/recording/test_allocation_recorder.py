"""What kernels of libraries allocate besides their results, beside what GPUs have shown."""

from dataclasses import replace

import pytest
import torch

from tests.recording.test_engine_run import LLAMA
from tests.support.preflight_examples import setup
from workflow.lib.planning.memory.replay import replay
from workflow.lib.recording.allocation_recorder import DOCUMENT_PADDING, workspaces


def test_backward_of_attention_takes_what_an_h200_allocated():
    """4,096 tokens, 4 heads of 64 columns, 2 of keys, 152 documents, by an allocator's history."""
    query, key = (torch.empty(4096, heads, 64, dtype=torch.bfloat16) for heads in (4, 2))
    starts = torch.zeros(153, dtype=torch.int32)
    args = (query, query, key, key, query, None, starts, starts)
    found = workspaces("torch_attn._varlen_attn_backward.default", args, None)
    assert sorted(found) == [376_832, 2_097_152, 2_097_152, 24_117_248]


def test_packed_documents_have_padding_in_the_recording(process):
    """Where attention's backward is the peak: 2 rows of 8 documents each in place of one."""
    narrow = {"hidden_size": 256, "num_attention_heads": 16, "head_dim": 128}
    config = LLAMA | narrow | {"num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 320}
    plan = setup(processes=1, micro_batch_size=2, fused_layers=True)
    plans = [replace(plan, documents_per_row=count) for count in (1.0, 8.0)]
    one, eight = (
        replay(process.record(config, asked)).peaks.phase_bytes["backward"] for asked in plans
    )
    padded_tokens, heads, head_dim = DOCUMENT_PADDING * 14, 16, 128
    queries_gradient = 4 * padded_tokens * heads * head_dim
    assert eight - one == pytest.approx(queries_gradient, rel=0.02)
