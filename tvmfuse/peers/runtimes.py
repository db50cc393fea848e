"""Each runtime that a model can be timed in, ours among them: a job becomes a call that is ready to run.

Runs in a process of its own (see `child`): runtimes bring thread pools, allocators and crashes that the others shall not meet.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import platformdirs

from .double import double

Arrays = Mapping[str, np.ndarray]
COMPILE_S = 120.0  # for a runtime whose compiler is a program of its own


@dataclass(frozen=True)
class Job:
    """What to run: an .onnx file whose dimensions are bound by the shapes of `feeds`; `outputs` names its results in order."""

    model: str
    feeds: Arrays
    outputs: tuple[str, ...]
    threads: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ready:
    """`call` runs the model once on the job's feeds; `outputs` reads what it last computed.

    another  a further caller of the same model, for several threads at a time; None where the runtime's call is not made for that.
    """

    call: Callable[[], object]
    outputs: Callable[[], Arrays]
    another: Callable[[], Callable[[], object]] | None = None


def tvmfuse(job: Job) -> Ready:
    from .. import build

    session = build(job.model, shapes=_shapes(job), threads=job.threads, **job.options)

    def bound() -> tuple[Callable[[], None], dict[str, np.ndarray]]:
        results = {info.name: np.empty(info.shape, info.dtype) for info in session.get_outputs()}
        return session.bind(job.feeds, results), results

    call, outputs = bound()
    return Ready(call, lambda: outputs, lambda: bound()[0])


def float64(job: Job) -> Ready:
    """The model with next to no rounding, compiled by us; slow, and not to be timed."""
    from .. import build

    session = build(double(onnx.load(job.model)), shapes=_shapes(job), threads=job.threads, fuse="never")
    feeds = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in job.feeds.items()}
    results: dict[str, np.ndarray] = {}
    return Ready(lambda: results.update(zip(job.outputs, session.run(list(job.outputs), feeds), strict=True)), lambda: results)


def onnxruntime(job: Job) -> Ready:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = job.threads, 1
    options.log_severity_level = 3
    session = ort.InferenceSession(job.model, options, providers=["CPUExecutionProvider"])
    results = {name: ort.OrtValue.ortvalue_from_numpy(x) for name, x in zip(job.outputs, session.run(job.outputs, job.feeds), strict=True)}
    binding = session.io_binding()
    for name, x in job.feeds.items():
        binding.bind_cpu_input(name, x)
    for name, result in results.items():
        binding.bind_ortvalue_output(name, result)
    return Ready(lambda: session.run_with_iobinding(binding), lambda: {name: result.numpy() for name, result in results.items()})


def openvino(job: Job) -> Ready:
    import openvino as ov

    core = ov.Core()
    network = core.read_model(job.model)
    network.reshape({name: list(x.shape) for name, x in job.feeds.items()})
    options = {"INFERENCE_NUM_THREADS": job.threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(network, "CPU", options).create_infer_request()
    for name, x in job.feeds.items():
        request.set_tensor(name, ov.Tensor(x, shared_memory=True))
    # By the model's own names: OpenVINO's ports carry several.
    return Ready(request.infer, lambda: {name: request.get_tensor(name).data for name in job.outputs})


def mnn(job: Job) -> Ready:
    """MNN, Winograd convolutions included: it has no switch for them.

    Its converter is called past its Python front, which would install packages when it is imported.
    """
    import _tools
    import MNN

    converted = f"{job.model}.{os.getpid()}.mnn"
    arguments = ["mnnconvert", "-f", "ONNX", "--modelFile", job.model, "--MNNModel", converted, "--bizCode", "-", "--keepInputFormat=1"]
    # Recurrent steps unrolled are faster, but at many steps the unrolled form fails when it is resized.
    for attempt in ([], ["--useOriginRNNImpl"]):
        _tools.mnnconvert([*arguments, *attempt])
        interpreter = MNN.Interpreter(converted)
        session = interpreter.createSession({"numThread": job.threads, "backend": "CPU", "precision": "high"})
        inputs, outputs = interpreter.getSessionInputAll(session), interpreter.getSessionOutputAll(session)
        if all(0 not in outputs[name].getShape() for name in job.outputs):
            break
    else:
        raise ValueError("its converter makes no shapes for this model")
    caffe = MNN.Tensor_DimensionType_Caffe

    for name, x in job.feeds.items():
        inputs[name].copyFrom(MNN.Tensor(x.shape, MNN.Halide_Type_Float, x, caffe))

    def read() -> Arrays:
        results = {}
        for name in job.outputs:
            shape = outputs[name].getShape()
            host = MNN.Tensor(shape, MNN.Halide_Type_Float, np.zeros(shape, np.float32), caffe)
            outputs[name].copyToHostTensor(host)
            results[name] = np.array(host.getNumpyData()).reshape(shape)
        return results

    return Ready(lambda: interpreter.runSession(session), read)


def tract(job: Job) -> Ready:
    import tract

    if job.threads > 1:
        raise ValueError("its Python package runs on one thread")
    inference = tract.onnx().load(job.model)
    for i in range(inference.input_count()):
        inference.set_input_fact(i, f"{','.join(map(str, job.feeds[inference.input_name(i)].shape))},f32")
    inference.analyse()
    arguments = [tract.Tensor.from_numpy(job.feeds[inference.input_name(i)]) for i in range(inference.input_count())]
    runnable = inference.into_model().into_runnable()
    last: list[Any] = []

    def call() -> None:
        last[:] = runnable.run(arguments)

    return Ready(call, lambda: {name: x.to_numpy() for name, x in zip(job.outputs, last, strict=True)})


def iree(job: Job) -> Ready:
    """IREE; what its compiler makes, which takes it half a minute, is kept in the user's cache folder."""
    import iree.runtime as rt

    if job.threads > 1:
        rt.flags.parse_flags(f"--task_topology_max_group_count={job.threads}")
    config = rt.Config("local-task" if job.threads > 1 else "local-sync")
    module = rt.load_vm_modules(rt.VmModule.mmap(config.vm_instance, str(_iree_compiled(Path(job.model)))), config=config)[-1]
    entry = next(name for name in module.vm_module.function_names if "$" not in name and not name.startswith("__"))
    function = module[entry]
    arguments = [rt.asdevicearray(config.device, x) for x in job.feeds.values()]
    last: list[Any] = []

    def call() -> None:
        result = function(*arguments)
        last[:] = result if isinstance(result, tuple) else [result]

    return Ready(call, lambda: {name: x.to_host() for name, x in zip(job.outputs, last, strict=True)})


