"""A decode step of the whole SmolLM2, compiled by Inductor: float as exported, float packed, and its cache stored.

    python benchmarks/decode_step.py [--context 4096 --context 8192] [--layers 30] [--threads 1] [--rounds 5]

Every form is compiled and timed in a process of its own, at the last position of a cache of that many tokens; a ratio
is to the float program as it was exported, and above 1 is faster.
"""

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from allocator import keep_memory
from smollm2 import cache_bytes, first_layers
from tabulate import tabulate

import graphquant as gq
from graphquant.backends.inductor import CONTRACTED
from graphquant.data import batches, split_rows, token_rows, topics_text
from graphquant.loops import runnable

FORMS = (
    "float, as exported",
    "float, packed",
    "int8 stored, lanes",
    "int4 stored, lanes",
    "int8 stored, lanes, contracted",
)


def program(form: str, context: int, layers: int) -> torch.export.ExportedProgram:
    """The decode program of a form, with a cache of ``context`` tokens."""
    loaded = first_layers(layers)
    model = loaded.model
    decode = gq.capture(model, cache="static", max_cache_len=context, sequence=1)
    if "stored" not in form:
        return gq.pack_gqa(decode) if "packed" in form else decode
    config = gq.preset("int8-kv-attn-head" if "int8" in form else "int4-kv-attn-head-channel")
    rows, _ = split_rows(token_rows(loaded.tokenizer, topics_text(), 256), 2, 1)
    calibration = gq.calibrate(gq.prepare(model, config), batches(rows), progress=False)
    stored = gq.convert(decode, calibration, config, kv_cache="stored")
    return gq.fuse_decode(gq.fold_scales(gq.pack_gqa(stored)))


def serve(pipe: Connection, form: str, context: int, layers: int, threads: int) -> None:
    """Compile one form and say the bytes of its cache; then time a step whenever the parent asks."""
    torch.set_num_threads(threads)
    keep_memory()
    made = program(form, context, layers)
    compiler = dict(CONTRACTED) if "contracted" in form else {}
    step = torch.compile(runnable(made), dynamic=False, options=compiler)
    inputs = {"input_ids": torch.tensor([[1]]), "cache_position": torch.tensor([context - 1])}
    with torch.no_grad():
        step(**inputs)
        pipe.send(cache_bytes(made))
        while pipe.recv():
            start = time.perf_counter()
            step(**inputs)
            pipe.send(time.perf_counter() - start)


def measured(context: int, layers: int, threads: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of one context length."""
    spawn = multiprocessing.get_context("spawn")
    workers, rows, times = {}, {}, {}
    for form in FORMS:
        mine, theirs = spawn.Pipe()
        workers[form] = mine
        spawn.Process(target=serve, args=(theirs, form, context, layers, threads), daemon=True).start()
        rows[form] = mine.recv()
        times[form] = []
        print(f"{form}, {context} tokens of context: compiled", flush=True)
    for _ in range(rounds):
        for form, pipe in workers.items():
            for warm in (True, False, False):  # the first step after another form's finds cold caches
                pipe.send(True)
                seconds = pipe.recv()
                times[form] += [] if warm else [seconds]
    for pipe in workers.values():
        pipe.send(False)
    base = statistics.median(times[FORMS[0]])
    return [
        {
            "context": context,
            "form": form,
            "tokens/s": 1 / (median := statistics.median(times[form])),
            "ratio": base / median,
            "cache MB": rows[form] / 1e6,
        }
        for form in FORMS
    ]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = [
        row
        for context in options.context or (4096, 8192)
        for row in measured(context, options.layers, options.threads, options.rounds)
    ]
    print(f"{options.layers} layers, {options.threads} thread(s), {torch.backends.cpu.get_cpu_capability()}")
    print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=("", "", ".2f", ".2f", ".1f")))


if __name__ == "__main__":
    main()
