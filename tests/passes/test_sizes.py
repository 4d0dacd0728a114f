"""Unusual sizes: a sequence of 8192, and layers of different head_dim in one program."""

import torch
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.passes.prepared import origin_of
from tests.graph.modules import HIDDEN, Attention, Stack, sdpa_causal
from tests.graph.modules import export as export_attention
from tests.passes.helpers import args, both, calibrated, config, run
from tests.tiny import tiny_batch, tiny_llama


def test_a_sequence_of_8192() -> None:
    program = gq.capture(tiny_llama(num_hidden_layers=1, max_position_embeddings=8192))
    prepared = calibrated(program, gq.preset("int8-qkv-attn-head"), [tiny_batch(1, 8192)])
    assert gq.calibration_of(prepared)["model.layers.0.self_attn.key_states"].tokens == 8192
    gq.set_mode(prepared, "fake_quant")
    batch = tiny_batch(1, 8192, seed=1)
    with torch.no_grad():
        assert torch.equal(run(gq.convert(prepared), batch), prepared(**batch))


def test_layers_of_different_head_dim() -> None:
    wide, narrow = Attention(sdpa_causal), Attention(sdpa_causal, heads=2, kv_heads=2, head_dim=4)
    program = export_attention(Stack(wide, narrow))
    x = torch.randn(2, 5, HIDDEN)
    c = both(config("states", args("channel")), config("outputs", args("attn_head")))
    prepared = calibrated(program, c, [{"x": x}])
    shapes = {
        planned.key: tuple(gq.convert(prepared).state_dict[f"{planned.key}_scale"].shape)
        for planned in origin_of(prepared).plan
        if planned.key.endswith(("key_states", "k_proj.output"))
    }
    assert shapes == {
        "layers.0.k_proj.output": (4,),
        "layers.0.key_states": (8,),
        "layers.1.k_proj.output": (2,),
        "layers.1.key_states": (4,),
    }


def test_position_arithmetic_stays_integer_and_tied_weights_stay_tied() -> None:
    program = gq.capture(tiny_llama(tie_word_embeddings=True))
    quantized = gq.convert(calibrated(program, gq.preset("int8-qkv-attn-head")))
    before, after = dtypes(program), dtypes(quantized)
    integers = {name: dtype for name, dtype in before.items() if not dtype.is_floating_point}
    assert len(integers) > 5
    assert integers.items() <= after.items()
    embedding, head = (quantized.state_dict[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    assert embedding is head
    added = set(quantized.state_dict) - set(program.state_dict)
    assert len(added) == 2 * 2 * 3
    assert all(name.endswith(("_scale", "_zero_point")) for name in added)


def dtypes(program: ExportedProgram) -> dict[str, torch.dtype]:
    """Node name → dtype of its tensor."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    return {name: value.dtype for name, value in values.items() if isinstance(value, torch.Tensor)}
