"""Which tokens calibrate a linear in a recurrent layer, which gets documents by group."""

import torch

from workflow.lib.model.documents import documents_of
from workflow.lib.quantization.layer_inputs import counted_tokens

TOKENS = torch.arange(20.0)[:, None]
LENGTHS = [3, 9, 2, 6]
COUNTED = torch.arange(20).view(2, 10) % 3 > 0


def test_tokens_that_count_are_the_same_apart_and_together():
    documents = documents_of(LENGTHS)
    counted = counted_tokens(COUNTED, documents)
    whole = counted.of(TOKENS, call=0)
    assert len(documents.shapes) > 1
    parts = documents.apart(TOKENS.view(2, 10, 1))
    apart = [counted.of(x.flatten(0, 1), call=n) for n, x in enumerate(parts)]
    assert sum(map(len, apart)) == len(whole) == int(COUNTED.sum())
    assert torch.equal(torch.cat(apart).flatten().sort().values, whole.flatten())


def test_what_fills_up_a_document_does_not_count():
    documents = documents_of(LENGTHS)
    counted = counted_tokens(None, documents)
    parts = documents.apart(TOKENS.view(2, 10, 1))
    apart = [counted.of(x.flatten(0, 1), call=n) for n, x in enumerate(parts)]
    assert sum(x.shape[0] * x.shape[1] for x in parts) > 20
    assert torch.cat(apart).flatten().sort().values.tolist() == TOKENS.flatten().tolist()


def test_documents_of_one_length_count_as_the_rows_do():
    counted = counted_tokens(COUNTED, documents_of([5] * 4))
    assert (
        counted.of(TOKENS, call=0).flatten().tolist() == COUNTED.flatten().nonzero()[:, 0].tolist()
    )
