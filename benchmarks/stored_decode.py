"""Whether a stored cache decodes what the fake-quant program decodes, and what it weighs: SmolLM2, step by step.

    python benchmarks/stored_decode.py [--preset int8-kv-attn-head --preset int4-kproj-v] [--prefill 200] [--steps 64]

The programs are the same capture with a static cache, converted from one calibration: one with quantize/dequantize
pairs and a float cache, one with codes in the cache. Both are given the same tokens, in the same steps. Of the lanes
that fuse_decode makes the steps alone are compared, which go on from the prefill of the stored one.
"""

import argparse
from statistics import median
from typing import Any

import torch
from smollm2 import cache_bytes, first_layers
from tabulate import tabulate
from tqdm import tqdm

import graphquant as gq
from graphquant.data import batches, split_rows, token_rows, topics_text
from graphquant.loops import runnable

PRESETS = ("int8-kv-attn-head", "int8-kv-token", "int4-kv-attn-head-channel", "int4-kproj-v")


def compared(
    model: Any, decode: torch.export.ExportedProgram, preset: str, rows: list[Any], tokens: torch.Tensor, prefill: int
) -> dict[str, Any]:
    """The row of one preset."""
    config = gq.preset(preset)
    calibration = gq.calibrate(gq.prepare(model, config), batches(rows), progress=False)
    stored = gq.convert(decode, calibration, config, kv_cache="stored")
    pairs, codes = (runnable(program) for program in (gq.convert(decode, calibration, config), stored))
    lanes, off, off_lanes, same = in_lanes(stored), [], [], 0
    steps = [(0, prefill), *((start, start + 1) for start in range(prefill, tokens.shape[1]))]
    for start, end in tqdm(steps, desc=preset, unit="step", leave=False):
        inputs = {"input_ids": tokens[:, start:end], "cache_position": torch.arange(start, end)}
        expected, found = (module(**inputs)[:, -1] for module in (pairs, codes))
        off.append(difference(found, expected))
        same += int(torch.equal(found.argmax(-1), expected.argmax(-1)))
        if lanes is None:
            continue
        if start:
            off_lanes.append(difference(lanes(**inputs)[:, -1], expected))
        else:
            gq.carry_caches(codes, lanes)
    held, floats = (cache_bytes(program) for program in (stored, decode))
    return {
        "preset": preset,
        "steps": len(steps),
        "largest relative difference": f"{max(off):.1e}",
        "same next token": f"{same} of {len(steps)}",
        "of lanes, median and largest": f"{median(off_lanes):.1e}, {max(off_lanes):.1e}" if off_lanes else "none",
        "cache bytes": held,
        "of bf16": f"{held / (floats / 2):.4f}",
        "of fp32": f"{held / floats:.4f}",
    }


def in_lanes(stored: torch.export.ExportedProgram) -> Any:
    """The step in lanes; None where keys are stored before rotary embedding, which lanes do not take."""
    if not any(row.site.endswith("key_states") for row in gq.report(stored).rows):
        return None
    return runnable(gq.fuse_decode(gq.fold_scales(gq.pack_gqa(gq.specialize(stored, sequence=1)))))


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest of a step's logits, by the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", action="append", help=f"as often as wanted; {', '.join(PRESETS)} otherwise")
    parser.add_argument("--prefill", type=int, default=200)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--layers", type=int, default=30)
    options = parser.parse_args()
    loaded = first_layers(options.layers)
    model = loaded.model
    length = options.prefill + options.steps
    rows, held_out = split_rows(token_rows(loaded.tokenizer, topics_text(), max(256, length)), 2, 1)
    tokens = batches(held_out)[0]["input_ids"][:1, :length]
    decode = gq.capture(model, cache="static", max_cache_len=length)
    with torch.no_grad():
        made = [compared(model, decode, name, rows, tokens, options.prefill) for name in options.preset or PRESETS]
    print(tabulate(made, headers="keys", tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
