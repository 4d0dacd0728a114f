"""One token of attention over a cache, compiled by Inductor: float as exported, float packed, and stored as integers.

    python benchmarks/decode_attention.py [--shape smollm2 --shape llama3-8b] [--length 4096 …] [--threads 1]

Every form is a program of this package: an attention with its cache as buffers, captured, converted and rewritten. They
are timed in turn, in one process; a ratio is to bf16 with packed heads, the best float form, and above 1 is faster.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from allocator import keep_memory
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import graphquant as gq
from graphquant.backends.inductor import CONTRACTED
from graphquant.loops import runnable

SHAPES = {"smollm2": (9, 3, 64), "llama3-8b": (32, 8, 128)}
"""Query heads, KV heads, head_dim."""
BASE = "bf16, packed"


class Attention(nn.Module):
    """What a layer does between its projections for one token: write to the cache, repeat the KV heads, attend."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, length: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.groups, self.length = heads // kv_heads, length
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, kv_heads, length, head_dim, dtype=dtype), persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
        """``query [1, Hq, 1, D]``, ``key`` and ``value [1, Hkv, 1, D]``, ``position [1]``."""
        joined = [cache.index_copy_(2, position, x) for cache, x in ((self.keys, key), (self.values, value))]
        repeated = [x[:, :, None].expand(-1, -1, self.groups, -1, -1).reshape(1, -1, *x.shape[2:]) for x in joined]
        mask = (torch.arange(self.length) <= position)[None, None, None]
        return nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask)


def batch(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, position: int) -> dict[str, Tensor]:
    """One token at a position."""
    generator = torch.Generator().manual_seed(position)
    sizes = {"query": heads, "key": kv_heads, "value": kv_heads}
    states = {name: torch.randn(1, n, 1, head_dim, generator=generator).to(dtype) for name, n in sizes.items()}
    return states | {"position": torch.tensor([position])}


def programs(shape: tuple[int, int, int], length: int) -> dict[str, tuple[torch.export.ExportedProgram, torch.dtype]]:
    """The program of every form, and the dtype of its inputs."""
    made = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        example = batch(*shape, dtype, 3)
        made[name] = gq.capture(Attention(*shape, length, dtype).eval(), example, dynamic_shapes=dict.fromkeys(example))
    found: dict[str, tuple[torch.export.ExportedProgram, torch.dtype]] = {
        "fp32, as exported": (made["fp32"], torch.float32),
        "fp32, packed": (gq.pack_gqa(made["fp32"]), torch.float32),
        "bf16, as exported": (made["bf16"], torch.bfloat16),
        BASE: (gq.pack_gqa(made["bf16"]), torch.bfloat16),
    }
    for bits in (8, 4):
        args = gq.QuantizationArgs(num_bits=bits, strategy="attn_head_channel")
        scheme = gq.QuantizationScheme(targets=("role:attention",), key_states=args, value_states=args)
        config = gq.QuantizationConfig(config_groups={"kv": scheme})
        calibration = gq.calibrate(
            gq.prepare(made["fp32"], config),
            [batch(*shape, torch.float32, position) for position in range(16)],
            progress=False,
        )
        stored = gq.pack_gqa(gq.convert(made["fp32"], calibration, config, kv_cache="stored"))
        folded = gq.fold_scales(stored)
        lanes = gq.fuse_decode(folded)
        found |= {
            f"int{bits} stored, packed": (stored, torch.float32),
            f"int{bits} stored, packed, folded": (folded, torch.float32),
            f"int{bits} stored, packed, folded, lanes": (lanes, torch.float32),
            f"int{bits} the same, contracted": (lanes, torch.float32),
        }
    return found


def cache_bytes(program: torch.export.ExportedProgram) -> int:
    """Bytes of the buffers that the program writes to."""
    return sum(value.nbytes for value in program.constants.values() if isinstance(value, Tensor) and value.dim() > 3)


def read_bandwidth() -> float:
    """Bytes a second of a sum over 256 MB, the best of 7."""
    data = torch.ones(64 * 2**20)
    return data.nbytes / min(seconds(data.sum) for _ in range(7))


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def run(name: str, length: int, rounds: int, bandwidth: float) -> list[dict[str, Any]]:
    """The rows of one shape and length."""
    shape, calls, sizes, outputs = SHAPES[name], {}, {}, {}
    for form, (program, dtype) in tqdm(programs(shape, length).items(), desc=f"{name} {length}", leave=False):
        torch._dynamo.reset()
        options = dict(CONTRACTED) if "contracted" in form else {}
        module = torch.compile(runnable(program), dynamic=False, options=options)
        for position in range(8):  # a cache with something in it
            outputs[form] = module(**batch(*shape, dtype, position))
        last = batch(*shape, dtype, length - 1)
        module(**last)
        calls[form], sizes[form] = (lambda module=module, last=last: module(**last)), cache_bytes(program)
    times: dict[str, list[float]] = {form: [] for form in calls}
    for _ in range(rounds):
        for form, call in calls.items():
            times[form] += [seconds(call) for _ in range(5)][1:]
    base, reference = statistics.median(times[BASE]), outputs["fp32, as exported"]
    return [
        {
            "shape": name,
            "L": length,
            "form": form,
            "µs": 1e6 * (median := statistics.median(taken)),
            "ratio": base / median,
            "cache bytes": sizes[form],
            "of read bandwidth": f"{sizes[form] / median / bandwidth:.0%}",
            "off fp32": float((outputs[form].float() - reference).abs().max() / reference.abs().max()),
        }
        for form, taken in times.items()
    ]


def side_by_side(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ratios alone, a row a form and a column a shape and length."""
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        table.setdefault(row["form"], {"form": row["form"]})[f"{row['shape']} {row['L']}"] = row["ratio"]
    return list(table.values())


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=tuple(SHAPES), action="append")
    parser.add_argument("--length", type=int, action="append")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    bandwidth = read_bandwidth()
    isa = torch.backends.cpu.get_cpu_capability()
    print(f"{options.threads} thread(s), {isa}, read bandwidth {bandwidth / 1e9:.1f} GB/s")
    with torch.no_grad():
        rows = [
            row
            for shape in options.shape or SHAPES
            for length in options.length or (1024, 4096, 16384)
            for row in run(shape, length, options.rounds, bandwidth)
        ]
    print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=("", "", "", ".0f", ".2f", "", "", ".1e")))
    print(f"\nRatios to {BASE}, {options.threads} thread(s):\n")
    print(tabulate(side_by_side(rows), headers="keys", tablefmt="github", floatfmt=".2f"))


if __name__ == "__main__":
    main()
