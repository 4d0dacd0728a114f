"""``graphquant decode``: model and saved statistics in, a program with a KV cache out, which may hold codes."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from torch.export import ExportedProgram

from graphquant.calibration import Calibration
from graphquant.capture import capture
from graphquant.cli.console import Console
from graphquant.cli.inputs import Source, config_of
from graphquant.cli.options import (
    Dialect,
    DType,
    Format,
    JsonFlag,
    ModelArgument,
    PresetName,
    ProgramOutput,
    Recipe,
    file_option,
)
from graphquant.cli.outputs import check_outputs, check_suffix, report_text, save_program, write_all
from graphquant.errors import ModelError
from graphquant.passes import convert, fold_scales, fuse_decode, pack_gqa, specialize
from graphquant.report import report
from graphquant.tables import check_format

Statistics = Annotated[Path, file_option("--calibration", "What quantize saved with --save-calibration.")]
Cache = Annotated[
    Literal["static", "inputs"],
    typer.Option(
        "--cache", help="static: buffers (Inductor, ExecuTorch); inputs: past and present (ONNX Runtime, OpenVINO)."
    ),
]
MaxCacheLen = Annotated[
    int | None,
    typer.Option("--max-cache-len", metavar="N", min=1, help="Tokens that a static cache holds.", show_default=False),
]
KVCache = Annotated[
    Literal["stored", "float"],
    typer.Option("--kv-cache", help="stored: the cache holds codes; float: it holds values."),
]
Sequence = Annotated[
    int | None,
    typer.Option("--sequence", metavar="N", min=1, help="Tokens a step.  [default: any]", show_default=False),
]
Batch = Annotated[
    int | None,
    typer.Option("--batch", metavar="N", min=1, help="Rows of a static cache.  [default: 1]", show_default=False),
]
Attention = Annotated[
    Literal["exported", "packed", "lanes"],
    typer.Option(
        "--attention",
        help="packed: no repeated KV heads, and scales folded; lanes: also the fast form for Inductor, of one token.",
    ),
]


def decode(
    context: typer.Context,
    model: ModelArgument,
    output: ProgramOutput,
    calibration: Statistics,
    preset_name: PresetName = None,
    recipe: Recipe = None,
    cache: Cache = "static",
    max_cache_len: MaxCacheLen = None,
    kv_cache: KVCache = "stored",
    sequence: Sequence = None,
    batch: Batch = None,
    attention: Attention = "exported",
    dialect: Dialect = "pt2e",
    dtype: DType = "float32",
    json: JsonFlag = False,
    format: Format = "simple",
) -> None:
    """Capture MODEL with a KV cache, convert it with saved statistics, and save it as a program of torch.export."""
    console: Console = context.obj
    _check(cache, max_cache_len, batch, sequence, attention, kv_cache)
    check_format(format)
    check_suffix(output, (".pt2",))
    check_outputs((output,), (Path(model), recipe, calibration))
    config = config_of(preset_name, recipe)
    statistics = Calibration.load(calibration)
    source = Source.load(model, None, dtype, console)
    if isinstance(source.model, ExportedProgram):
        raise ModelError(f"{model} is a program, and what is to have a cache is captured anew: name its model")
    with console.working(f"capturing {source.name}"):
        program = capture(source.model, cache=cache, max_cache_len=max_cache_len, batch=batch)
    with console.working("converting"):
        # A sequence of any length first: a graph of one token does not say which of its ones are the sequence.
        stored = "stored" if kv_cache == "stored" else None
        made = convert(program, statistics, config, dialect=dialect, kv_cache=stored)
        made = _rewritten(made, sequence, attention, stored is not None)
    write_all({output: partial(save_program, made)}, console)
    result = report(made)
    typer.echo(result.to_json() if json else report_text(result, format))


def _rewritten(program: ExportedProgram, sequence: int | None, attention: str, stored: bool) -> ExportedProgram:
    """The passes around a cache, those that are asked for, in their order."""
    made = program if sequence is None else specialize(program, sequence=sequence)
    if attention == "exported":
        return made
    packed = pack_gqa(made)
    folded = fold_scales(packed) if stored else packed
    return fuse_decode(folded) if attention == "lanes" else folded


def _check(
    cache: str, max_cache_len: int | None, batch: int | None, sequence: int | None, attention: str, kv_cache: str
) -> None:
    """Refuse options that do not go together, before any work."""
    if cache == "static" and max_cache_len is None:
        raise typer.BadParameter("a static cache has a size: give --max-cache-len", param_hint="--cache")
    for flag, value in (("--max-cache-len", max_cache_len), ("--batch", batch)):
        if cache == "inputs" and value is not None:
            raise typer.BadParameter("a cache of inputs is of any size: leave it out", param_hint=flag)
    if attention == "lanes" and (cache != "static" or sequence != 1 or kv_cache != "stored"):
        raise typer.BadParameter(
            "lanes are of one token a step over a static cache of codes: --cache static --sequence 1 --kv-cache stored",
            param_hint="--attention",
        )
