"""Unusual sizes: a sequence of 8192, and layers of different head_dim in one program."""

import torch

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
