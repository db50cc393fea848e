"""What this machine is, and what a target can do: identity of the CPU, cache sizes, instruction set, toolchain."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import tvm_ffi
from tvm.target import Target, codegen

from .. import runtime
from ..errors import UnsupportedError, UsageError
from ..processors import default_threads
from ..values import AVX2, AVX512, ISA, NEON, Host, Machine
from .cpu import ARM_NAMES, description, is_masked

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
NEEDED = {"avx512": ("avx512f", "avx512vl", "avx512dq", "avx512bw"), "avx2": ("avx2", "fma"), "neon": ("neon",)}
ARM_IMPLEMENTERS = {0x41: "ARM", 0x46: "Fujitsu", 0x48: "HiSilicon", 0x4E: "NVIDIA", 0x51: "Qualcomm", 0x61: "Apple", 0xC0: "Ampere"}
# What compiled kernels may make use of, in LLVM's names: the rest of a CPU's features never occurs in them.
EMITTED = {"x86_64": re.compile(r"s?sse\d.*|avx.*|fma|f16c|bmi2?|lzcnt|popcnt|movbe"), "aarch64": re.compile(r"neon|sve2?")}


@functools.cache
def host() -> Host:
    """This machine's CPU, with the features that both the operating system and LLVM report."""
    cpu = description()
    l1, l2, l3 = _cache_sizes()
    vendor, family, model, stepping, name = _identity(cpu)
    return Host(vendor, family, model, stepping, tuple(sorted(_features(cpu))), l1, l2, l3, name)


def _identity(cpu: Mapping[str, str]) -> tuple[str, int, int, int, str]:
    if sys.platform == "darwin":
        numbers = [_sysctl(f"machdep.cpu.{part}") for part in ("family", "model", "stepping")]
        vendor = _sysctl("machdep.cpu.vendor") or "Apple"
        family, model, stepping = (int(n) if n.isdigit() else 0 for n in (numbers[0] or _sysctl("hw.cpufamily"), *numbers[1:]))
        return vendor, family, model, stepping, _sysctl("machdep.cpu.brand_string")

    def number(key: str) -> int:
        return int(cpu.get(key) or "0", 0)

    if "CPU implementer" in cpu:
        vendor = ARM_IMPLEMENTERS.get(number("CPU implementer"), f"implementer{number('CPU implementer'):x}")
        return vendor, number("CPU architecture"), number("CPU part"), number("CPU variant") << 4 | number("CPU revision"), _llvm_cpu()
    return cpu.get("vendor_id", "unknown"), number("cpu family"), number("model"), number("stepping"), cpu.get("model name", _llvm_cpu())


def _llvm_cpu() -> str:
    return str(tvm_ffi.get_global_func("tvm.codegen.llvm.GetHostCPUName")())


def _llvm_features() -> dict[str, bool]:
    found = tvm_ffi.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    return {str(name): bool(on) for name, on in found.items()}


def _features(cpu: Mapping[str, str]) -> set[str]:
    """LLVM's features that the operating system lists too: it leaves out what it can't save or was told to hide."""
    reported = {name for name, on in _llvm_features().items() if on} or target_features(Target({"kind": "llvm", "mcpu": _llvm_cpu()}))
    return {name for name in reported if not is_masked(name, cpu)}


def llvm_only() -> list[str]:
    """Features that LLVM finds in this CPU and the operating system doesn't list: behind a hypervisor, an illegal instruction."""
    cpu = description()
    emitted = EMITTED.get(_architecture(Target({"kind": "llvm"})))
    return sorted(f for f, on in _llvm_features().items() if on and emitted and emitted.fullmatch(f) and is_masked(f, cpu))


def _sysctl(name: str) -> str:
    return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False).stdout.strip()


