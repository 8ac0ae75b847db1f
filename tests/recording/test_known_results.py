"""Results of fake operations that are made like known ones: they are what torch makes."""

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from workflow.lib.recording.known_results import KnownResults, tensors

aten = torch.ops.aten
TIMES = 3  # torch's, the first one made like it, one more


def looks(tensor):
    storage = tensor.untyped_storage()
    place = (tensor.shape, tensor.stride(), tensor.storage_offset(), storage.nbytes())
    return *place, tensor.dtype, tensor.device, tensor.requires_grad, sorted(vars(tensor))


def memory(tree):
    return [tensor.untyped_storage()._cdata for tensor in tensors(tree)]


def operands():
    return {
        "x": torch.empty(6, 5, dtype=torch.bfloat16),
        "turned": torch.empty(5, 6, dtype=torch.bfloat16).t(),
        "cut": torch.empty(9, 5, dtype=torch.bfloat16)[2:8],
        "square": torch.empty(5, 5, dtype=torch.bfloat16),
        "whole": torch.empty(7, dtype=torch.int64),
    }


@pytest.mark.parametrize(
    ("func", "names", "rest", "options"),
    [
        (aten.detach.default, ["cut"], [], {}),
        (aten.view.default, ["x"], [[3, 10]], {}),
        (aten.view.dtype, ["cut"], [torch.uint8], {}),
        (aten.slice.Tensor, ["x"], [0, 1, 5, 2], {}),
        (aten.transpose.int, ["turned"], [0, 1], {}),
        (aten.split_with_sizes.default, ["cut"], [[1, 3, 2]], {}),
        (aten.as_strided.default, ["cut"], [[2, 2], [1, 3], 4], {}),
        (aten.expand.default, ["whole"], [[3, 7]], {}),
        (aten._unsafe_view.default, ["x"], [[30]], {}),
        (aten.empty_like.default, ["turned"], [], {"dtype": torch.float32}),
        (aten.empty_like.default, ["cut"], [], {}),
        (aten.new_zeros.default, ["x"], [[2, 3]], {"device": torch.device("cpu")}),
        (aten._to_copy.default, ["turned"], [], {"dtype": torch.float32}),
        (aten.mm.default, ["turned", "square"], [], {}),
        (aten.add.Tensor, ["x", "turned"], [], {"alpha": 2}),
        (aten.topk.default, ["cut"], [2], {}),
        (aten.cat.default, [], [["x", "turned"], 1], {}),
        (aten.mul_.Tensor, ["cut", "x"], [], {}),
        (aten.addmm.out, ["x", "turned", "square"], [], {"out": "cut"}),
    ],
    ids=str,
)
def test_result_is_as_torch_makes_it(func, names, rest, options):
    """Its shape, its type, and whose memory it has."""
    with (mode := FakeTensorMode()):
        results = KnownResults(mode)
        for _ in range(TIMES):
            there = operands()
            args = [*(there[name] for name in names), *(given(one, there) for one in rest)]
            named = {name: given(one, there) for name, one in options.items()}
            expected, made = func(*args, **named), results.call(func, args, named)
            assert type(made) is type(expected)
            assert [*map(looks, tensors(made))] == [*map(looks, tensors(expected))]
            taken = memory(there)
            for ours, torchs in zip(memory(made), memory(expected), strict=True):
                assert (ours if ours in taken else None) == (torchs if torchs in taken else None)
            assert isinstance(expected, list | tuple) or (
                [expected is one for one in there.values()]
                == [made is one for one in there.values()]
            )


def given(word, there):
    if isinstance(word, str):
        return there[word]
    if isinstance(word, list):
        return [given(one, there) for one in word]
    return word


def test_every_result_has_memory_of_its_own():
    with (mode := FakeTensorMode()):
        results, x = KnownResults(mode), torch.empty(5)
        made = [results.call(aten.empty_like.default, (x,), {}) for _ in range(TIMES)]
        assert len({*memory([x, *made])}) == TIMES + 1


def test_numbers_that_are_equal_but_of_other_types_are_told_apart():
    with (mode := FakeTensorMode()):
        results, x = KnownResults(mode), torch.empty(5, dtype=torch.int64)
        made = [results.call(aten.mul.Tensor, (x, number), {}).dtype for number in (1, 1.0) * 2]
    assert made == [torch.int64, torch.float32] * 2


def test_shape_that_values_decide_is_left_to_torch():
    with (mode := FakeTensorMode()):
        results, x = KnownResults(mode), torch.empty(5)
        for _ in range(TIMES):
            with pytest.raises(DynamicOutputShapeException):
                results.call(aten.nonzero.default, (x,), {})


def test_number_that_the_host_knows_stays_known():
    """As of `torch.tensor(3)`."""
    with (mode := FakeTensorMode()):
        results, three = KnownResults(mode), torch.tensor(3)
        views = [results.call(aten.detach.default, (three,), {}) for _ in range(TIMES)]
        assert [view.item() for view in views] == [3] * TIMES
