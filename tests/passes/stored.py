"""Stored programs of a tiny Llama, made once each, and their logits step by step."""

from functools import cache
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram

import graphquant as gq
from tests.passes import stepping
from tests.passes.stepping import run
from tests.tiny import tiny_batches, tiny_llama


def both(**args: Any) -> gq.QuantizationConfig:
    """Keys and values as a cache holds them, quantized alike."""
    kind = gq.QuantizationArgs(**args)
    scheme = gq.QuantizationScheme(targets=("role:attention",), key_states=kind, value_states=kind)
    return gq.QuantizationConfig(config_groups={"kv": scheme})


def projections(**args: Any) -> gq.QuantizationConfig:
    """Outputs of k_proj and v_proj, before rotary embedding."""
    scheme = gq.QuantizationScheme(
        targets=("role:k_proj", "role:v_proj"), output_activations=gq.QuantizationArgs(**args)
    )
    return gq.QuantizationConfig(config_groups={"kv": scheme})


@cache
def captured(kv_heads: int = 2, layers: int = 2, head_dim: int = 8, **options: Any) -> ExportedProgram:
    """A tiny Llama, captured."""
    made = tiny_llama(num_key_value_heads=kv_heads, num_hidden_layers=layers, head_dim=head_dim)
    return gq.capture(made, **options)


def static(
    config: gq.QuantizationConfig,
    kv_heads: int = 2,
    length: int = stepping.LENGTH,
    layers: int = 2,
    head_dim: int = 8,
    **options: Any,
) -> ExportedProgram:
    """The static program of ``config``, its cache stored, calibrated without a cache."""
    prepared = gq.prepare(captured(kv_heads, layers, head_dim), config)
    calibration = gq.calibrate(prepared, tiny_batches(), progress=False)
    program = captured(kv_heads, layers, head_dim, cache="static", max_cache_len=length, **options)
    return gq.convert(program, calibration, config, kv_cache="stored")


def in_lanes(program: ExportedProgram) -> ExportedProgram:
    """A static program of one token a step with all that makes its attention fast."""
    return gq.fuse_decode(gq.fold_scales(gq.pack_gqa(program)))


def logits(program: ExportedProgram, steps: tuple[int, ...] = (1,) * 10) -> Tensor:
    """The logits of ten tokens, given in steps."""
    return run(program, stepping.TOKENS[:1], steps)


def calls(program: ExportedProgram, *names: str) -> int:
    """How many calls of aten ops of these names a program has."""
    targets = [str(node.target).split(".") for node in program.graph.nodes if node.op == "call_function"]
    return sum(target[0] == "aten" and target[1] in names for target in targets)
