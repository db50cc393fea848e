"""Relax to Relax, one pass a file. PHASES is the order in which a model goes through them."""

from __future__ import annotations

from collections.abc import Callable

from tvm.ir.transform import Pass

from .canonical import canonical
from .hoist import HoistEpilogue
from .layout import ChannelsLast
from .pointwise import PointwiseToMatmul
from .shuffle import SinkShuffle
from .simplify import Simplify

PHASES: tuple[tuple[str, Callable[[], Pass]], ...] = (
    ("canonical", canonical),
    ("layout", ChannelsLast),
    ("pointwise", PointwiseToMatmul),
    ("shuffle", SinkShuffle),
    ("hoist", HoistEpilogue),
    ("simplify", Simplify),
)
