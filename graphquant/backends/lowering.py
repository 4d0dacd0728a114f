"""``lower``: refuse what cannot be right, say the pairs in the backend's dialect, compile, and check the artifact."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram

from graphquant.backends.base import Backend, Batch, Lowered
from graphquant.backends.checking import Reference
from graphquant.backends.examples import examples_of
from graphquant.backends.registry import backend as backend_of
from graphquant.errors import LowerError, MismatchError, UnsupportedError, first_line
from graphquant.graph.writes import written_buffers
from graphquant.loops import shapes_of
from graphquant.passes.redialect import SiteSetting, redialect
from graphquant.passes.watching import with_outputs
from graphquant.records import records


def lower(
    program: ExportedProgram,
    backend: str,
    *,
    examples: Sequence[Batch] | None = None,
    check: bool = True,
    tolerance: float | None = None,
    **options: Any,
) -> Lowered:
    """Lower a program (as convert returns it, or a float one) to a backend, and check what came of it.

    ``examples`` are batches of the program's inputs, the first of which is traced with and all of which are checked;
    a program that ``capture`` made of a causal model needs none, and with a cache is checked step by step. ``check``
    runs artifact and program on them and compares: within ``tolerance`` of the largest |output|, or by default the
    backend's own, or what roundings alone make of this program (``backends.checking``).

    Raises:
        LowerError: the backend is unknown or fails.
        BackendMissingError: its package is not installed; the message names the extra.
        UnsupportedError: a site's setting, or the program's dtype or cache, is one that the backend does not do right.
        MismatchError: the artifact computes something else; the message names the first site that differs.
    """
    chosen = backend_of(backend)
    if not isinstance(program, ExportedProgram):
        raise LowerError(f"expected an ExportedProgram, as convert returns it, found {type(program).__name__}")
    refuse(program, chosen)
    unknown = sorted(set(options) - set(chosen.options))
    if unknown:
        raise LowerError(
            f"backend {chosen.name!r} has no option {', '.join(unknown)}; it has {', '.join(chosen.options) or 'none'}"
        )
    chosen.require_installed()
    batches = examples_of(program, examples, options)
    spoken = redialect(program, chosen.dialect)
    lowered = _compiled(chosen, spoken, batches[0], options)
    if check:
        _check(chosen, spoken, lowered, batches, tolerance, options)
    return lowered


def _check(
    chosen: Backend,
    program: ExportedProgram,
    lowered: Lowered,
    batches: Sequence[Batch],
    tolerance: float | None,
    options: Mapping[str, Any],
) -> None:
    limit, strict = chosen.tolerance if tolerance is None else tolerance, tolerance is not None
    reference = Reference(program)
    for index, batch in enumerate(batches):
        reference.run(batch)
        wrong = reference.wrong(_run(chosen, lowered, batch), limit, strict=strict)
        if wrong:
            site = _first_site(chosen, program, batches[: index + 1], limit, strict, options)
            raise MismatchError(
                f"backend {chosen.name!r} computes something else on {shapes_of(batch)}: {next(iter(wrong.values()))}"
                f"; {site}"
            )
    lowered.reset()


def refuse(program: ExportedProgram, chosen: Backend) -> None:
    """Refuse, before any work, what a backend is known not to do right.

    Raises:
        UnsupportedError: naming the site and the nearest setting that works.
    """
    for _, record in records(program):
        setting = SiteSetting.of(record)
        answer = chosen.capability(setting.args, setting.layout)
        if not answer.works:
            raise UnsupportedError(
                f"{record.site}: backend {chosen.name!r} does not take {setting.args.summary()} at {record.dims}: "
                f"{answer.reason}; the nearest that works is {answer.instead}"
            )
        if record.stored is not None:
            dtype, target, *_ = record.stored.split()
            answer = chosen.holds(dtype, in_buffer=target not in program.graph_signature.user_inputs)
            if not answer.works:
                raise UnsupportedError(
                    f"{record.site}: backend {chosen.name!r} does not take the cache {record.stored}: {answer.reason}; "
                    f"the nearest that works is {answer.instead}"
                )
    dtypes = {str(value.dtype).removeprefix("torch.") for value in program.parameters() if value.is_floating_point()}
    wrong = sorted(dtypes - set(chosen.dtypes))
    if wrong:
        raise UnsupportedError(
            f"backend {chosen.name!r} does not take {', '.join(wrong)} models; it takes {', '.join(chosen.dtypes)}: "
            "load the model in one of these"
        )
    written = written_buffers(program)
    if written and not chosen.keeps_state:
        raise UnsupportedError(
            f"backend {chosen.name!r} loses what a program writes to its buffers ({written[0]}), without an error: "
            'capture the model with cache="inputs"'
        )


def _compiled(chosen: Backend, program: ExportedProgram, example: Batch, options: Mapping[str, Any]) -> Lowered:
    try:
        return chosen.compile(program, example, options)
    except LowerError:
        raise
    except Exception as error:  # compilers raise every kind, with pages of text
        raise LowerError(
            f"backend {chosen.name!r} failed: {type(error).__name__}: {first_line(error)[:400]}"
        ) from error


def _run(chosen: Backend, lowered: Lowered, batch: Batch) -> list[Tensor]:
    try:
        return lowered.run(batch)
    except LowerError:
        raise
    except Exception as error:  # runtimes raise every kind
        raise LowerError(
            f"the artifact of backend {chosen.name!r} does not run on {shapes_of(batch)}: {type(error).__name__}: "
            f"{first_line(error)[:400]}"
        ) from error


def _first_site(
    chosen: Backend,
    program: ExportedProgram,
    batches: Sequence[Batch],
    limit: float,
    strict: bool,
    options: Mapping[str, Any],
) -> str:
    """Which site differs first on the last batch, with every dequantized tensor as an output of one more lowering."""
    sites = [(node.name, record.site) for node, record in records(program)]
    if not sites:
        return "the program has no quantized site"
    watched = with_outputs(program, [name for name, _ in sites])
    reference = Reference(watched)
    try:
        lowered = _compiled(chosen, watched, batches[0], options)
        for batch in batches:
            reference.run(batch)
            found = _run(chosen, lowered, batch)
    except LowerError as error:
        return f"which site differs first is not known: {error}"
    wrong = reference.wrong(found, limit, strict=strict)
    for index, (_, site) in enumerate(sites, len(reference.outputs) - len(sites)):
        if index in wrong:
            return f"the first site that differs is {site} ({wrong[index]})"
    return "no quantized site differs, so what does lies behind the last of them"
