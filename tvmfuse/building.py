"""Compile a model: load, bring to canonical form, hoist, find sites, choose, lower, and build the virtual machine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import vm_build
from tvm.s_tir.stmt import SBlock

from . import cache, graph
from .artifact import Manifest, Program
from .choose import Chooser, Fuse
from .decide.log import Log
from .errors import UsageError
from .graph.sites import FoundSite, find_sites, recurrences
from .kernel import why_not_relaxed
from .kernel.cost import costs
from .kernel.generic import lower_generic
from .kernel.lower import lower_sites
from .kernel.memory import memory_as_parameters
from .kernel.outputs import outputs_as_parameters, own_outputs
from .measure.host import host, is_this_cpu, machine, parse_target, recorded_target, required_features, toolchain
from .measure.remote import Identity, identify
from .model.load import Loaded, load
from .predicting import predictor
from .processors import default_threads
from .session import Session
from .values import Conv2d, Host, Machine, Numerics, Site

# Passes of TVM's lowering that find nothing in this package's kernels, and take a quarter of its time: what is for GPUs and the like, and
# what is for blocks, of which scheduled kernels have only an empty root.
FOR_DEVICES = (
    "s_tir.LowerCrossThreadReduction", "s_tir.LiftThreadBinding", "s_tir.ManifestSharedMemoryLocalStage", "s_tir.LowerAutoCopy",
    "s_tir.UnifyThreadBinding", "s_tir.InjectPermutedLayout", "s_tir.InjectSoftwarePipeline", "s_tir.TransformMmaBufferLayout",
    "s_tir.InjectVirtualThread", "s_tir.InjectDoubleBuffer", "s_tir.ThreadSync", "s_tir.InferFragment", "s_tir.LowerThreadAllreduce",
    "s_tir.MergeSharedMemoryAllocations", "s_tir.LowerVtcmAlloc",
)  # fmt: skip
FOR_BLOCKS = ("s_tir.CompactBufferAllocation",)

Dump = Callable[[str, tvm.IRModule], None]


@dataclass(frozen=True)
class Plan:
    """For which CPU a model is compiled, and who chooses its candidates."""

    target: tvm.target.Target
    machine: Machine
    chooser: Chooser


def plan_for(
    target: Any,
    threads: int | None,
    fuse: Fuse,
    logs: str | os.PathLike[str] | None,
    numerics: Numerics = "exact",
    device: Identity | None = None,
    host_key: str | None = None,
) -> Plan:
    """The arguments of `build` that say for what and how, checked; `device`, or a host of the log, takes the place of this host.

    Raises UsageError or UnsupportedError.
    """
    if device and (target is not None or host_key is not None):
        other = "a host of the log" if target is None else "a target"
        raise UsageError(f"{other} and a device over RPC, which has its own, don't go together; give one of them")
    log = (Log([logs]) if logs is not None else Log.shipped_and_own()) if fuse == "measured" or host_key is not None else None
    if log and log.damage:
        first = f"{len(log.damage)} damaged lines of the tuning log are skipped, the first at {log.damage[0]}"
        warnings.warn(
            f"{first} (a writer was killed, or the file was edited); `tvmfuse log compact --into {log.damage[0].path.parent}` drops them",
            stacklevel=3,
        )
    if log and host_key is not None:
        device = recorded_device(log, host_key, target)
    if threads is None:
        threads = device.processors if device else default_threads()
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise UsageError(f"threads={threads!r} has to be a positive number")
    compiled_for = parse_target(device.target if device else target)
    for_machine = machine(compiled_for, threads, device.host if device else None)
    here = device.host if device else host() if is_this_cpu(compiled_for) else None
    known = log if fuse == "measured" else None
    return Plan(compiled_for, for_machine, Chooser(fuse, for_machine, known, here, toolchain(), predictor, numerics=numerics))


def recorded_device(log: Log, key: str, target: Any = None) -> Identity:
    """A CPU that needn't be here, as the log's records know it, with the most threads that were measured there.

    target  how LLVM is to know it; None derives that from the records. Raises UsageError or UnsupportedError.
    """
    known: dict[str, tuple[Host, int]] = {}
    for there, counts in log.hosts().items():  # one key may have been written with several names or caches: the newest holds
        newest, most = known.get(there.key, (there, 0))
        known[there.key] = newest, max(most, *counts)
    if key not in known:
        listed = ", ".join(f"{each} ({there.name})" if there.name else each for each, (there, _) in sorted(known.items())) or "none"
        raise UsageError(f"the log has no records of a host {key!r}; hosts that it has: {listed}")
    there, threads = known[key]
    compiled_for = parse_target(target if target is not None or key == host().key else recorded_target(there))
    if missing := sorted(set(required_features(compiled_for)) - set(there.features)):
        raise UsageError(f"the target has {', '.join(missing)}, which host {key} ({there.name}) lacks; leave it out, or name that CPU")
    return Identity(there, compiled_for, threads, complete=True)


@dataclass(frozen=True)
class Prepared:
    """A model up to the point where choices are needed: what `build`, `tune` and `explain` share.

    hoistable  the module before HoistEpilogue, in which what it refuses can be seen.
    """

    loaded: Loaded
    hoistable: tvm.IRModule
    mod: tvm.IRModule
    sites: list[FoundSite]


def prepare(model: Any, shapes: Mapping[str, Any] | None = None, dump: Dump | None = None) -> Prepared:
    """Load a model and run every graph pass over it; nothing is compiled."""
    loaded = load(model, shapes)
    mod = loaded.mod
    if dump:
        dump("load", mod)
    hoistable = mod
    for name, phase in graph.PHASES:
        hoistable = mod if name == "hoist" else hoistable
        mod = phase()(mod)
        if dump:
            dump(name, mod)
    return Prepared(loaded, hoistable, mod, find_sites(mod["main"], recurrences(mod)))


def build(
    model: Any,
    shapes: Mapping[str, Any] | None = None,
    target: Any = None,
    threads: int | None = None,
    fuse: Fuse = "measured",
    logs: str | os.PathLike[str] | None = None,
    numerics: Numerics = "exact",
    dump_ir: str | os.PathLike[str] | None = None,
    rpc: str | None = None,
    host: str | None = None,
) -> Session:
    """Compile a model for one CPU, or find it in the cache of compiled models. Never measures.

    model     path to a .onnx file, an onnx.ModelProto or a Relax IRModule.
    shapes    binds free dimensions ({"S": 1}) or whole inputs ({"x": (1, 3, 224, 224)}).
    target    None for this CPU with its features; a dict or tvm Target for what it says. Records count where its mcpu is this CPU's.
    threads   how many threads one call uses; None for all processors of this process.
    fuse      "measured" (the log's decisions, else a prediction from them, else the default), "always" or "never".
    logs      folder of tuning records; None for the shipped ones and the user's own.
    numerics  "exact": the bits depend on the model, its shapes and the input alone. "relaxed": 3x3 convolutions may also be computed by
              Winograd's algorithm where it was measured, or else is predicted, to be faster; session.sites says where.
    dump_ir   folder to which the module is written after each phase.
    rpc       "host:port/key" of a TVM RPC tracker: compile for the device that has registered there, with its records.
    host      key of a host that the log has records of, as its file is called: compile for that CPU, which needn't be here, with them.
              A target then only says how LLVM is to know that CPU: on x86 the records don't, so that without one instructions are
              scheduled as for any CPU with its features. threads None are the most that were measured there.
    Raises    UsageError, ModelError or UnsupportedError, each saying what, where and what to do; DeviceLost without such a device.
    """
    plan = plan_for(target, threads, fuse, logs, numerics, identify(rpc) if rpc else None, host)
    dump = _dumper(Path(dump_ir)) if dump_ir is not None else None
    log = plan.chooser.log.fingerprint() if plan.chooser.log else None
    cached = target is None and rpc is None and host is None and dump is None
    key = cache.key(model, shapes, plan.machine, fuse, numerics, log) if cached else None
    if key is not None and (kept := cache.find(key)) is not None:
        return Session(kept)
    session = compile_model(prepare(model, shapes, dump), plan, plan.chooser, dump)
    kept = cache.keep(session.program, key) if key is not None else None
    return Session(kept) if kept is not None else session


def compile_model(prepared: Prepared, plan: Plan, chooser: Chooser, dump: Dump | None = None) -> Session:
    """From chosen candidates to code."""
    lowered = lower_sites(prepared.mod, prepared.sites, chooser, plan.machine)
    if dump:
        dump("schedule", lowered.mod)
    mod = outputs_as_parameters(lower_generic(own_outputs(lowered.mod), plan.machine))
    if dump:
        dump("generic", mod)
    launched = tuple(costs(mod, lowered.anchors))
    with plan.target:
        mod, memory = memory_as_parameters(lowered_pipeline()(mod))
    if dump:
        dump("memory", mod)
    manifest = Manifest(
        inputs=prepared.loaded.inputs,
        outputs=prepared.loaded.outputs,
        sites=tuple(described(site, chooser) for site in prepared.sites),
        kernels=lowered.kernels,
        costs=launched,
        threads=plan.machine.threads,
        target=str(plan.target),
        features=required_features(plan.target),
        toolchain=toolchain(),
        views=memory.views,
        weights=tuple(array.nbytes for array in memory.weights),
        workspace=memory.workspace,
    )
    return Session(Program(manifest, _executable(mod, plan.target).mod, memory.weights))


def _executable(mod: tvm.IRModule, target: tvm.target.Target) -> relax.VMExecutable:
    """relax.build for a module in VM code, with main twice: compiled, and as `traced` in code that a virtual machine interprets."""
    builder = relax.ExecBuilder()
    kernels = vm_build._vmcodegen(builder, mod, "compiled")
    traced = tvm.IRModule({tvm.ir.GlobalVar("traced"): mod["main"].with_attr("global_symbol", "traced")})
    vm_build._vmcodegen(builder, traced, "bytecode")
    functions = vm_build._filter_tir(kernels)
    with tvm.transform.PassContext(disabled_pass=idle_passes(functions)):
        return vm_build._vmlink(builder, target, functions)


def idle_passes(functions: tvm.IRModule) -> list[str]:
    """Those that would leave every function as it is."""
    blocks: list[SBlock] = []
    for func in functions.functions.values():
        tvm_ffi.structural_walk(func.body, ((SBlock,), blocks.append))
    return [*FOR_DEVICES, *(FOR_BLOCKS if all(not block.iter_vars and not block.alloc_buffers for block in blocks) else ())]


def lowered_pipeline() -> Any:
    """What TVM's default build pipeline does to a module that is lowered already: views, memory planning, VM code."""

    @tvm.transform.module_pass(opt_level=0, name="tvmfuse.build")
    def pipeline(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return tvm.transform.Sequential(
            [
                relax.transform.RewriteDataflowReshape(),
                relax.transform.ToNonDataflow(),
                relax.transform.RemovePurityChecking(),
                relax.transform.CallTIRRewrite(),
                relax.transform.StaticPlanBlockMemory(),
                relax.transform.LowerAllocTensor(),
                relax.transform.KillAfterLastUse(),
                relax.transform.LowerRuntimeBuiltin(),
                relax.transform.ComputePrimValue(),
                relax.transform.VMShapeLower(),
                relax.transform.AttachGlobalSymbol(),
            ]
        )(mod)

    return pipeline


def pipeline(
    target: Any = None,
    threads: int = 1,
    fuse: Fuse = "measured",
    logs: str | os.PathLike[str] | None = None,
    numerics: Numerics = "exact",
) -> tvm.transform.Pass:
    """tvmfuse as a Relax pipeline: tvm.compile(mod, target, relax_pipeline=tvmfuse.pipeline(target)).

    mod's function main is one dataflow block of static shapes; what is to be packed or folded (weights) has to be bound to it as
    constants before, as with relax.transform.BindParams. Other arguments as for `build`.
    """
    plan = plan_for(target, threads, fuse, logs, numerics)

    @tvm.transform.module_pass(opt_level=0, name="tvmfuse")
    def lower(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        for _, phase in graph.PHASES:
            mod = phase()(mod)
        lowered = lower_sites(mod, find_sites(mod["main"], recurrences(mod)), plan.chooser, plan.machine)
        return lowered_pipeline()(lower_generic(lowered.mod, plan.machine))

    return lower


def described(site: FoundSite, chooser: Chooser) -> Site:
    """What a person is told of a site."""
    choice, convolution = chooser.choice(site.workload), isinstance(site.workload.anchor, Conv2d)
    fused = bool(site.workload.epilogue.steps)
    return Site(
        name=site.name,
        anchor=str(site.workload.anchor),
        epilogue=site.ops,
        crossed=site.crossed,
        placement=choice.candidate.placement if fused else None,
        cut=choice.candidate.cut,
        source=choice.source,
        reason=site.reason,
        workload=site.workload,
        ratio=choice.ratio,
        ci=choice.ci,
        algorithm=choice.candidate.algorithm,
        relative_error=choice.relative_error,
        why_not_relaxed=why_not_relaxed(site.workload) if convolution and chooser.numerics == "relaxed" else None,
    )


def _dumper(folder: Path) -> Dump:
    folder.mkdir(parents=True, exist_ok=True)
    counter = iter(range(1000))

    def dump(name: str, mod: tvm.IRModule) -> None:
        (folder / f"{next(counter):02d}_{name}.py").write_text(mod.script(show_meta=False))

    return dump
