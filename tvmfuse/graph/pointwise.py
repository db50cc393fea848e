"""PointwiseToMatmul: a convolution without a window is a matmul over pixels.

Rewrite  conv2d(x (n, h, w, ci), W (co, 1, 1, ci))  ->  reshape(matmul(reshape(x, (n*h*w, ci)), W^T (ci, co)), (n, h, w, co))
         conv2d(x (n, kh, kw, ci), W (co, kh, kw, ci)), one output pixel
                                                    ->  reshape(matmul(reshape(x, (n, kh*kw*ci)), W^T), (n, 1, 1, co))
Refuses  groups, padding, a stride over more than one pixel, weights that aren't constant: these stay convolutions.
"""

from __future__ import annotations

import math

from tvm import relax
from tvm.relax import Expr

from .rewrite import Rewriter, array_of, as_pass, constant, is_static, op_name, reshape, shape_of


@as_pass
class PointwiseToMatmul(Rewriter):
    """Lower NHWC convolutions of 1x1 windows, or of windows as large as the image, to R.matmul."""

    def rewrite(self, value: Expr) -> Expr:
        if op_name(value) != "nn.conv2d" or not is_static(value) or array_of(value.args[1]) is None:
            return value
        attrs, image, kernel = value.attrs, shape_of(value.args[0]), shape_of(value.args[1])
        if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NHWC", "OHWI", "NHWC"):
            return value
        if int(attrs.groups) != 1 or any(int(width) for width in attrs.padding):
            return value
        pixelwise = kernel[1:3] == (1, 1) and shape_of(value)[1:3] == image[1:3]
        whole_image = kernel[1:3] == image[1:3]
        if not pixelwise and not whole_image:
            return value
        k = math.prod(kernel[1:])
        weights = constant(array_of(value.args[1]).reshape(kernel[0], k).T)
        pixels = self.emit(reshape(value.args[0], (math.prod(image) // k, k)))
        product = self.emit(relax.op.matmul(pixels, weights, out_dtype=attrs.out_dtype), self.name)
        return reshape(product, shape_of(value))
