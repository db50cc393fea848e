"""How the axes of a tensor, and of what is broadcast against it, travel through reshapes and permutations.

A layout op is ("reshape", new shape) or ("permute", source axis of each result axis); a chain of them moves elements and changes none.
Axes are followed by identity, never by extent: an axis is a product of *atoms*, slowest first, and an atom is a piece of one source
axis that a reshape can split but that keeps its name wherever it goes. An axis of extent 1 has no atoms.

    (6, 4) -reshape-> (2, 3, 4) -permute (2, 0, 1)-> (4, 2, 3) -reshape-> (4, 6)
    [ab c]            [a b c]                       [c a b]               [c ab]        a = 2, b = 3, c = 4

A reshape such as (6, 4) -> (4, 6) has no common atoms. It merges the axes that it entangles into one and splits that one again, and a
chain is cut there into two layouts. So is a reshape of an empty tensor.

Source: own; the algebra is that of the factor groups in NumPy's no-copy reshape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Shape = tuple[int, ...]
LayoutOp = tuple[Literal["reshape", "permute"], tuple[int, ...]]
Step = tuple[Literal["reshape", "permute", "broadcast"], tuple[int, ...]]
Axis = tuple[int, ...]


@dataclass(frozen=True)
class Relayout:
    """What has to be done to an operand, in this order, before it is read above a layout op instead of below it."""

    steps: tuple[Step, ...] = ()

    @property
    def materialises(self) -> bool:
        """Whether elements have to be repeated: the operand spans only a part of an axis."""
        return any(kind == "broadcast" for kind, _ in self.steps)

    def apply(self, array: np.ndarray) -> np.ndarray:
        return moved(array, self.steps)


@dataclass(frozen=True)
class Layout:
    """Where each atom of a tensor's source axes stands in its result axes. `extents` are those of the atoms, in elements."""

    extents: tuple[int, ...]
    source: tuple[Axis, ...]
    result: tuple[Axis, ...]

    @staticmethod
    def of(shape: Shape) -> Layout:
        """The identity on `shape`."""
        extents = tuple(extent for extent in shape if extent != 1)
        atoms = itertools.count()
        axes = tuple(() if extent == 1 else (next(atoms),) for extent in shape)
        return Layout(extents, axes, axes)

    def shape(self, axes: tuple[Axis, ...]) -> Shape:
        return tuple(math.prod(self.extents[atom] for atom in axis) for axis in axes)

    def permute(self, axes: Sequence[int]) -> Layout:
        return Layout(self.extents, self.source, tuple(self.result[axis] for axis in axes))

    def reshape(self, shape: Shape) -> Layout | None:
        """Split atoms until the result's axes are products of whole ones; None where no split does that."""
        if 0 in shape:
            return self if shape == self.shape(self.result) else None
        extents, source = list(self.extents), self.source
        rest = list(itertools.chain.from_iterable(self.result))[::-1]
        result: list[Axis] = []
        for extent in shape:
            axis: list[int] = []
            while extent != 1:
                atom = rest.pop()
                if extents[atom] % extent == 0 and extents[atom] != extent:
                    inner = len(extents)
                    extents.append(extents[atom] // extent)
                    extents[atom] = extent
                    rest.append(inner)
                    source = tuple(tuple(x for a in old for x in ((a, inner) if a == atom else (a,))) for old in source)
                if extent % extents[atom]:
                    return None
                axis.append(atom)
                extent //= extents[atom]
            result.append(tuple(axis))
        return Layout(tuple(extents), source, tuple(result))

    def disentangle(self, shape: Shape) -> tuple[Layout, Layout]:
        """This layout with the axes merged that a reshape to `shape` entangles, and the layout that splits them again."""
        groups = matched_groups(self.shape(self.result), shape)
        merged = tuple(tuple(atom for axis in before for atom in self.result[axis]) for before, _ in groups)
        split = Layout.of(shape)
        source = tuple(tuple(atom for axis in after for atom in split.result[axis]) for _, after in groups)
        return Layout(self.extents, self.source, merged), Layout(split.extents, source, split.result)

    def steps(self) -> tuple[Step, ...]:
        """The layout in as few steps as possible: a reshape, a permutation, or a permutation before, after or between reshapes."""
        stored = [atom for axis in self.source for atom in axis]
        wanted = [atom for axis in self.result for atom in axis]
        before, after = self.shape(self.source), self.shape(self.result)
        if stored == wanted:
            return _joined(before, [("reshape", after)])
        extents = tuple(self.extents[atom] for atom in stored)
        order = tuple(stored.index(atom) for atom in wanted)
        whole, unsplit = (max(map(len, axes)) == 1 for axes in (self.source, self.result))
        if whole and unsplit and before.count(1) == after.count(1):
            units = iter([at for at, axis in enumerate(self.source) if not axis])
            return (("permute", tuple(self.source.index(axis) if axis else next(units) for axis in self.result)),)
        if whole:
            axes = sorted(range(len(before)), key=lambda axis: wanted.index(*self.source[axis]) if self.source[axis] else -1)
            return _joined(before, [("permute", tuple(axes)), ("reshape", after)])
        if unsplit:
            units = itertools.count()
            padded = (1,) * after.count(1) + extents
            axes = [after.count(1) + stored.index(*axis) if axis else next(units) for axis in self.result]
            return _joined(before, [("reshape", padded), ("permute", tuple(axes))])
        return _joined(before, [("reshape", extents), ("permute", order), ("reshape", after)])

    def pull_back(self, operand: Shape) -> tuple[Step, ...]:
        """Steps from an operand that broadcasts against the result to one of the source's rank that broadcasts against the source."""
        aligned = (1,) * (len(self.result) - len(operand)) + operand
        spanned = {atom for axis, extent in zip(self.result, aligned, strict=True) if extent != 1 for atom in axis}
        stored = [atom for axis in self.result for atom in axis if atom in spanned]
        wanted = [atom for axis in self.source for atom in axis if atom in spanned]
        steps: list[Step] = [
            ("reshape", tuple(self.extents[atom] for atom in stored)),
            ("permute", tuple(stored.index(atom) for atom in wanted)),
        ]
        whole = {atom for axis in self.source if spanned.intersection(axis) for atom in axis}
        if whole != spanned:
            parts = [atom for axis in self.source for atom in axis if atom in whole]
            steps.append(("reshape", tuple(self.extents[atom] if atom in spanned else 1 for atom in parts)))
            steps.append(("broadcast", tuple(self.extents[atom] for atom in parts)))
        steps.append(("reshape", tuple(math.prod(self.extents[a] for a in axis if a in whole) for axis in self.source)))
        return tuple(steps)


def matched_groups(before: Shape, after: Shape) -> list[tuple[range, range]]:
    """The smallest runs of axes of both shapes, in order, that hold equally many elements; all axes when there are none."""
    if 0 in before:
        return [(range(len(before)), range(len(after)))]
    groups = []
    i = j = 0
    while i < len(before) or j < len(after):
        first, second = i, j
        left = right = 1
        while left != right or (i, j) == (first, second):
            if left <= right and i < len(before):
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        groups.append((range(first, i), range(second, j)))
    return groups


def result_shape(shape: Shape, ops: Sequence[Step]) -> Shape:
    for kind, argument in ops:
        shape = tuple(shape[axis] for axis in argument) if kind == "permute" else argument
    return shape


def simplified(shape: Shape, ops: Sequence[Step]) -> tuple[Step, ...]:
    """The same movement in as few steps as this module knows: what cancels is gone, one permutation does where one can."""
    joined = _joined(shape, ops)
    if all(kind != "broadcast" for kind, _ in joined):
        layouts = layouts_of(shape, joined)
        if len(layouts) == 1:
            return min(joined, layouts[0].steps(), key=len)
    return joined


def _joined(shape: Shape, ops: Sequence[Step]) -> tuple[Step, ...]:
    """`ops` with neighbours of a kind made one, and without those that change nothing."""
    joined: list[tuple[Shape, Step]] = []
    for kind, argument in ops:
        before = shape
        shape = result_shape(shape, [(kind, argument)])
        if kind == "permute":
            moving = [axis for axis in argument if before[axis] != 1]
            if moving == sorted(moving):  # only axes of extent 1 change places
                kind, argument = "reshape", shape
        if joined and joined[-1][1][0] == kind:
            before, (_, earlier) = joined.pop()
            argument = tuple(earlier[axis] for axis in argument) if kind == "permute" else argument
        if argument != (tuple(range(len(before))) if kind == "permute" else before):
            joined.append((before, (kind, argument)))
    steps = tuple(step for _, step in joined)
    return steps if steps == tuple(ops) else _joined(joined[0][0] if joined else shape, steps)


def layouts_of(shape: Shape, ops: Sequence[Step]) -> tuple[Layout, ...]:
    """The layouts that a chain amounts to, first to last: one, and one more for each reshape that entangles axes."""
    done, current = [], Layout.of(shape)
    for kind, argument in _joined(shape, ops):
        following = current.permute(argument) if kind == "permute" else current.reshape(argument)
        if following is None:
            merged, following = current.disentangle(argument)
            done.append(merged)
        current = following
    return (*done, current)


def pull_back(shape: Shape, ops: Sequence[LayoutOp], operand: Shape) -> Relayout:
    """Move an elementwise op from below a chain of layout ops to above it.

    op(layout(x), y) -> layout(op(x, relayout(y))), the same to the bit: `relayout` only moves and repeats elements.
    Shapes   x `shape`; y `operand`, aligned from the right as NumPy does; relayout(y) the shape of x, or else no leading axes of extent 1.
    Raises   ValueError when y broadcasts the result up, so that op(layout(x), y) has not layout(x)'s shape.
    """
    result = result_shape(shape, ops)
    if np.broadcast_shapes(result, operand) != result:
        raise ValueError(f"operand {operand} broadcasts {result} up")
    steps: list[Step] = []
    current = operand
    for layout in reversed(layouts_of(shape, ops)):
        steps += layout.pull_back(current)
        current = result_shape(current, steps[-1:])
    if current != shape:
        steps.append(("reshape", _without_leading_ones(current)))
    simple = simplified(operand, steps)
    if simple == (("reshape", _without_leading_ones(operand)),) and len(operand) <= len(shape):
        simple = ()
    return Relayout(simple)


def order_of(labels: Sequence[str], extents: Sequence[int], ops: Sequence[LayoutOp]) -> tuple[str, ...] | None:
    """The order in which a chain of layout ops stores whole labelled axes, slowest first; None if it takes one of them apart.

    With it the chain is a permutation of the labelled axes followed by one reshape. A label of extent 1 stays before the label that it
    preceded, or last.

        order_of("bmn", (2, 6, 4), [("reshape", (2, 2, 3, 4)), ("permute", (1, 2, 0, 3)), ("reshape", (3, 16))]) == ("m", "b", "n")
    """
    chain = list(_joined(tuple(extents), ops))
    if chain and chain[-1][0] == "reshape":
        chain.pop()
    layouts = layouts_of(tuple(extents), chain)
    if len(layouts) != 1:
        return None
    (layout,) = layouts
    stored = [atom for axis in layout.result for atom in axis]
    order: list[str] = []
    at = 0
    while at < len(stored):
        label, axis = next((label, axis) for label, axis in zip(labels, layout.source, strict=True) if stored[at] in axis)
        if tuple(stored[at : at + len(axis)]) != axis:
            return None
        order.append(label)
        at += len(axis)
    for label, following in reversed(list(itertools.zip_longest(labels, labels[1:]))):
        if label not in order:
            order.insert(order.index(following) if following is not None else len(order), label)
    return tuple(order)


def moved(array: np.ndarray, steps: Sequence[Step]) -> np.ndarray:
    """The steps carried out; every element keeps its bits."""
    for kind, argument in steps:
        if kind == "reshape":
            array = array.reshape(argument)
        elif kind == "permute":
            array = array.transpose(argument)
        else:
            array = np.broadcast_to(array, argument)
    return array


def _without_leading_ones(shape: Shape) -> Shape:
    return tuple(itertools.dropwhile(lambda extent: extent == 1, shape))
