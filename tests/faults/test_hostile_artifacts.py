"""An artifact that would fill the memory is refused before it is unpacked, and nothing that is read can be a pickle."""

from __future__ import annotations

import ast
import json
import zipfile
from pathlib import Path

import pytest

import tvmfuse
from tvmfuse.artifact import FORMAT
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
