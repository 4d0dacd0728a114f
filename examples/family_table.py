"""Which families and which forms of a graph graphquant takes, checked one by one on tiny random models.

python examples/family_table.py                            prints the table (about 20 minutes on 2 cores)
python examples/family_table.py --write docs/models.md     and puts it between the file's markers
python examples/family_table.py --family Llama             checks one family
"""

import argparse
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES, Family
from markers import BEGIN, WRITE_HELP, has_markers, put_between_markers
from tabulate import tabulate
from torch import Tensor
from torch.export import ExportedProgram
from tqdm import tqdm

import graphquant as gq
from graphquant.errors import CaptureError
from graphquant.loops import runnable

CACHES: tuple[str | None, ...] = (None, "static", "inputs")
FORMS = tuple(itertools.product(("sdpa", "eager"), (False, True)))
"""Attention implementation, and whether the graph is decomposed to core ATen; a cell's four marks in this order."""
CACHE_LENGTH, PAST = 96, 5
SHAPES = ((1, 1), (3, 77))
WORKS, FAILS = "✓", "–"


def check(family: Family, implementation: str, decomposed: bool, cache: str | None) -> str:
    """Check one family in one form: empty where all is right, else why transformers or torch cannot make the graph.

    Raises:
        AssertionError: a site is not what the family's code says, or a guarantee does not hold.
    """
    if implementation in family.fused:
        return family.fused[implementation]
    model = family.model(implementation)
    length = CACHE_LENGTH if cache == "static" else None
    try:
        program = gq.capture(model, cache=cache, max_cache_len=length)
    except CaptureError as error:
        return str(error)
    if decomposed:
        try:
            with torch.no_grad():
                program = program.run_decompositions()
        except ValueError as error:  # a view of strides that it cannot take, in transformers' own code
            first = re.sub(r"\bs\d+", "s", str(error).splitlines()[0])
            return f"run_decompositions() fails: {first}"
    sites = gq.find_attention(program)
    check_sites(family, sites, cache)
    check_guarantees(program, family, cache)
    return ""


def check_sites(family: Family, sites: Any, cache: str | None) -> None:
    """Exactly the family's sites, of the right dims, fed by the right linears; one near miss for each that it lacks."""
    assert [layer.path for layer in sites.layers] == [family.attention.format(index) for index in family.layers]
    roles = [f"{letter}_proj.{end}" for end in ("input", "output") for letter in "qkv"]
    roles += ["query_states", "key_states", "value_states"]
    lacks = family.missing(cache)
    for layer in sites.layers:
        assert [site.role for site in layer.sites] == [role for role in roles if role not in lacks], layer.path
        for site in layer.sites:
            source = layer.index if site.role[0] == "q" else family.shares.get(layer.index, layer.index)
            linear = f"{sites.layers[source].path}.{family.linears['qkv'.index(site.role[0])]}"
            module = layer.path if site.role.endswith("states") else linear
            assert site.module == module, f"{site.key} is of {site.module}, expected {module}"
            if not site.role.endswith("input"):
                assert site.layout.dims == family.dims(site.role), f"{site.key} is {site.layout.dims}"
    missed = {miss.what for miss in sites.near_misses}
    assert missed == {role.partition(".")[0] for role in lacks}, sites.near_misses
    nodes = {(index, role): layer.site(role).node for index, layer in enumerate(sites.layers) for role in roles[-2:]}
    for (index, role), node in nodes.items():
        source = family.shares.get(index, index)
        first = next(other for other, name in nodes.items() if name == node)
        assert first == (source, role), f"{role} of layer {index} is the {first[1]} of layer {first[0]}"


