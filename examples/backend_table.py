"""Which settings which compiler gets right: every one lowered, run, and compared with the graph, on a 2-layer model.

python examples/backend_table.py                              prints the table (14 minutes on 2 cores)
python examples/backend_table.py --backend onnxruntime        checks one backend
python examples/backend_table.py --rows "int8 sym"            checks one number format
python examples/backend_table.py --write docs/backends.md     puts the table between the file's markers
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from markers import BEGIN, WRITE_HELP, has_markers, put_between_markers
from tabulate import tabulate
from torch.export import ExportedProgram
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import graphquant as gq
from graphquant.backends import BACKENDS, Lowered
from graphquant.backends.table import FORMATS, setting
from graphquant.errors import UnsupportedError
from graphquant.numerics import STRATEGIES, TensorLayout

LAYERS, LETTERS = 2, "qkv"


def model() -> LlamaForCausalLM:
    """A random Llama: 2 layers, 4 heads and 2 KV heads of 8 channels."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return LlamaForCausalLM(config).eval()


def batch(rows: int, length: int, seed: int = 0, *, calibrates: bool = False) -> dict[str, torch.Tensor]:
    """Random tokens, the last row with padding on its right; those that calibrate are not those that check.

    The largest value of a calibration lies on a rounding tie of its own scale, where compilers may differ by a step;
    and what a query makes of nothing but padding, which is what padding on the left leaves it, is each one's own.
    """
    low, high = (0, 32) if calibrates else (32, 64)
    ids = torch.randint(low, high, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[-1, length - length // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def configuration(form: str, left_out: tuple[str, ...] = ()) -> gq.QuantizationConfig:
    """All strategies in one number format, at the states and at the linear outputs of q, k and v of two layers.

    Those that are ``left_out`` give their places to ``tensor``.
    """
    places = [(layer, letter) for layer in range(LAYERS) for letter in LETTERS]
    groups = {}
    turned = STRATEGIES[1:] + STRATEGIES[:1]
    for (layer, letter), strategy, other in zip(places, STRATEGIES, turned, strict=True):
        strategy, other = ("tensor" if name in left_out else name for name in (strategy, other))
        attention = rf"re:model\.layers\.{layer}\.self_attn"
        name = {"q": "query", "k": "key", "v": "value"}[letter]
        states = {f"{name}_states": setting(strategy, form)}
        groups[f"{letter}{layer} states"] = gq.QuantizationScheme(targets=(f"{attention}$",), **states)
        groups[f"{letter}{layer} output"] = gq.QuantizationScheme(
            targets=(rf"{attention}\.{letter}_proj$",), output_activations=setting(other, form)
        )
    return gq.QuantizationConfig(config_groups=groups)


class Bench:
    """The model captured and calibrated once."""

    def __init__(self) -> None:
        self.program = gq.capture(model())
        prepared = gq.prepare(self.program, configuration("int8 sym"))
        self.calibration = gq.calibrate(
            prepared, [batch(3, 24, seed, calibrates=True) for seed in range(3)], progress=False
        )

    def quantized(self, form: str, left_out: tuple[str, ...] = ()) -> ExportedProgram:
        """All strategies in one number format, at both positions."""
        return gq.convert(self.program, self.calibration, configuration(form, left_out))

    def lowered(self, backend: str, form: str, left_out: tuple[str, ...] = ()) -> Lowered:
        """The same, lowered to a backend and checked at two sizes."""
        return gq.lower(self.quantized(form, left_out), backend, examples=[batch(2, 8), batch(1, 7, seed=1)])


def cell(bench: Bench, backend: str, form: str) -> str:
    """What a backend makes of the twelve tensors; or, in its own words, why it does not take them."""
    left_out: tuple[str, ...] = ()
    try:
        summary = bench.lowered(backend, form).summary()
    except UnsupportedError as error:
        refused = [strategy for strategy in STRATEGIES if not _takes(backend, strategy, form)]
        reason = str(error).partition(": backend")[2].partition(": ")[2]
        if len(refused) == len(STRATEGIES):
            return f"refused: {reason}"
        left_out = tuple(refused)
        summary = bench.lowered(backend, form, left_out).summary()
    own = f"{summary.dedicated} of {summary.pairs} as ops of its own" if summary.dedicated else "arithmetic"
    return f"right; {own}" + (f"; refused: {', '.join(left_out)} ({reason})" if left_out else "")


def _takes(backend: str, strategy: str, form: str) -> bool:
    return BACKENDS[backend].capability(setting(strategy, form), TensorLayout("states", 2, 8)).works


def rows(names: list[str], forms: list[str]) -> Iterator[list[str]]:
    """The table line by line."""
    bench = Bench()
    with tqdm(total=len(names) * len(forms), desc="lowerings", unit="lowering") as bar:
        for form in forms:
            line = [form]
            for name in names:
                line.append(cell(bench, name, form))
                bar.update()
            yield line


def main() -> None:
    """Print the table, and write it into a document where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help=WRITE_HELP)
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="check this one; may be given again")
    parser.add_argument("--rows", action="append", choices=FORMATS, help="check this format; may be given again")
    options = parser.parse_args()
    if options.write is not None and not has_markers(options.write):
        parser.error(f"{options.write} has no line {BEGIN}")
    names = options.backend or list(BACKENDS)
    table = tabulate(
        rows(names, options.rows or list(FORMATS)),
        headers=["all six strategies, 12 tensors, in", *names],
        tablefmt="github",
    )
    print(table)
    if options.write is not None:
        put_between_markers(options.write, table)


if __name__ == "__main__":
    main()