def _cache_sizes() -> tuple[int, int, int]:
    """Bytes of the L1 data, L2 and L3 cache of one core; what can't be read is as in `Machine`. Without an L3, the L2 is the last level."""
    found: dict[int, int] = {}
    if sys.platform == "darwin":
        for level, name in ((1, "hw.l1dcachesize"), (2, "hw.l2cachesize"), (3, "hw.l3cachesize")):
            size = _sysctl(name.replace("hw.", "hw.perflevel0.")) or _sysctl(name)  # performance cores first, where there are two kinds
            if size.isdigit() and int(size):
                found[level] = int(size)
    for index in sorted(CACHES.glob("index*")):
        kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
        if kind != "Instruction" and (parsed := re.fullmatch(r"(\d+)([KMG]?)", size)):
            found[int(level)] = int(parsed[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[parsed[2]]
    l1, l2 = found.get(1, Machine.l1), found.get(2, Machine.l2)
    return l1, l2, found.get(3, l2 if found else Machine.l3)


def host_target(num_cores: int = 1) -> Target:
    """This CPU as LLVM knows it. What its model implies but this machine doesn't offer, as behind a hypervisor, is switched off.

    `Target.from_device` gives the model's features alone: a masked one is an illegal instruction.
    """
    known = set(_llvm_features())
    cpu = {"mcpu": _llvm_cpu(), "num-cores": num_cores}
    return _with_features(cpu, set(host().features), lambda feature: feature in known or _masked_by_name(feature))


def _with_features(cpu: Mapping[str, Any], offered: set[str], may_lack: Callable[[str], bool]) -> Target:
    """A target with what it offers, and without what LLVM takes its CPU to have besides, of what it may lack."""
    implied = target_features(Target({"kind": "llvm", **cpu}))
    attributes = [f"-{f}" for f in sorted(filter(may_lack, implied - offered))] + [f"+{f}" for f in sorted(offered - implied)]
    return Target({"kind": "llvm", **cpu, **({"mattr": attributes} if attributes else {})})


def _masked_by_name(feature: str) -> bool:
    return feature in ARM_NAMES and is_masked(feature, description())


def _architecture(target: Target) -> str:
    """ "x86_64", "aarch64" or whatever else the triple starts with."""
    triple = str(target.attrs.get("mtriple") or codegen.llvm_get_system_triple())
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(triple.split("-")[0], triple.split("-")[0])


def is_foreign(target: Target) -> bool:
    """Whether code for this target needs another architecture's linker."""
    return _architecture(target) != _architecture(Target({"kind": "llvm"}))


def is_this_cpu(target: Target) -> bool:
    """Whether a target names this machine's CPU."""
    return target.attrs.get("mcpu") == _llvm_cpu() and not is_foreign(target)


def target_features(target: Target) -> set[str]:
    """What LLVM may use when it compiles for a target."""
    return {str(feature) for feature in codegen.llvm_get_cpu_features(target)}


def isa_among(features: Collection[str]) -> ISA | None:
    """The widest instruction set of ours that these features of one CPU make up."""
    return next((isa for isa in (AVX512, AVX2, NEON) if all(feature in features for feature in NEEDED[isa.name])), None)


def isa_of(target: Target) -> ISA:
    """The widest instruction set of ours that a target has.

    Raises UnsupportedError, naming what is missing: without fused multiply-add the same bits can't be had.
    """
    if target.kind.name != "llvm":
        raise UnsupportedError(f"target kind {target.kind.name!r}: only llvm targets, CPUs, are supported")
    architecture = _architecture(target)
    if architecture not in ("x86_64", "aarch64"):
        raise UnsupportedError(f"architecture {architecture}: only x86-64 with AVX2 and FMA, and AArch64 with NEON, are supported")
    features = target_features(target)
    for isa in (AVX512, AVX2) if architecture == "x86_64" else (NEON,):
        missing = [f for f in NEEDED[isa.name] if f not in features]
        if not missing:
            return isa
    cpu = target.attrs.get("mcpu", "generic")
    raise UnsupportedError(f"target {cpu} lacks {', '.join(missing)}: fused multiply-add on vectors is required")


def recorded_target(recorded: Host) -> Target:
    """A target for a CPU that isn't here, from what its records say: its features, and its name where that is LLVM's.

    Its system is taken for macOS if the CPU is Apple's, else for Linux. Features that this LLVM doesn't know, as another release wrote
    them, are left out. On x86 the name is the CPU's brand, not LLVM's: instructions are scheduled as for any CPU with these features.
    Raises UnsupportedError when the features are none of ours.
    """
    isa = isa_among(recorded.features)
    if isa is None:
        raise UnsupportedError(f"the CPU {recorded.name or recorded.key} has no instruction set of ours")
    architecture = "aarch64" if isa == NEON else "x86_64"
    system = "apple-darwin" if recorded.vendor == "Apple" else "unknown-linux-gnu"
    triple = {"mtriple": f"{architecture}-{system}"} if architecture != _architecture(Target({"kind": "llvm"})) else {}
    cpu = {"mcpu": recorded.name} if recorded.name and codegen.llvm_is_valid_cpu(recorded.name, architecture) else {}
    offered = set(recorded.features)
    known = target_features(Target({"kind": "llvm", **triple, "mattr": [f"+{f}" for f in sorted(offered)]}))
    return _with_features({**triple, **cpu}, offered & known, lambda feature: bool(EMITTED[architecture].fullmatch(feature)))


def required_features(target: Target) -> tuple[str, ...]:
    """The features, named as in `Host.features`, that a CPU needs to run what is compiled for this target."""
    emitted = EMITTED[_architecture(target)]
    return tuple(sorted(f for f in target_features(target) if emitted.fullmatch(f)))


def machine(target: Target, threads: int, device: Host | None = None) -> Machine:
    """What schedules depend on. Without a device, cache sizes are this host's when the target is this CPU, else those of `Machine`."""
    isa = isa_of(target)
    if device:
        return Machine(isa, device.l1, device.l2, device.l3, threads)
    if is_this_cpu(target):
        here = host()
        return Machine(isa, here.l1, here.l2, here.l3, threads, default_threads())
    return Machine(isa, threads=threads)


def parse_target(target: Mapping[str, Any] | Target | None) -> Target:
    """A checked target; None is this CPU.

    TVM itself takes an unknown CPU for "generic" with a line on stderr, ignores unknown features and crashes on an unknown triple.
    Raises   UsageError for what LLVM doesn't know, UnsupportedError as `isa_of`.
    """
    if target is None:
        return host_target()
    try:
        parsed = target if isinstance(target, Target) else Target(dict(target))
    except (ValueError, TypeError) as error:
        raise UsageError(f"target {target!r}: {error}") from None
    if parsed.kind.name == "llvm":
        _check_llvm(parsed)
    isa_of(parsed)
    return parsed


def _check_llvm(target: Target) -> None:
    architecture, cpu = _architecture(target), target.attrs.get("mcpu")
    if architecture not in map(str, codegen.llvm_get_targets()):
        raise UsageError(f"target: LLVM doesn't know the triple {target.attrs['mtriple']!r}")
    if cpu is not None and not codegen.llvm_is_valid_cpu(str(cpu), architecture):
        raise UsageError(f"target: LLVM doesn't know the CPU {str(cpu)!r} for {architecture}")
    for attribute in map(str, target.attrs.get("mattr") or ()):
        switched_on = Target({"kind": "llvm", "mtriple": f"{architecture}-unknown-linux-gnu", "mattr": [f"+{attribute[1:]}"]})
        if attribute[:1] not in ("+", "-") or attribute[1:] not in target_features(switched_on):
            raise UsageError(f"target: {attribute!r} is not '+' or '-' and a feature that LLVM knows for {architecture}")


def toolchain() -> dict[str, str]:
    """Versions that decide what code a kernel becomes."""
    try:
        own = importlib.metadata.version("tvmfuse")
    except importlib.metadata.PackageNotFoundError:
        own = "unknown"
    return {"tvmfuse": own, **runtime.versions(), "llvm": str(codegen.llvm_version_major())}
