"""What a backend makes of the pairs: prefill of 256 tokens of SmolLM2, float against quantized, in one run.

    python benchmarks/backends.py --backend onnxruntime --backend openvino [--layers 30] [--repeats 5] [--json]

Latency is the median of runs taken in turn, as a ratio to the same backend's float program; the size is the saved
artifact's; the peak of memory is this process's while it lowered and ran, one process a program.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import graphquant as gq
from graphquant.backends import BACKENDS
from graphquant.data import batches, split_rows, token_rows, topics_text
from graphquant.models import load_model

PRESETS = ("int8-kv-tensor", "int8-kv-attn-head", "int8-qkv-proj-channel")
TOKENS = 256


def programs(layers: int) -> tuple[dict[str, torch.export.ExportedProgram], dict[str, torch.Tensor]]:
    """SmolLM2 with its first ``layers``, in float and with each preset, and a batch of 256 tokens."""
    loaded = load_model("smollm2")
    model: Any = loaded.model
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    rows, held_out = split_rows(token_rows(loaded.tokenizer, topics_text(), TOKENS), 2, 1)
    program = gq.capture(model)
    made = {"float": program}
    for name in PRESETS:
        prepared = gq.prepare(program, gq.preset(name))
        gq.calibrate(prepared, batches(rows), progress=False)
        made[name] = gq.convert(prepared)
    return made, batches(held_out)[0]


def measure(backend: str, layers: int, repeats: int) -> list[dict[str, Any]]:
    """One row a program: latency as a ratio to float, artifact size, lowering time."""
    made, batch = programs(layers)
    lowered, seconds, sizes = {}, {}, {}
    for name, program in made.items():
        start = time.perf_counter()
        lowered[name] = gq.lower(program, backend, examples=[batch], check=name != "float", tolerance=1e-2)
        seconds[name] = time.perf_counter() - start
        sizes[name] = _size(lowered[name], BACKENDS[backend].suffix)
    times: dict[str, list[float]] = {name: [] for name in lowered}
    for artifact in lowered.values():
        artifact.run(batch)  # warm up
    for _ in range(repeats):
        for name, artifact in lowered.items():
            start = time.perf_counter()
            artifact.run(batch)
            times[name].append(time.perf_counter() - start)
    base = statistics.median(times["float"])
    return [
        {
            "backend": backend,
            "program": name,
            "latency / float": statistics.median(times[name]) / base,
            "artifact MB": sizes[name] / 1e6,
            "lowered in s": seconds[name],
            "integer kernels": lowered[name].summary().integer_kernels,
            "peak RSS MB, all four": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        }
        for name in lowered
    ]


def _size(lowered: Any, suffix: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        lowered.save(Path(folder) / f"model{suffix}")
        return sum(path.stat().st_size for path in Path(folder).iterdir())


def main() -> None:
    """Print the figures, one process a backend."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="measure this one; may be given again")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    rows = []
    for backend in options.backend or list(BACKENDS):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows += pool.apply(measure, (backend, options.layers, options.repeats))
    print(json.dumps(rows) if options.json else tabulate(rows, headers="keys", floatfmt=".3g"))


if __name__ == "__main__":
    main()
