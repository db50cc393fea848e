"""What the operating system and the CPU themselves say of its features: for a process that has no compiler to ask."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# LLVM's name -> the kernel's in /proc/cpuinfo, where they differ by more than "." or "-" for "_".
X86_NAMES = {
    "64bit": "lm", "bmi": "bmi1", "crc32": "sse4_2", "lzcnt": "abm", "pclmul": "pclmulqdq", "prfchw": "3dnowprefetch", "rdrnd": "rdrand",
    "sahf": "lahf_lm", "sha": "sha_ni", "sse3": "pni", "shstk": "user_shstk",
}  # fmt: skip
ARM_NAMES = {
    "crc": "crc32", "dotprod": "asimddp", "fp-armv8": "fp", "fp16fml": "asimdfhm", "fullfp16": "fphp", "lse": "atomics", "neon": "asimd",
    "rdm": "asimdrdm",
}  # fmt: skip
# LLVM's name -> (glibc's leaf of CPUID, register, bit), of what compiled kernels may make use of. Others are for LLVM to judge.
EAX, EBX, ECX, EDX = range(4)
LEAF_1, LEAF_7, LEAF_80000001, LEAF_7_1 = 0, 1, 2, 6
CPUID_BITS = {
    "sse": (LEAF_1, EDX, 25), "sse2": (LEAF_1, EDX, 26), "sse3": (LEAF_1, ECX, 0), "ssse3": (LEAF_1, ECX, 9), "fma": (LEAF_1, ECX, 12),
    "sse4.1": (LEAF_1, ECX, 19), "sse4.2": (LEAF_1, ECX, 20), "movbe": (LEAF_1, ECX, 22), "popcnt": (LEAF_1, ECX, 23),
    "avx": (LEAF_1, ECX, 28), "f16c": (LEAF_1, ECX, 29), "lzcnt": (LEAF_80000001, ECX, 5), "sse4a": (LEAF_80000001, ECX, 6),
    "bmi": (LEAF_7, EBX, 3), "avx2": (LEAF_7, EBX, 5), "bmi2": (LEAF_7, EBX, 8), "avx512f": (LEAF_7, EBX, 16),
    "avx512dq": (LEAF_7, EBX, 17), "avx512ifma": (LEAF_7, EBX, 21), "avx512cd": (LEAF_7, EBX, 28), "avx512bw": (LEAF_7, EBX, 30),
    "avx512vl": (LEAF_7, EBX, 31), "avx512vbmi": (LEAF_7, ECX, 1), "avx512vbmi2": (LEAF_7, ECX, 6), "avx512vnni": (LEAF_7, ECX, 11),
    "avx512bitalg": (LEAF_7, ECX, 12), "avx512vpopcntdq": (LEAF_7, ECX, 14), "avx512vp2intersect": (LEAF_7, EDX, 8),
    "avx512fp16": (LEAF_7, EDX, 23), "avxvnni": (LEAF_7_1, EAX, 4), "avx512bf16": (LEAF_7_1, EAX, 5),
}  # fmt: skip


class _CpuidFeature(ctypes.Structure):
    """glibc's struct cpuid_feature: EAX to EDX as CPUID gives them, and the bits among them that may be used."""

    _fields_ = [("cpuid", ctypes.c_uint32 * 4), ("active", ctypes.c_uint32 * 4)]


def confirmed() -> set[str]:
    """Features, as LLVM names them, that this process may use for certain; of others LLVM would have to be asked.

    On Linux both the operating system has to list them, which hides what it was told to, and x86 CPUs to report them, which an emulator
    changes. What CPUID says reaches us through glibc (2.33 or newer; sys/platform/x86.h), in the bits that the system saves registers of.
    LLVM itself reads the list on AArch64.
    """
    architecture, listed = platform.machine(), description()
    if architecture in ("aarch64", "arm64"):
        if sys.platform == "darwin":
            return {"neon"}  # part of that architecture
        names = listed.get("Features", "").split()
        return {feature for feature in ("neon", "sve", "sve2") if ARM_NAMES.get(feature, feature) in names}
    if "flags" not in listed:
        return set()
    return {feature for feature in _reported_by_cpuid() if not is_masked(feature, listed)}


def _reported_by_cpuid() -> set[str]:
    try:
        ask = ctypes.CDLL(None)["__x86_get_cpuid_feature_leaf"]
    except AttributeError:
        return set()
    ask.restype, ask.argtypes = ctypes.POINTER(_CpuidFeature), [ctypes.c_uint]
    return {name for name, (leaf, register, bit) in CPUID_BITS.items() if ask(leaf).contents.active[register] >> bit & 1}


@functools.cache
def description() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo; empty where there is none."""
    if not CPUINFO.exists():
        return {}
    first, _, _ = CPUINFO.read_text(errors="replace").partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def is_masked(feature: str, cpu: Mapping[str, str]) -> bool:
    """Whether the operating system lists CPU features, but not this one."""
    if "flags" in cpu:
        flags, known_as = cpu["flags"].split(), X86_NAMES.get(feature, feature.replace(".", "_"))
        return known_as.replace("_", "") not in {flag.replace("_", "") for flag in flags}
    if "Features" in cpu:
        return feature in ARM_NAMES and ARM_NAMES[feature] not in cpu["Features"].split()
    return False
