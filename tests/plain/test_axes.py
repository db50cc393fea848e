"""How operands travel through reshapes and permutations, against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tvmfuse.graph.axes import Relayout, layouts_of, matched_groups, moved, order_of, pull_back, result_shape, simplified

EXTENTS = st.sampled_from([1, 1, 2, 2, 3, 3, 4, 6])


@st.composite
def factorisations(draw, size):
    """A shape of `size` elements, with axes of extent 1 strewn in."""
    if size == 0:
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3]), min_size=1, max_size=4))
        shape[draw(st.integers(0, len(shape) - 1))] = 0
        return tuple(shape)
    shape = []
    while size > 1:
        shape.append(draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0])))
        size //= shape[-1]
        assume(len(shape) < 7)
    return (*shape, *(1,) * draw(st.integers(0, 1)))


@st.composite
def chains(draw, empty=False):
    shape = tuple(draw(st.lists(EXTENTS, max_size=4)))
    if empty:
        shape = (*shape[:2], 0, *shape[2:])
    ops, current = [], shape
    for kind in draw(st.lists(st.sampled_from(["reshape", "permute"]), max_size=4)):
        argument = draw(factorisations(math.prod(current)) if kind == "reshape" else st.permutations(range(len(current))))
        ops.append((kind, tuple(argument)))
        current = result_shape(current, ops[-1:])
    return shape, ops, current


@st.composite
def operands(draw, result):
    """Scalars, lower ranks, axes of 1 and full shapes."""
    kept = draw(st.lists(st.booleans(), min_size=len(result), max_size=len(result)))
    shape = [extent if keep else 1 for extent, keep in zip(result, kept, strict=True)]
    rank = draw(st.integers(0, len(shape)))
    return tuple(shape[len(shape) - rank :])


def numbered(shape, start):
    return np.arange(start, start + math.prod(shape), dtype=np.float64).reshape(shape)


def assert_moves(shape, ops, operand):
    x, y = numbered(shape, 1), numbered(operand, 1000) ** 2
    relayout = pull_back(shape, ops, operand)
    for op in (np.add, np.subtract, lambda a, b: np.subtract(b, a)):
        above = op(x, relayout.apply(y))
        assert above.shape == x.shape
        np.testing.assert_array_equal(op(moved(x, ops), y), moved(above, ops))
    return relayout


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_an_operand_below_a_chain_is_its_relayout_above_it(data):
    shape, ops, result = data.draw(chains())
    assert_moves(shape, ops, data.draw(operands(result)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_empty_tensors_keep_their_shapes(data):
    shape, ops, result = data.draw(chains(empty=True))
    assert_moves(shape, ops, data.draw(operands(result)))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_full_operands_and_scalars_repeat_nothing(data):
    shape, ops, result = data.draw(chains())
    assert not assert_moves(shape, ops, result).materialises
    assert not assert_moves(shape, ops, ()).materialises


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_relayout_repeats_elements_only_where_no_movement_would_do(data):
    """If an operand of as many elements could stand above the chain, its dependence on the source would cover whole axes."""
    shape, ops, result = data.draw(chains())
    operand = data.draw(operands(result))
    dependent = np.broadcast_to(numbered(operand, 0), result)
    back = moved(numbered(shape, 0), ops)  # where each result element comes from
    above = np.empty(math.prod(shape))
    above[back.astype(int).ravel()] = dependent.ravel()
    above = above.reshape(shape)
    spanned = [axis for axis in range(len(shape)) if (above != above.take([0], axis)).any()]
    fits = math.prod(shape[axis] for axis in spanned) == math.prod(operand)
    assert pull_back(shape, ops, operand).materialises == (not fits)


@settings(max_examples=150, deadline=None)
@given(chains())
def test_simplified_chains_move_the_same(chain):
    shape, ops, _ = chain
    x = numbered(shape, 0)
    np.testing.assert_array_equal(moved(x, simplified(shape, ops)), moved(x, ops))


@pytest.mark.parametrize(
    ("shape", "ops", "operand", "steps"),
    [
        pytest.param((6, 4), [("reshape", (1, 2, 3, 4))], (4,), (), id="the last axis survives a split before it"),
        pytest.param((6, 4), [("reshape", (2, 3, 4))], (1, 4), (), id="leading ones need no step"),
        pytest.param((6, 4), [("reshape", (2, 3, 4))], (1, 1, 4), (("reshape", (4,)),), id="unless they raise the rank"),
        pytest.param((6, 4), [("reshape", (2, 3, 4))], (2, 3, 1), (("reshape", (6, 1)),), id="whole of a split axis"),
        pytest.param((4, 6), [("permute", (1, 0))], (6, 1), (("reshape", (6,)),), id="permuted vector"),
        pytest.param((2, 3, 4), [("permute", (2, 0, 1))], (4, 2, 3), (("permute", (1, 2, 0)),), id="residual through the inverse"),
        pytest.param((1, 2, 3, 4), [("permute", (0, 3, 1, 2))], (1, 4, 2, 3), (("permute", (0, 2, 3, 1)),), id="with an axis of extent 1"),
        pytest.param(
            (1, 2, 3),
            [("permute", (0, 2, 1)), ("reshape", (6,))],
            (6,),
            (("reshape", (1, 3, 2)), ("permute", (0, 2, 1))),
            id="that comes back from a merge",
        ),
        pytest.param((2, 1, 3), [("permute", (2, 1, 0))], (3, 1, 2), (("permute", (2, 1, 0)),), id="that stays in the middle"),
        pytest.param(
            (6, 4),
            [("reshape", (2, 3, 4))],
            (3, 1),
            (("reshape", (1, 3)), ("broadcast", (2, 3)), ("reshape", (6, 1))),
            id="part of a split axis",
        ),
        pytest.param((2, 3), [("reshape", (1, 6))], (6,), (("reshape", (2, 3)),), id="merged axes"),
        pytest.param(
            (2, 4),
            [("reshape", (4, 2))],
            (4, 1),
            (("reshape", (2, 2, 1)), ("broadcast", (2, 2, 2)), ("reshape", (2, 4))),
            id="atoms of both axes",
        ),
        pytest.param(
            (4, 6),
            [("reshape", (2, 12))],
            (2, 1),
            (("broadcast", (2, 2)), ("reshape", (4, 1))),
            id="repeated along the anchor's axis only",
        ),
        pytest.param(
            (6, 4), [("reshape", (4, 6))], (4, 1), (("broadcast", (4, 6)), ("reshape", (6, 4))), id="entangled axes are repeated whole"
        ),
        pytest.param((6, 5, 4), [("reshape", (2, 3, 20)), ("reshape", (2, 3, 5, 4))], (5, 1), (), id="axes merged and split again survive"),
    ],
)
def test_relayouts(shape, ops, operand, steps):
    assert assert_moves(shape, ops, operand) == Relayout(steps)


def test_equal_extents_are_not_confused():
    """H == C: bias over axis 1 of (1, C, H) must come back as C's axis, which is the last of (H, C)."""
    relayout = pull_back((3, 3), [("permute", (1, 0)), ("reshape", (1, 3, 3))], (3, 1))
    assert relayout == Relayout((("reshape", (3,)),))


