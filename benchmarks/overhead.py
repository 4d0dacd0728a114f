"""What graphquant itself costs, as ratios taken in one run (the machine's own speed cancels).

    python benchmarks/overhead.py [--repeats 5] [--json]

- prepare and convert of SmolLM2's 30-layer graph, seconds, and of a 60-layer graph against a 30-layer one of the same
  widths: 2.0 is linear;
- calibration against the plain forward of the captured graph on the same batches, taken in turn, by wall time.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable

import torch
from tabulate import tabulate
from tqdm import tqdm

import graphquant as gq
from graphquant.data import batches, split_rows, token_rows, topics_text
from graphquant.models import load_model

CONFIG = gq.preset("int8-qkv-attn-head")


def timed(call: Callable[[], object]) -> float:
    """Wall seconds of one call, garbage collected before it."""
    gc.collect()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def random_llama(layers: int) -> torch.export.ExportedProgram:
    """A captured Llama of SmolLM2's head counts and small widths: the graph of a real one, without its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=72, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=128, head_dim=8,
    )  # fmt: skip
    return gq.capture(LlamaForCausalLM(config).eval())


def passes(program: torch.export.ExportedProgram, repeats: int) -> dict[str, float]:
    """Median seconds of prepare and of convert."""
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "attention_mask": torch.ones(1, 8, dtype=torch.int64)}
    prepared = gq.prepare(program, CONFIG)
    gq.calibrate(prepared, [batch], progress=False)
    return {
        "prepare": statistics.median(timed(lambda: gq.prepare(program, CONFIG)) for _ in range(repeats)),
        "convert": statistics.median(timed(lambda: gq.convert(prepared)) for _ in range(repeats)),
    }


def calibration_ratio(program: torch.export.ExportedProgram, tokenizer: object, repeats: int) -> list[float]:
    """Calibration over plain forward, one ratio a pair; the order within a pair alternates."""
    rows, _ = split_rows(token_rows(tokenizer, topics_text(), 256), 2, 0)  # type: ignore[arg-type]
    data = batches(rows)
    plain = program.module()
    prepared = gq.prepare(program, CONFIG)

    def forward() -> None:
        with torch.no_grad():
            for batch in data:
                plain(**batch)

    def calibrate() -> None:
        gq.calibrate(prepared, data, progress=False)

    forward(), calibrate()  # warm up
    ratios = []
    for index in tqdm(range(repeats), desc="calibration pairs", delay=2.0, leave=False):
        first, second = (forward, calibrate) if index % 2 else (calibrate, forward)
        times = {first: timed(first), second: timed(second)}
        ratios.append(times[calibrate] / times[forward])
    return ratios


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=30, help="of the random models; the second has twice as many")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    loaded = load_model("smollm2")
    program = gq.capture(loaded.model)
    real = passes(program, options.repeats)
    ratios = calibration_ratio(program, loaded.tokenizer, options.repeats)
    thirty, sixty = (passes(random_llama(options.layers * times), options.repeats) for times in (1, 2))
    figures = {
        "prepare, SmolLM2 30 layers, s": real["prepare"],
        "convert, SmolLM2 30 layers, s": real["convert"],
        f"prepare, {2 * options.layers} layers / {options.layers} layers": sixty["prepare"] / thirty["prepare"],
        f"convert, {2 * options.layers} layers / {options.layers} layers": sixty["convert"] / thirty["convert"],
        "calibration / plain forward, median": statistics.median(ratios),
        "calibration / plain forward, min": min(ratios),
        "calibration / plain forward, max": max(ratios),
    }
    print(
        json.dumps(figures) if options.json else tabulate(figures.items(), headers=("figure", "value"), floatfmt=".3f")
    )


if __name__ == "__main__":
    main()
