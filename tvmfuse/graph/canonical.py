"""The canonical form of a model: what every later pass may rely on.

After `canonical()`, of a static module as the ONNX importer makes it,
    what depends on constants alone is a constant, and what changes nothing is gone;
    batch_norm and per-channel constants are folded into the convolution or matmul before them;
    every contraction is a matmul (m, k) x (k, n) or (b, m, k) x (b, k, n), or a convolution with two spatial axes;
    one operand's data movement is reshape and permute_dims;
    Clip is clip, maximum or minimum; float16 is computed in float32.
"""

from __future__ import annotations

import tvm
from tvm import relax

from .affine import FoldAffine
from .constants import FoldConstants
from .convolution import Conv1dToConv2d, FoldPad, TrimTaps
from .einsum import EinsumToMatmul
from .half import ComputeHalfInSingle
from .matmul import CanonicalizeMatmul
from .raising import RaiseTensorIR
from .simplify import Simplify


def canonical() -> tvm.ir.transform.Pass:
    """The passes that make a module canonical, in order."""
    return tvm.transform.Sequential(
        [
            relax.transform.CanonicalizeBindings(),
            RaiseTensorIR(),
            relax.transform.DeadCodeElimination(),
            FoldConstants(),
            Simplify(),
            FoldAffine(),
            relax.transform.DecomposeOpsForInference(),  # a batch_norm of run-time parameters
            FoldPad(),
            EinsumToMatmul(),
            CanonicalizeMatmul(),
            Conv1dToConv2d(),
            TrimTaps(),
            ComputeHalfInSingle(),
            FoldConstants(),
            Simplify(),
            relax.transform.CanonicalizeBindings(),
        ],
        name="Canonical",
    )