def test_an_operand_that_broadcasts_up_is_an_error():
    with pytest.raises(ValueError, match="broadcasts"):
        pull_back((1, 4), [("reshape", (4, 1))], (4, 2))
    with pytest.raises(ValueError, match="broadcasts"):
        pull_back((4,), [("reshape", (2, 2))], (1, 2, 2))


def test_only_an_entangling_reshape_cuts_a_chain():
    assert len(layouts_of((6, 4), [("reshape", (2, 3, 4)), ("permute", (2, 0, 1)), ("reshape", (4, 6))])) == 1
    assert len(layouts_of((6, 4), [("reshape", (4, 6)), ("permute", (1, 0))])) == 2


def test_matched_groups_are_the_smallest():
    assert matched_groups((6, 1, 4), (2, 3, 4)) == [(range(0, 1), range(0, 2)), (range(1, 2), range(2, 2)), (range(2, 3), range(2, 3))]
    assert matched_groups((6, 4), (4, 6)) == [(range(0, 2), range(0, 2))]


@pytest.mark.parametrize(
    ("extents", "ops", "order"),
    [
        ((2, 6, 4), [], "bmn"),
        ((2, 6, 4), [("reshape", (3, 4, 4))], "bmn"),
        ((2, 6, 4), [("permute", (1, 0, 2)), ("reshape", (6, 8))], "mbn"),
        ((2, 6, 4), [("reshape", (2, 2, 3, 4)), ("permute", (1, 2, 0, 3)), ("reshape", (3, 16))], "mbn"),
        ((2, 6, 4), [("reshape", (2, 2, 3, 4)), ("permute", (1, 0, 2, 3))], None),
        ((2, 6, 4), [("reshape", (12, 4)), ("permute", (1, 0))], "nbm"),
        ((6, 6, 6), [("permute", (1, 0, 2))], "mbn"),
        ((2, 3, 4), [("reshape", (4, 6)), ("permute", (1, 0))], None),
        ((2, 3, 4), [("reshape", (4, 6)), ("reshape", (2, 3, 4)), ("permute", (1, 0, 2))], "mbn"),
        ((1, 6, 4), [("reshape", (6, 4)), ("permute", (1, 0))], "nbm"),
        ((2, 1, 4), [("permute", (0, 2, 1))], "bmn"),
        ((2, 6, 1), [("permute", (1, 0, 2)), ("reshape", (12,))], "mbn"),
        ((2, 3, 4), [("reshape", (4, 6, 1)), ("permute", (0, 2, 1))], "bmn"),
        ((1, 1, 1), [("reshape", ())], "bmn"),
    ],
)
def test_order_of_whole_axes(extents, ops, order):
    assert order_of(("b", "m", "n"), extents, ops) == (None if order is None else tuple(order))


def test_a_chain_and_its_inverse_cancel():
    there = [("reshape", (1, 2, 3, 4)), ("permute", (0, 3, 1, 2)), ("reshape", (4, 6))]
    back = pull_back((6, 4), there, (4, 6))
    assert simplified((6, 4), [*there, *back.steps]) == ()


@settings(max_examples=150, deadline=None)
@given(chains())
def test_order_of_means_a_permutation_and_a_reshape(chain):
    shape, ops, result = chain
    labels = tuple("abcde"[: len(shape)])
    order = order_of(labels, shape, ops)
    if order is not None:
        x = numbered(shape, 0)
        permuted = x.transpose([labels.index(label) for label in order])
        np.testing.assert_array_equal(moved(x, ops), permuted.reshape(result))
