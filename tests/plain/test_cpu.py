"""CPU features without a compiler to ask: what the operating system and the CPU both say."""

from __future__ import annotations

import ctypes
import platform
import sys

import pytest

from tvmfuse.measure import cpu

INTEL = {"flags": "fpu sse sse2 pni ssse3 fma sse4_1 avx f16c bmi1 avx2 bmi2 abm avx512f avx512_bf16"}


@pytest.fixture
def x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(cpu, "description", lambda: INTEL)
    monkeypatch.setattr(cpu, "_reported_by_cpuid", lambda: set(cpu.CPUID_BITS))


@pytest.mark.usefixtures("x86")
def test_features_are_listed_under_the_kernels_names() -> None:
    same = {"sse", "sse2", "ssse3", "fma", "avx", "f16c", "avx2", "bmi2", "avx512f"}
    assert cpu.confirmed() == {*same, "sse3", "sse4.1", "bmi", "lzcnt", "avx512bf16"}


@pytest.mark.usefixtures("x86")
def test_what_the_operating_system_hides_is_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "description", lambda: {"flags": "fma avx avx2"})
    assert cpu.confirmed() == {"fma", "avx", "avx2"}


@pytest.mark.usefixtures("x86")
def test_what_an_emulated_cpu_lacks_is_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulator may show the list of the CPU that it runs on."""
    monkeypatch.setattr(cpu, "_reported_by_cpuid", lambda: {"fma", "avx", "avx2"})
    assert cpu.confirmed() == {"fma", "avx", "avx2"}


@pytest.mark.usefixtures("x86")
@pytest.mark.parametrize("listed", [{}, {"Features": "fp asimd sve"}], ids=["nothing", "another architecture's"])
def test_without_a_list_nothing_is_confirmed(monkeypatch: pytest.MonkeyPatch, listed: dict[str, str]) -> None:
    monkeypatch.setattr(cpu, "description", lambda: listed)
    assert cpu.confirmed() == set()


@pytest.mark.parametrize(
    ("system", "listed", "expected"),
    [
        ("linux", {"Features": "fp asimd evtstrm aes sve"}, {"neon", "sve"}),
        ("linux", {"Features": "fp evtstrm"}, set()),
        ("linux", INTEL, set()),
        ("darwin", {}, {"neon"}),
    ],
)
def test_aarch64(monkeypatch: pytest.MonkeyPatch, system: str, listed: dict[str, str], expected: set[str]) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(cpu, "description", lambda: listed)
    assert cpu.confirmed() == expected


class LibraryWithoutFunctions:
    def __getitem__(self, name: str) -> object:
        raise AttributeError(name)


def test_a_c_library_that_cannot_be_asked_confirms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: LibraryWithoutFunctions())
    assert cpu._reported_by_cpuid() == set()