def check_guarantees(program: ExportedProgram, family: Family, cache: str | None) -> None:
    """Prepare is bit-equal, convert runs at other sizes, and what was saved and loaded is bit-equal."""
    config = configuration(family)
    example = batch(family, program, 2, 9, cache)
    prepared = gq.prepare(program, config)
    assert_equal(prepared(**example), runnable(program)(**example), "prepared")
    gq.calibrate(prepared, [example], progress=False)
    quantized = gq.convert(prepared)
    for size in SHAPES:
        results = runnable(quantized)(**batch(family, program, *size, cache))
        assert all(bool(value.isfinite().all()) for value in torch.utils._pytree.tree_leaves(results))
    file = io.BytesIO()
    torch.export.save(quantized, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert_equal(runnable(loaded)(**example), runnable(quantized)(**example), "loaded")


def configuration(family: Family) -> gq.QuantizationConfig:
    """All states by head, asymmetric, and all linear outputs that there are by channel."""
    states = gq.QuantizationArgs(strategy="attn_head", symmetric=False)
    groups = {"states": gq.QuantizationScheme(targets=("role:attention",), input_activations=states)}
    outputs = tuple(f"role:{letter}_proj" for letter in "qkv" if f"{letter}_proj.output" not in family.lacks)
    if outputs:
        channels = gq.QuantizationArgs(strategy="channel")
        groups["outputs"] = gq.QuantizationScheme(targets=outputs, output_activations=channels)
    return gq.QuantizationConfig(config_groups=groups)


def batch(family: Family, program: ExportedProgram, rows: int, length: int, cache: str | None) -> dict[str, Any]:
    """Random inputs of a program; a static cache is of one row."""
    generator = torch.Generator().manual_seed(rows + length)
    if cache == "static":
        ids = torch.randint(3, 128, (1, length), generator=generator)
        return {"input_ids": ids, "cache_position": torch.arange(length)}
    ids = torch.randint(3, 128, (rows, length), generator=generator)
    past = PAST if cache == "inputs" else 0
    mask = torch.ones(rows, past + length, dtype=torch.int64)
    mask[-1, : length // 4] = 0
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if cache == "inputs":
        names = [str(name) for name in program.graph_signature.user_inputs if str(name).startswith("past_key_values")]
        shapes = [node.meta["val"].shape for node in program.graph.nodes if node.name in names]
        states = [torch.randn(rows, shape[1], past, shape[3], generator=generator) for shape in shapes]
        inputs["past_key_values"] = _pairs(states)
    return inputs


def _pairs(states: list[Tensor]) -> tuple[tuple[Tensor, Tensor], ...]:
    return tuple(zip(states[::2], states[1::2], strict=True))


def assert_equal(found: Any, expected: Any, what: str) -> None:
    """Every tensor of two trees is the same, bit for bit."""
    pairs = zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), f"{what}: another value"


def rows(names: list[str], notes: dict[str, int]) -> Iterator[list[str]]:
    """The table line by line; ``notes`` collects the reasons."""
    total = len(names) * len(CACHES) * len(FORMS)
    with tqdm(total=total, desc="checks", unit="check") as bar:
        for name in names:
            family = FAMILIES[name]
            cells = []
            for cache in CACHES:
                reasons = []
                for implementation, decomposed in FORMS:
                    reasons.append(check(family, implementation, decomposed, cache))
                    bar.update()
                marks = "".join(FAILS if reason else WORKS for reason in reasons)
                numbers = [notes.setdefault(reason, len(notes) + 1) for reason in dict.fromkeys(reasons) if reason]
                cells.append(" ".join([marks, *(f"[{number}]" for number in numbers)]))
            yield [name, family.differs, sites_of(family), lacking(family, notes), *cells]


def lacking(family: Family, notes: dict[str, int]) -> str:
    """The sites that a family lacks, with the numbers of the reasons; those in brackets, only beside a cache."""
    reasons = {**family.lacks, **family.lacks_cached}
    numbers = [notes.setdefault(reason, len(notes) + 1) for reason in dict.fromkeys(reasons.values())]
    names = [*family.lacks, *(f"({role})" for role in family.lacks_cached)]
    return ", ".join(names) + "".join(f" [{number}]" for number in numbers)


def sites_of(family: Family) -> str:
    """Query, key and value states in short: heads × channels."""
    value = family.v_head_dim or family.head_dim
    return f"{family.heads} × {family.head_dim}, {family.kv_heads} × {family.head_dim}, {family.kv_heads} × {value}"


HEADERS = ("family", "what differs", "q, k, v: heads × channels", "lacks", "no cache", "static cache", "past as inputs")


def main() -> None:
    """Print the table, and write it into a document where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help=WRITE_HELP)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="check this one; may be given again")
    options = parser.parse_args()
    if options.write is not None and (options.family or not has_markers(options.write)):
        parser.error(f"--write needs all families, and a line {BEGIN} in {options.write}")
    notes: dict[str, int] = {}
    table = tabulate(rows(options.family or list(FAMILIES), notes), headers=HEADERS, tablefmt="github")
    text = "\n".join([table, "", *(f"[{number}] {reason}  " for reason, number in notes.items())])
    print(text)
    if options.write is not None:
        put_between_markers(options.write, text)


if __name__ == "__main__":
    main()
