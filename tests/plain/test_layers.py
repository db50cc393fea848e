"""Imports point downward only, `decide` knows no TVM, and only the layers that meet a person print."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "tvmfuse"
LAYERS = (
    ("values", "errors", "files", "processors"),
    ("runtime",),
    ("model",),
    ("graph",),
    ("kernel",),
    ("measure",),
    ("decide",),
    (
        "building",
        "choose",
        "artifact",
        "linking",
        "cache",
        "callers",
        "session",
        "tuning",
        "gate",
        "explaining",
        "compare",
        "peers",
        "benching",
        "demo",
        "predicting",
    ),
    ("cli", "report", "check", "doctor", "pytest_plugin", "onnx_backend"),
    ("__main__",),
)
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
TVM_FREE = ("values", "errors", "files", "processors", "decide")
PRINTERS = ("cli", "report", "__main__")  # the last sets the streams up


def imports(source: str, module: str) -> Iterator[str]:
    """Every module that `source`, which stands at the dotted path `module` of a package, may import, in full."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def prints(source: str) -> Iterator[int]:
    """The lines on which `source` calls print or writes to a standard stream."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in ("stdout", "stderr")
            and isinstance(node.value, ast.Name)
            and node.value.id == "sys"
        ):
            yield node.lineno


def unit(module: str) -> str | None:
    """ "tvmfuse.kernel.matmul" -> "kernel"; None for what is not a unit of the package, as a name in its __init__."""
    parts = module.split(".")
    return parts[1] if parts[0] == "tvmfuse" and len(parts) > 1 and parts[1] in LEVEL else None


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found.append((".".join(parts), path))
    return found


SOURCES = [pytest.param(module, path.read_text(), id=module) for module, path in modules() if module != "tvmfuse.__init__"]


@pytest.mark.parametrize(("module", "source"), SOURCES)
def test_module_belongs_to_a_layer(module: str, source: str) -> None:
    assert unit(module) is not None, f"{module} stands in no layer of {LAYERS}"


@pytest.mark.parametrize(("module", "source"), SOURCES)
def test_imports_point_downward(module: str, source: str) -> None:
    here = unit(module)
    for imported in imports(source, module):
        there = unit(imported)
        if there is None or there == here:
            continue
        assert LEVEL[there] <= LEVEL[here], f"{module} imports {imported} from a layer above"


@pytest.mark.parametrize(("module", "source"), [s for s in SOURCES if unit(s.values[0]) in TVM_FREE])
def test_what_decides_imports_no_tvm(module: str, source: str) -> None:
    above_tvm = {u for level in LAYERS[1:6] for u in level}
    for imported in imports(source, module):
        assert imported.split(".")[0] not in ("tvm", "tvm_ffi"), f"{module} imports {imported}"
        assert unit(imported) not in above_tvm, f"{module} imports TVM through {imported}"


@pytest.mark.parametrize(("module", "source"), [s for s in SOURCES if unit(s.values[0]) not in PRINTERS])
def test_only_the_command_line_and_the_report_print(module: str, source: str) -> None:
    assert list(prints(source)) == []


def test_contributing_has_every_unit_on_its_map() -> None:
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    assert [unit for unit in LEVEL if f"`{unit}/`" not in text and f"`{unit}.py`" not in text] == []


def test_imports_resolves_relative_names() -> None:
    source = "import tvm\nfrom ..values import ISA\nfrom . import matmul\nfrom .pack import pad"
    assert list(imports(source, "tvmfuse.kernel.conv2d")) == [
        "tvm",
        "tvmfuse.values.ISA",
        "tvmfuse.kernel.matmul",
        "tvmfuse.kernel.pack.pad",
    ]


def test_prints_sees_print_and_standard_streams() -> None:
    assert list(prints("print(1)\nx = 2\nsys.stderr.write('a')")) == [1, 3]