def _iree_compiled(model: Path) -> Path:
    """Raises ValueError with the reason when it can't be compiled, or not in time; that is kept too: it would cost as much again."""
    version = importlib.metadata.version("iree-base-compiler")
    folder = platformdirs.user_cache_path("tvmfuse") / "peers"
    kept = folder / f"{hashlib.sha256(model.read_bytes()).hexdigest()[:24]}-{version}.vmfb"
    failure = kept.with_suffix(".failed")
    if kept.exists():
        return kept
    if failure.exists():
        raise ValueError(f"{failure.read_text()} (to try again, delete {failure})")
    folder.mkdir(parents=True, exist_ok=True)
    imported, compiled = model.with_suffix(f".{os.getpid()}.mlir"), kept.with_suffix(f".{os.getpid()}.part")
    tools = [sys.executable, "-m", "iree.compiler.tools.import_onnx"], [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile"]
    flags = ["--iree-input-type=onnx", "--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu"]
    flags += ["--iree-llvmcpu-target-cpu=host", "--iree-opt-level=O3"]
    try:
        _run([*tools[0], str(model), "-o", str(imported), "--opset-version", "17"])
        _run([*tools[1], str(imported), "-o", str(compiled), *flags])
    except ValueError as error:
        failure.write_text(str(error)[:200])
        raise
    compiled.replace(kept)
    return kept


def tvm(job: Job) -> Ready:
    """Stock TVM, by its importer and the pipeline that `options` names; the loops that it emits run on one thread.

    "tuned" is meta_schedule with `trials` trials, tens of minutes; its records are kept in the user's cache folder and then only applied.
    """
    import tvm
    from tvm import relax

    from ..measure.host import parse_target
    from ..model.load import load

    if job.threads > 1:
        raise ValueError("its pipelines emit loops for one thread")
    target = parse_target(None)
    loaded = load(job.model, _shapes(job))
    mod, pipeline = loaded.mod, job.options["pipeline"]
    if pipeline == "tuned":
        mod, pipeline = _tuned(mod, job, target), "default"
    stock = {"default": "default", "target": relax.get_default_pipeline(target)}
    executable = tvm.compile(mod, target, relax_pipeline=stock[pipeline])
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    arguments = [tvm.runtime.tensor(job.feeds[info.name]) for info in loaded.inputs]
    last: list[Any] = []

    def call() -> None:
        result = main(*arguments)
        last[:] = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)

    return Ready(call, lambda: {info.name: x.numpy() for info, x in zip(loaded.outputs, last, strict=True)})


def _tuned(mod: Any, job: Job, target: Any) -> Any:
    """The module with the schedules that meta_schedule found best."""
    from tvm import relax

    digest, version = hashlib.sha256(Path(job.model).read_bytes()).hexdigest()[:24], importlib.metadata.version("apache-tvm")
    records = platformdirs.user_cache_path("tvmfuse") / "peers" / f"{digest}-tvm-{version}-{job.options['trials']}"
    done = records / "done"
    trials = 0 if done.exists() else job.options["trials"]
    records.mkdir(parents=True, exist_ok=True)
    tuned = relax.get_pipeline("static_shape_tuning", total_trials=trials, target=target, work_dir=str(records))(mod)
    done.touch()
    return tuned


RUNTIMES: dict[str, Callable[[Job], Ready]] = {
    run.__name__: run for run in (tvmfuse, float64, onnxruntime, openvino, mnn, tract, iree, tvm)
}


def _shapes(job: Job) -> dict[str, tuple[int, ...]]:
    return {name: x.shape for name, x in job.feeds.items()}


def _run(command: list[str]) -> None:
    """Raises ValueError with the first line that names an error, or when it takes longer than COMPILE_S."""
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", timeout=COMPILE_S)
    except subprocess.TimeoutExpired:
        raise ValueError(f"its compiler needs more than {COMPILE_S:.0f} s") from None
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
        raise ValueError(next((line for line in lines if "error:" in line.lower()), lines[-1]))
