"""An artifact that would fill the memory is refused before it is unpacked, and nothing that is read can be a pickle."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tvmfuse
from tvmfuse.artifact import FORMAT, MAX_MANIFEST_BYTES
from tvmfuse.errors import ModelError

# Each reads, or may read, objects that run code while they are made.
UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "torch"}


def artifact(path: Path, manifest: bytes, code: bytes = b"", compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("manifest.json", manifest)
        archive.writestr("model.so", code)
        archive.writestr("weights.bin", b"")
    return path


def refused(path: Path) -> str:
    with pytest.raises(ModelError, match="is not a whole tvmfuse artifact") as refusal:
        tvmfuse.load(path)
    return str(refusal.value)


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = artifact(tmp_path / "m.tvmfuse", b"{}", bytes(64 << 20), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    assert "is compressed" in refused(path)


def test_a_huge_manifest_is_not_parsed(tmp_path: Path) -> None:
    assert "manifest.json has 16777218 bytes" in refused(artifact(tmp_path / "m.tvmfuse", b"[" + b" " * (16 << 20) + b"]"))


def test_a_compressed_manifest_is_not_unpacked(tmp_path: Path) -> None:
    path = artifact(tmp_path / "m.tvmfuse", b"[" + b" " * (8 << 20) + b"]", compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    assert "manifest.json is compressed" in refused(path)


LIMITED = """
import resource, sys
from pathlib import Path
import psutil, tvmfuse.artifact
from tvmfuse.errors import ModelError

size = psutil.Process().memory_info().vms + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (size, size))
try:
    tvmfuse.artifact.load(sys.argv[1])
except ModelError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no limit of the address space")
def test_the_largest_manifest_takes_less_than_a_gib(tmp_path: Path) -> None:
    """Empty lists are what takes most for its length."""
    path = artifact(tmp_path / "m.tvmfuse", b"[" + b",".join([b"[]"] * (MAX_MANIFEST_BYTES // 3)) + b"]")
    found = subprocess.run([sys.executable, "-c", LIMITED, path], capture_output=True, text=True)
    assert found.returncode == 0 and "is not a whole tvmfuse artifact" in found.stdout, found.stderr


@pytest.mark.parametrize("manifest", [b"[" * 100_000, b"[]", b"3", b"null", b"{}", b"\xff\xfe", b'{"format": ' + b"9" * 10_000 + b"}"])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, manifest: bytes) -> None:
    refused(artifact(tmp_path / "m.tvmfuse", manifest))


@pytest.mark.parametrize("value", [None, 3, "text", [3], {"a": 3}])
def test_a_manifest_of_other_types_is_refused(tmp_path: Path, value: object) -> None:
    keys = "inputs outputs sites kernels costs threads target features toolchain views weights workspace".split()
    manifest = {"format": FORMAT, "sha256": "", **dict.fromkeys(keys, value)}
    refused(artifact(tmp_path / "m.tvmfuse", json.dumps(manifest).encode()))


def test_nothing_in_the_package_unpickles() -> None:
    package = Path(tvmfuse.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    imported = {alias.name.partition(".")[0] for alias in names}
                case ast.ImportFrom(module=str(module), level=0):
                    imported = {module.partition(".")[0]}
                case ast.Call(func=ast.Attribute(attr="load"), keywords=keywords):
                    assert not any(keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True) for keyword in keywords), path
                    continue
                case ast.Call(func=ast.Name(id="eval" | "exec")):
                    raise AssertionError(f"{path}:{node.lineno} evaluates text")
                case _:
                    continue
            assert not imported & UNPICKLERS, f"{path}:{node.lineno} imports {imported & UNPICKLERS}"
