"""Perplexity of SmolLM2-135M for every strategy, one site at a time: one calibration, no data pass per cell.

python examples/strategy_table.py                              prints the table (about 6 minutes on 2 cores)
python examples/strategy_table.py --write docs/strategies.md   and puts it between the file's markers
"""

import argparse
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from markers import BEGIN, WRITE_HELP, has_markers, put_between_markers
from tabulate import tabulate
from tqdm import tqdm

import graphquant as gq
from graphquant.data import batches, split_rows, token_rows, topics_text
from graphquant.models import load_model

FORMATS = {"int8 sym": (8, True), "int8 asym": (8, False), "int4 sym": (4, True), "int4 asym": (4, False)}
STATES = ("query_states", "key_states", "value_states")
PROJECTIONS = ("role:q_proj", "role:k_proj", "role:v_proj")


@dataclass(frozen=True)
class Row:
    """Sites quantized together with one strategy."""

    label: str
    sites: tuple[str, ...]
    strategy: str

    def config(self, num_bits: int, symmetric: bool) -> gq.QuantizationConfig:
        """The row's configuration in one number format."""
        args = gq.QuantizationArgs(num_bits=num_bits, symmetric=symmetric, strategy=self.strategy)
        if self.sites[0] in STATES:
            states = dict.fromkeys(self.sites, args)
            scheme = gq.QuantizationScheme(targets=("role:attention",), **states)
        else:
            scheme = gq.QuantizationScheme(targets=self.sites, output_activations=args)
        return gq.QuantizationConfig(config_groups={"row": scheme})


def table_rows() -> list[Row]:
    """The rows of the table, in its order."""
    key = [Row(f"key_states {s}", ("key_states",), s) for s in ("tensor", "attn_head", "channel", "attn_head_channel")]
    value = [
        Row(f"value_states {s}", ("value_states",), s) for s in ("tensor", "attn_head", "channel", "attn_head_channel")
    ]
    return [
        *key,
        Row("k_proj.output channel", ("role:k_proj",), "channel"),
        *value,
        Row("q/k/v_proj.output channel", PROJECTIONS, "channel"),
        Row("query/key/value_states attn_head", STATES, "attn_head"),
    ]


class Bench:
    """SmolLM2 captured and calibrated once at every site; each cell is a conversion and an evaluation."""

    def __init__(self, samples: int = 8, length: int = 256) -> None:
        loaded = load_model("smollm2")
        rows = token_rows(loaded.tokenizer, topics_text(), length)
        calibration, evaluation = split_rows(rows, samples, samples)
        self.program = gq.capture(loaded.model)
        self.evaluation = batches(evaluation)
        args = gq.QuantizationArgs()
        everything = gq.QuantizationConfig(
            config_groups={
                "states": gq.QuantizationScheme(targets=("role:attention",), input_activations=args),
                "outputs": gq.QuantizationScheme(targets=PROJECTIONS, output_activations=args),
            }
        )
        self.calibration = gq.calibrate(gq.prepare(self.program, everything), batches(calibration))

    def plain(self) -> float:
        """Perplexity of the original."""
        return self._perplexity(self.program)

    def perplexity(self, row: Row, num_bits: int, symmetric: bool) -> float:
        """Perplexity of one cell."""
        return self._perplexity(gq.convert(self.program, self.calibration, row.config(num_bits, symmetric)))

    def _perplexity(self, program: torch.export.ExportedProgram) -> float:
        result = gq.evaluate({"model": program}, self.evaluation, progress=False)
        return result.results["model"].perplexity


def cells(bench: Bench) -> Iterator[list[str]]:
    """The table line by line."""
    rows = table_rows()
    with tqdm(total=len(rows) * len(FORMATS), desc="cells", unit="cell") as bar:
        for row in rows:
            line = [row.label]
            for num_bits, symmetric in FORMATS.values():
                line.append(f"{bench.perplexity(row, num_bits, symmetric):.3f}")
                bar.update()
            yield line


def main() -> None:
    """Print the table, and write it into a document where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help=WRITE_HELP)
    options = parser.parse_args()
    if options.write is not None and not has_markers(options.write):
        parser.error(f"{options.write} has no line {BEGIN}")
    bench = Bench()
    plain = bench.plain()
    table = tabulate(cells(bench), headers=["site, strategy", *FORMATS], tablefmt="github", disable_numparse=True)
    text = (
        f"Plain perplexity {plain:.3f}; 8 × 256 tokens calibrate, 8 × 256 evaluate; minmax; float32; torch "
        f"{torch.__version__.partition('+')[0]}, CPython {platform.python_version()}'s text.\n\n{table}"
    )
    print(text)
    if options.write is not None:
        put_between_markers(options.write, text)


if __name__ == "__main__":
    main()
