"""Jagged tensors have the methods of TorchRec's, and the facts that its documentation shows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hotrow
from hotrow import JaggedTensor, KeyedJaggedTensor
from hotrow.inputs.tree import map_tensors, tensors_in

KEYS = ["one", "two"]
LENGTHS = [2, 0, 1, 1, 1, 3]  # two features, three samples
OFFSETS = [0, 2, 2, 3, 4, 5, 8]


def long(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def keyed(*, weighted: bool = False, by: str = "lengths") -> KeyedJaggedTensor:
    weights = torch.arange(8) / 2 if weighted else None
    where = {"lengths": long(*LENGTHS)} if by == "lengths" else {"offsets": long(*OFFSETS)}
    return KeyedJaggedTensor(KEYS, torch.arange(8), weights, **where)


def parts_of(jagged: Any) -> tuple[Any, ...]:
    weights = jagged.weights_or_none()
    named = (jagged.keys(),) if hasattr(jagged, "keys") else ()
    return (
        *named,
        jagged.values().tolist(),
        jagged.lengths().tolist(),
        jagged.offsets().tolist(),
        None if weights is None else weights.tolist(),
    )


WEIGHTS = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]


# -- making a keyed jagged tensor --------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        lambda v, w, n, o: KeyedJaggedTensor(KEYS, v, w, n),
        lambda v, w, n, o: KeyedJaggedTensor(KEYS, v, w, None, o),
        lambda v, w, n, o: KeyedJaggedTensor(KEYS, v, w, n, o, 3),
        lambda v, w, n, o: KeyedJaggedTensor(KEYS, v, weights=w, lengths=n.view(2, 3)),
        lambda v, w, n, o: KeyedJaggedTensor(KEYS, v, offsets=o, weights=w, stride=3),
        lambda v, w, n, o: KeyedJaggedTensor(KEYS, v, w, n, length_per_key=[3, 5]),
        lambda v, w, n, o: KeyedJaggedTensor.from_lengths_sync(KEYS, v, n, w),
        lambda v, w, n, o: KeyedJaggedTensor.from_offsets_sync(KEYS, v, o, w, stride=3),
        lambda v, w, n, o: KeyedJaggedTensor.from_jt_dict(
            {"one": JaggedTensor(v[:3], w[:3], n[:3]), "two": JaggedTensor(v[3:], w[3:], n[3:])}
        ),
        lambda v, w, n, o: KeyedJaggedTensor.concat(
            [KeyedJaggedTensor([k], v[s], w[s], n[b]) for k, s, b in zip(
                KEYS, (slice(3), slice(3, 8)), (slice(3), slice(3, 6)), strict=True)]
        ),
    ],
)  # fmt: skip
def test_every_way_to_make_a_batch_gives_the_same(made: Callable[..., KeyedJaggedTensor]) -> None:
    values, weights = torch.arange(8), torch.arange(8) / 2
    kjt = made(values, weights, long(*LENGTHS), long(*OFFSETS))
    assert parts_of(kjt) == (KEYS, list(range(8)), LENGTHS, OFFSETS, WEIGHTS)
    assert kjt.stride() == 3


@pytest.mark.parametrize("by", ["lengths", "offsets"])
def test_a_batch_says_what_belongs_to_each_key(by: str) -> None:
    kjt = keyed(by=by)
    assert (kjt.stride(), kjt.stride_per_key()) == (3, [3, 3])
    assert (kjt.length_per_key(), kjt.offset_per_key()) == ([3, 5], [0, 3, 8])
    assert (kjt.index_per_key(), kjt.lengths_offset_per_key()) == ({"one": 0, "two": 1}, [0, 3, 6])
    assert kjt.sync() is kjt
    assert kjt.device() == torch.device("cpu")
    assert not kjt.variable_stride_per_key()
    assert kjt.weights_or_none() is None
    with pytest.raises(ValueError, match="this KeyedJaggedTensor has no weights; see weights_or_"):
        kjt.weights()
    assert keyed(weighted=True).weights().tolist() == WEIGHTS


def test_offsets_that_change_in_place_are_seen() -> None:
    offsets = long(*OFFSETS)
    kjt = KeyedJaggedTensor(KEYS, torch.arange(8), offsets=offsets)
    assert kjt.length_per_key() == [3, 5]
    offsets.copy_(long(0, 2, 2, 4, 4, 5, 8))
    assert kjt.length_per_key() == [4, 4]
    assert kjt["one"].to_dense()[2].tolist() == [2, 3]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_keep_their_type(dtype: torch.dtype) -> None:
    kjt = KeyedJaggedTensor(KEYS, torch.arange(8), lengths=torch.tensor(LENGTHS, dtype=dtype))
    for jagged in (kjt, kjt["two"], kjt.to("cpu"), kjt.permute([1, 0]), kjt.split([1, 1])[0]):
        assert jagged.lengths().dtype == dtype
    assert kjt.offsets().dtype == torch.int64


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"offsets": long(0, 1, 2)}, "lengths are of 6 bags and offsets of 2"),
        ({"offsets": long(0, 2, 2, 4, 4, 5, 8)}, r"do not agree: offsets\[3\] is 4, .* sum to 3"),
        ({"stride": 2}, "stride=2 and 2 keys need 4 lengths; there are 6"),
        ({"lengths": torch.ones(6)}, "lengths must be int64"),
    ],
)
def test_parts_that_do_not_agree_are_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        KeyedJaggedTensor(KEYS, torch.arange(8), **{"lengths": long(*LENGTHS), **parts})


def test_what_is_not_supported_is_refused() -> None:
    ids, lengths = torch.arange(8), long(*LENGTHS)
    for more in ({"stride_per_key_per_rank": [[2], [4]]}, {"inverse_indices": (KEYS, lengths)}):
        for make in (KeyedJaggedTensor, KeyedJaggedTensor.from_lengths_sync):
            with pytest.raises(NotImplementedError, match="different numbers of samples"):
                make(KEYS, ids, lengths=lengths, **more)
    with pytest.raises(TypeError, match="no argument 'size'"):
        KeyedJaggedTensor(KEYS, ids, lengths=lengths, size=3)
    with pytest.raises(ValueError, match=r"as many samples each, and have {'a': 1, 'b': 2}"):
        KeyedJaggedTensor.from_jt_dict(
            {"a": JaggedTensor(ids[:1], lengths=long(1)), "b": JaggedTensor(ids, None, long(4, 4))}
        )
    halves = keyed(weighted=True).split([1, 1])
    with pytest.raises(ValueError, match="all features must have weights, or none of them"):
        KeyedJaggedTensor.concat([halves[0], keyed().split([1, 1])[1]])
    with pytest.raises(ValueError, match=r"different numbers of samples, \[3, 1\]"):
        KeyedJaggedTensor.concat([halves[0], KeyedJaggedTensor(["x"], ids[:1], lengths=long(1))])
    with pytest.raises(ValueError, match="no batches to concatenate"):
        KeyedJaggedTensor.concat([])


def test_lengths_that_leave_values_out_are_refused_where_a_feature_is_taken() -> None:
    kjt = KeyedJaggedTensor(KEYS, torch.arange(9), lengths=long(*LENGTHS))
    for take in (lambda: kjt["one"], kjt.to_dict, kjt.length_per_key, lambda: kjt.split([1, 1])):
        with pytest.raises(ValueError, match="number of values, 9, and sum to 8"):
            take()
    odd = KeyedJaggedTensor(KEYS, torch.arange(3), lengths=long(1, 1, 1))
    with pytest.raises(ValueError, match="2 keys need a multiple of as many lengths; there are 3"):
        odd.stride()


# -- nothing in it -----------------------------------------------------------------------


def test_a_batch_may_be_empty() -> None:
    nothing = KeyedJaggedTensor.empty(is_weighted=True, lengths_dtype=torch.int64)
    assert parts_of(nothing) == ([], [], [], [0], [])
    assert (nothing.stride(), nothing.length_per_key(), nothing.to_dict()) == (0, [], {})
    assert nothing.offset_per_key() == [0]
    assert str(nothing) == "KeyedJaggedTensor()\n"
    assert nothing.lengths().dtype == nothing.values().dtype == torch.int64
    assert KeyedJaggedTensor.empty().weights_or_none() is None
    like = KeyedJaggedTensor.empty_like(keyed(weighted=True))
    assert (parts_of(like), like.stride()) == (([], [], [], [0], []), 3)
    assert parts_of(KeyedJaggedTensor.from_jt_dict({})) == ([], [], [], [0], None)


@pytest.mark.parametrize("size", [0, 2])
def test_keys_may_have_no_values_and_no_samples(size: int) -> None:
    kjt = KeyedJaggedTensor(KEYS, torch.tensor([]), lengths=torch.zeros(2 * size).int())
    assert (kjt.stride(), kjt.values().dtype) == (size, torch.int64)
    assert (kjt.length_per_key(), kjt.offset_per_key()) == ([0, 0], [0, 0, 0])
    assert parts_of(kjt["two"]) == ([], [0] * size, [0] * (size + 1), None)
    assert parts_of(kjt.permute([1, 0]))[0] == ["two", "one"]
    assert kjt.to_dict()["one"].to_padded_dense().shape == (size, 0)
    embedding = hotrow.EmbeddingBagCollection(
        [hotrow.EmbeddingBagConfig("t", 10, 4, KEYS)], hotrow.SGD(lr=0.1), strategy="all-fast"
    )
    assert torch.equal(embedding(kjt).values(), torch.zeros(size, 8))
    offsets = KeyedJaggedTensor(KEYS, torch.tensor([]), offsets=torch.tensor([]))
    assert (offsets.stride(), offsets.length_per_key()) == (0, [0, 0])


# -- features out of it ------------------------------------------------------------------


@pytest.mark.parametrize("by", ["lengths", "offsets"])
def test_a_feature_is_a_jagged_tensor(by: str) -> None:
    kjt = keyed(weighted=True, by=by)
    one, two = kjt["one"], kjt["two"]
    assert parts_of(one) == ([0, 1, 2], [2, 0, 1], [0, 2, 2, 3], WEIGHTS[:3])
    assert parts_of(two) == ([3, 4, 5, 6, 7], [1, 1, 3], [0, 1, 2, 5], WEIGHTS[3:])
    assert {key: parts_of(part) for key, part in kjt.to_dict().items()} == {
        "one": parts_of(one),
        "two": parts_of(two),
    }
    assert parts_of(KeyedJaggedTensor.from_jt_dict(kjt.to_dict())) == parts_of(kjt)
    with pytest.raises(KeyError, match="no feature 'three'; there are one, two"):
        kjt["three"]


def test_a_batch_is_split_by_keys() -> None:
    kjt = keyed(weighted=True)
    left, nothing, right = kjt.split([1, 0, 1])
    assert parts_of(left) == (["one"], [0, 1, 2], [2, 0, 1], [0, 2, 2, 3], WEIGHTS[:3])
    assert parts_of(nothing) == ([], [], [], [0], [])
    assert nothing.stride() == 3
    assert parts_of(right) == (["two"], [3, 4, 5, 6, 7], [1, 1, 3], [0, 1, 2, 5], WEIGHTS[3:])
    assert parts_of(kjt.split([2])[0]) == parts_of(kjt)
    assert parts_of(KeyedJaggedTensor.concat([left, nothing, right])) == parts_of(kjt)
    for segments in ([3], [1, 2], [-1, 2]):
        with pytest.raises(ValueError, match="segments must sum to at most 2"):
            kjt.split(segments)


def test_keys_can_be_put_into_another_order() -> None:
    lengths = long(0, 2, 0, 1, 1, 1, 0, 3, 0)
    kjt = KeyedJaggedTensor(["a", "b", "c"], torch.arange(8), torch.arange(8) / 2, lengths)
    turned = kjt.permute([1, 0, 2])
    assert turned.keys() == ["b", "a", "c"]
    assert turned.values().tolist() == [2, 3, 4, 0, 1, 5, 6, 7]
    assert turned.lengths().tolist() == [1, 1, 1, 0, 2, 0, 0, 3, 0]
    assert turned.offset_per_key() == [0, 3, 5, 8]
    assert turned.weights().tolist() == [1.0, 1.5, 2.0, 0.0, 0.5, 2.5, 3.0, 3.5]
    assert parts_of(kjt.permute([-1], long(2)))[:2] == (["c"], [5, 6, 7])
    with pytest.raises(ValueError, match="key 'b' is there twice"):
        kjt.permute([1, 1])
    with pytest.raises(IndexError):
        kjt.permute([3])


def test_gradients_of_weights_pass_through() -> None:
    weights = torch.ones(8, requires_grad=True)
    kjt = KeyedJaggedTensor(KEYS, torch.arange(8), weights, long(*LENGTHS))
    (2 * kjt.permute([1, 0]).split([1, 1])[0].weights()).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [0, 0, 0, 2, 2, 2, 2, 2]


# -- moved, copied, printed --------------------------------------------------------------


@pytest.mark.parametrize("jagged", [keyed(weighted=True), keyed(weighted=True)["two"]], ids=type)
def test_copies_hold_the_same(jagged: Any) -> None:
    right = parts_of(jagged)
    copies = [
        jagged.to("cpu", non_blocking=True), jagged.clone(), copy.deepcopy(jagged),
        pickle.loads(pickle.dumps(jagged)), map_tensors([jagged], torch.clone)[0],
    ]  # fmt: skip
    for made in copies:
        assert type(made) is type(jagged)
        assert parts_of(made) == right
    assert copies[1].values().data_ptr() != jagged.values().data_ptr()
    assert len(tensors_in({"x": jagged})) == 3
    assert jagged.to("meta").device() == torch.device("meta")


def test_only_weights_get_another_type() -> None:
    moved = keyed(weighted=True).to("cpu", dtype=torch.float64)
    assert (moved.weights().dtype, moved.values().dtype) == (torch.float64, torch.int64)


def test_a_batch_is_printed_by_key_and_sample() -> None:
    assert str(keyed()) == (
        'KeyedJaggedTensor({\n    "one": [[0, 1], [], [2]],\n    "two": [[3], [4], [5, 6, 7]]\n})\n'
    )
    assert repr(keyed()) == str(keyed()).rstrip("\n")
    assert str(keyed(weighted=True).split([1])[0]) == (
        'KeyedJaggedTensor({\n    "one": {\n        "values": [[0, 1], [], [2]],\n'
        '        "weights": [[0.0, 0.5], [], [1.0]]\n    }\n})\n'
    )
    assert str(keyed()["two"]) == "JaggedTensor({\n    [[3], [4], [5, 6, 7]]\n})\n"
    assert str(keyed(weighted=True)["one"]) == (
        'JaggedTensor({\n    "values": [[0, 1], [], [2]],\n'
        '    "weights": [[0.0, 0.5], [], [1.0]]\n})\n'
    )
    wide = JaggedTensor(torch.ones(2, 2), lengths=long(1, 1))
    assert "[[[1.0, 1.0]], [[1.0, 1.0]]]" in str(wide)


def test_many_values_are_summarized_when_printed() -> None:
    ids = torch.zeros(3000, dtype=torch.int64)
    kjt = KeyedJaggedTensor(KEYS, ids, lengths=long(1000, 500, 500, 1000))
    assert str(kjt) == "KeyedJaggedTensor({one, two: 2 samples, 3,000 values})\n"
    assert str(kjt["one"]) == "JaggedTensor({2 samples, 1,500 values})\n"
    assert "8 values" in str(keyed().to("meta"))


# -- jagged tensors ----------------------------------------------------------------------

VALUES = torch.arange(1.0, 9.0)


def test_a_jagged_tensor_is_made_of_lengths_or_offsets() -> None:
    right = (VALUES.tolist(), LENGTHS, OFFSETS, None)
    assert parts_of(JaggedTensor(VALUES, lengths=long(*LENGTHS))) == right
    assert parts_of(JaggedTensor(VALUES, offsets=long(*OFFSETS).int())) == right
    assert parts_of(JaggedTensor(VALUES, None, long(*LENGTHS), long(*OFFSETS))) == right
    with pytest.raises(ValueError, match="do not agree"):
        JaggedTensor(VALUES, None, long(*LENGTHS), long(0, 1, 2, 3, 4, 5, 8))
    with pytest.raises(ValueError, match=r"give lengths= or offsets=; the second .* is weights"):
        JaggedTensor(VALUES, long(*LENGTHS))
    nothing = JaggedTensor.empty(is_weighted=True, values_dtype=torch.int64)
    assert (nothing.values().dtype, nothing.lengths().dtype) == (torch.int64, torch.int32)
    assert (nothing.to_dense(), nothing.to_dense_weights(), nothing.weights().numel()) == (
        [],
        [],
        0,
    )


def test_dense_parts_are_joined_and_taken_apart() -> None:
    values = [torch.tensor([1.0]), torch.tensor([]), torch.tensor([7.0, 8.0])]
    weights = [2 * part for part in values]
    jagged = JaggedTensor.from_dense(values, weights)
    assert parts_of(jagged) == ([1.0, 7.0, 8.0], [1, 0, 2], [0, 1, 1, 3], [2.0, 14.0, 16.0])
    assert jagged.lengths().dtype == torch.int32
    assert [part.tolist() for part in jagged.to_dense()] == [[1.0], [], [7.0, 8.0]]
    taken = jagged.to_dense_weights()
    assert taken is not None
    assert [part.tolist() for part in taken] == [[2.0], [], [14.0, 16.0]]
    assert JaggedTensor.from_dense(values).to_dense_weights() is None
    assert parts_of(JaggedTensor.from_dense([])) == ([], [], [0], None)
    with pytest.raises(ValueError, match="weights must have as many entries per sample"):
        JaggedTensor.from_dense(values, weights[::-1])


def test_padded_rows_lose_their_padding() -> None:
    padded, lengths = torch.arange(12.0).view(3, 4), long(2, 0, 4)
    jagged = JaggedTensor.from_dense_lengths(padded, lengths, 10 * padded)
    assert parts_of(jagged)[0] == [0.0, 1.0, 8.0, 9.0, 10.0, 11.0]
    assert jagged.weights().tolist() == [0.0, 10.0, 80.0, 90.0, 100.0, 110.0]
    again = jagged.to_padded_dense(4, padding_value=-1.0)
    mask = torch.arange(4) < lengths[:, None]
    assert torch.equal(again, torch.where(mask, padded, -1.0))
    for bad in (long(5, 0, 0), long(-1, 0, 0), long(1, 1)):
        with pytest.raises(ValueError, match="lengths"):
            JaggedTensor.from_dense_lengths(padded, bad)


def test_samples_are_padded_or_cut_to_a_length() -> None:
    jagged = JaggedTensor(VALUES, VALUES / 10, offsets=long(*OFFSETS))
    right = [[1, 2], [9, 9], [3, 9], [4, 9], [5, 9], [6, 7]]
    assert jagged.to_padded_dense(2, padding_value=9.0).tolist() == right
    longest = jagged.to_padded_dense()
    assert longest.shape == (6, 3)
    assert (longest[5].tolist(), longest[1].tolist()) == ([6, 7, 8], [0, 0, 0])
    assert jagged.to_padded_dense(0).shape == (6, 0)
    weights = jagged.to_padded_dense_weights(2, padding_value=1.0)
    assert weights is not None
    torch.testing.assert_close(weights[5], torch.tensor([0.6, 0.7]))
    assert weights[1].tolist() == [1.0, 1.0]
    assert JaggedTensor(VALUES, offsets=long(*OFFSETS)).to_padded_dense_weights() is None


def test_padding_vectors_is_what_torchs_nested_tensors_do_with_the_same_gradient() -> None:
    vectors = torch.randn(8, 4, requires_grad=True)
    found = JaggedTensor(vectors, lengths=long(*LENGTHS)).to_padded_dense()
    nested = torch.nn.utils.rnn.pad_sequence(list(vectors.split(LENGTHS)), batch_first=True)
    assert torch.equal(found, nested)
    scale = torch.randn_like(found)
    (mine,) = torch.autograd.grad((found * scale).sum(), vectors)
    (right,) = torch.autograd.grad((nested * scale).sum(), vectors)
    assert torch.equal(mine, right)


def test_values_and_lengths_must_fit_together() -> None:
    with pytest.raises(ValueError, match="number of values, 8, and sum to 5"):
        JaggedTensor(VALUES, lengths=long(2, 3)).to_dense()
