"""Calls of modules, joined to one batch; captured steps have padding behind some ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotrow.inputs.batch import fixed_outline, lookups_of, outline_of
from hotrow.inputs.calls import Call, JoinedCalls
from hotrow.inputs.spread import columns_of
from hotrow.inputs.tables import EmbeddingBagConfig, WidthGroup, group_by_width

CPU = torch.device("cpu")
COLUMNS = ("a", "b", "c")


def groups(dims: tuple[int, int, int]) -> list[WidthGroup]:
    """Tables of a module without bags, one of bags, and one of means with a padding index."""
    poolings = ("none", "sum", "mean")
    return group_by_width(
        [
            EmbeddingBagConfig(name, 50, dim, [name], pooling, 3 if name == "c" else None)
            for name, dim, pooling in zip(COLUMNS, dims, poolings, strict=True)
        ]
    )


def calls_of(*lengths: list[int], seed: int = 0) -> list[Call]:
    """Two calls of each module but the first; those of the second and the third have offsets."""
    draw = torch.Generator().manual_seed(seed)
    offsets = [torch.tensor([0, *x]).cumsum(0) for x in lengths]

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, 50, shape, generator=draw)

    return [
        Call("b", ids(sum(lengths[0])), offsets[0][:-1]),
        Call("a", ids(4, 3)),
        Call("c", ids(sum(lengths[1])), offsets[1], has_end=True),
        Call("b", ids(sum(lengths[2])).int(), offsets[2][:-1]),
        Call("c", ids(4, 2), by_row=True),
    ]


def padded(calls: list[Call], size: int) -> JoinedCalls:
    memory = {}
    for call in calls:
        if call.offsets is not None:
            longer = torch.nn.functional.pad(call.ids, (0, size - call.ids.numel()), value=49)
            memory[call.ids.data_ptr()] = longer, torch.tensor([call.ids.numel()])
    return JoinedCalls(calls).padded(memory)


def test_padding_between_calls_comes_last() -> None:
    for lengths in (([2, 0, 3, 1], [1, 1, 0, 0], [4, 4, 4, 4]), ([0, 1], [7, 0], [0, 2])):
        calls = calls_of(*lengths)
        right = JoinedCalls(calls).as_batch(COLUMNS)
        found = padded(calls, 20).as_batch(COLUMNS)
        assert right.offsets is not None
        assert found.offsets is not None
        assert torch.equal(found.offsets, right.offsets)
        assert torch.equal(found.values[: right.num_values], right.values)
        assert found.num_values == 3 * 20 + 12 + 8
        assert torch.equal(found.edges, torch.tensor(right.ends))
        assert found.calls == right.calls
        assert right.varies


def test_calls_without_padding_are_the_same_object() -> None:
    joined = JoinedCalls([Call("a", torch.arange(4)), Call("a", torch.arange(6).view(2, 3))])
    assert joined.padded({}) is joined
    assert not joined.as_batch(("a",)).varies


def test_the_outline_of_fixed_size_says_the_same_of_calls() -> None:
    for dims in ((4, 4, 4), (4, 6, 4)):
        for seed, lengths in enumerate([([2, 0, 3], [1, 2, 0], [4, 4, 4]), ([1], [0], [6])]):
            calls = calls_of(*lengths, seed=seed)
            batch, longer = (
                JoinedCalls(calls).as_batch(COLUMNS),
                padded(calls, 20).as_batch(COLUMNS),
            )
            for layout in groups(dims):
                right = lookups_of(batch, layout)
                count, size = right.num_lookups, right.num_lookups + 7
                is_real = torch.nn.functional.pad(right.ids >= 0, (0, 7))
                columns = columns_of(COLUMNS, layout, CPU)
                found = fixed_outline(longer, layout, columns, size, is_real)
                assert found.offsets is not None
                assert right.offsets is not None
                assert torch.equal(found.offsets, right.offsets)
                assert torch.equal(found.bag_of()[:count], right.bag_of())
                assert found.parts == right.parts
                assert found.bags_per_feature == right.bags_per_feature
                assert (found.divisor is None) == (right.divisor is None)
                if found.divisor is not None and right.divisor is not None:
                    assert torch.equal(found.divisor, right.divisor)


def test_what_depends_on_shapes_alone_is_made_once() -> None:
    constants: dict[object, Tensor] = {}
    batches = []
    for seed in range(2):
        a, *_, c = calls_of([2], [1], [3], seed=seed)[1:]
        batches.append(JoinedCalls([a, c], None, constants).as_batch(COLUMNS))
    assert batches[0].offsets is batches[1].offsets
    assert not torch.equal(batches[0].values, batches[1].values)
    (layout,) = groups((4, 4, 4))
    assert outline_of(batches[0], layout).offsets is batches[0].offsets


class OneDevice(TorchDispatchMode):
    """Fails where something is copied from one device to another."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, found)) if isinstance(x, Tensor)]
        assert len({x.device for x in tensors}) < 2, func
        return found


def test_a_graph_that_joins_padded_ids_copies_nothing_from_the_host() -> None:
    """What depends on shapes may have been forgotten since the step was tried."""
    device, calls = torch.device("meta"), []
    for call in calls_of([2, 0], [1, 1], [4, 4]):
        ids, offsets, count = call.ids.to(device), None, None
        if call.offsets is not None:
            offsets, count = call.offsets.to(device), torch.zeros(1, device=device).long()
        calls.append(replace(call, ids=ids, offsets=offsets, count=count))
    with OneDevice():  # type: ignore[no-untyped-call]
        batch = JoinedCalls(calls).as_batch(COLUMNS)
    assert batch.varies
