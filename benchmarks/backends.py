"""What a backend makes of the pairs: prefill of 256 tokens of SmolLM2, float against quantized, in one run.

    python benchmarks/backends.py --backend onnxruntime --backend openvino [--layers 30] [--repeats 10] [--json]

Each program has a process of its own, which loads the model, captures, calibrates, converts ("before lowering" is its
peak of memory by then), lowers and runs; the memory of compilers that it starts is not in its peak. The processes lower
one after the other, then all live, and are timed in turn; latency is the median of those, as a ratio to the same
backend's float program.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from smollm2 import first_layers
from tabulate import tabulate

import graphquant as gq
from graphquant.backends import BACKENDS
from graphquant.data import batches, split_rows, token_rows, topics_text

FLOAT = "float"
PRESETS = ("int8-kv-attn-head", "int8-kv-token")
TOKENS = 256


def program(name: str, layers: int) -> tuple[torch.export.ExportedProgram, dict[str, torch.Tensor]]:
    """SmolLM2 with its first ``layers``, in float or with a preset, and a batch of 256 tokens."""
    loaded = first_layers(layers)
    model = loaded.model
    rows, held_out = split_rows(token_rows(loaded.tokenizer, topics_text(), TOKENS), 2, 1)
    captured, batch = gq.capture(model), batches(held_out)[0]
    if name == FLOAT:
        return captured, batch
    prepared = gq.prepare(captured, gq.preset(name))
    gq.calibrate(prepared, batches(rows), progress=False)
    return gq.convert(prepared), batch


def serve(pipe: Connection, backend: str, name: str, layers: int) -> None:
    """Lower one program and say what it took; then run and time it whenever the parent asks."""
    made, batch = program(name, layers)
    before = _peak_mb()
    start = time.perf_counter()
    lowered = gq.lower(made, backend, examples=[batch], check=False)  # the tests check
    seconds = time.perf_counter() - start
    lowered.run(batch)
    with tempfile.TemporaryDirectory() as folder:
        lowered.save(Path(folder) / f"model{BACKENDS[backend].suffix}")
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    summary = lowered.summary()
    pipe.send(
        {
            "artifact MB": size / 1e6,
            "lowered in s": seconds,
            "peak RSS MB": _peak_mb(),
            "before lowering": before,
            "ops of its own": f"{summary.dedicated} of {summary.pairs}",
            "integer kernels": summary.integer_kernels,
        }
    )
    while pipe.recv():
        start = time.perf_counter()
        lowered.run(batch)
        pipe.send(time.perf_counter() - start)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure(backend: str, layers: int, repeats: int) -> list[dict[str, Any]]:
    """One row a program: latency as a ratio to float, artifact size, peak of memory."""
    context = multiprocessing.get_context("spawn")
    pipes, processes, facts = {}, [], {}
    for name in (FLOAT, *PRESETS):
        pipes[name], other = context.Pipe()
        processes.append(context.Process(target=serve, args=(other, backend, name, layers), daemon=True))
        processes[-1].start()
        other.close()  # so that a process which fails is an EOFError here, and no wait for ever
        facts[name] = pipes[name].recv()
    times: dict[str, list[float]] = {name: [] for name in pipes}
    for _ in range(repeats):
        for name, pipe in pipes.items():
            pipe.send(True)
            times[name].append(pipe.recv())
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(False)
        process.join()
    base = statistics.median(times[FLOAT])
    latency = {name: statistics.median(taken) / base for name, taken in times.items()}
    return [{"backend": backend, "program": name, "latency / float": latency[name], **facts[name]} for name in pipes]


def main() -> None:
    """Print the figures, backend by backend."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="measure this one; may be given again")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    rows = [
        row
        for backend in options.backend or list(BACKENDS)
        for row in measure(backend, options.layers, options.repeats)
    ]
    print(json.dumps(rows) if options.json else tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3g"))


if __name__ == "__main__":
    main()
