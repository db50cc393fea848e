"""What may or may not be contracted, at LLVM's choice: products that feed a sum without a fence between them.

TVM's code generator marks most of them itself, as llvm.fmuladd; LLVM contracts the others too.
"""

from __future__ import annotations

import re

_ASSIGNED = re.compile(r"^\s*(%[\w.]+) = (?:[a-z]+ )*?(fmul|fneg|fadd|fsub) (.*)$")
_VALUE = re.compile(r"%[\w.]+")


def contractible(llvm_ir: str) -> list[str]:
    """Every llvm.fmuladd, and every fadd and fsub that reads an fmul, directly or through its negation."""
    products: set[str] = set()
    found: list[str] = []
    for line in llvm_ir.splitlines():
        if line.startswith("define"):
            products.clear()
        if " call " in line and "@llvm.fmuladd" in line:
            found.append(line.strip())
        elif match := _ASSIGNED.match(line):
            result, op, operands = match.groups()
            reads_product = not products.isdisjoint(_VALUE.findall(operands))
            if op == "fmul" or (op == "fneg" and reads_product):
                products.add(result)
            elif reads_product and op in ("fadd", "fsub"):
                found.append(line.strip())
    return found
