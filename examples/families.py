"""The families of Llama-style models that graphquant is checked against: tiny random models, and what is true of them.

What stands here was read in the models' own code, and is what the finder must find: it is never taken from the finder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
INTERLEAVED = "one linear whose heads are split before q, k and v are"
GPT_SIZES = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A config, the heads of its attention, the linears that feed it, and the sites that it lacks, with the reason."""

    config: str
    differs: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int | None = None
    attention: str = "model.layers.{}.self_attn"
    layers: tuple[int, ...] = (0,)
    linears: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    lacks: Mapping[str, str] = field(default_factory=dict)
    lacks_cached: Mapping[str, str] = field(default_factory=dict)
    """Sites that are lacking where there is a cache in the graph."""
    shares: Mapping[int, int] = field(default_factory=dict)
    """Layers whose keys and values are those of another."""
    fused: Mapping[str, str] = field(default_factory=dict)
    """Implementations that transformers itself refuses, with the reason."""

    def model(self, implementation: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """A random model; its biases and norms are random too, so that nothing is the same by accident."""
        config = getattr(transformers, f"{self.config}Config")(**{**self.sizes, **self.settings})
        torch.manual_seed(0)
        built = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)
        for name, parameter in built.named_parameters():
            if "bias" in name or "norm" in name or name.endswith("sinks"):
                nn.init.uniform_(parameter, 0.5, 1.5)
        return built.eval()

    def missing(self, cache: str | None) -> dict[str, str]:
        """The sites that a graph lacks, with the reasons."""
        return {**self.lacks, **(self.lacks_cached if cache else {})}

    def dims(self, role: str) -> str:
        """The dims of a role's tensor."""
        letter = role[0]
        heads = self.heads if letter == "q" else self.kv_heads
        width = self.v_head_dim or self.head_dim if letter == "v" else self.head_dim
        return f"[B, {heads}, S, {width}]" if role.endswith("states") else f"[B, S, {heads * width}]"


def _interleaved(*letters: str) -> dict[str, str]:
    return {f"{letter}_proj.output": INTERLEAVED for letter in letters}


TWO_LINEARS = "one part of each key comes from the latent, the other from a linear of its own"
LATENT = "keys and values come from one latent; what is cached is the latent, and they are made anew from all of it"
NO_SDPA = "transformers has no sdpa for it"

FAMILIES: dict[str, Family] = {
    "Llama": Family(config="Llama", differs="the reference: rotary embedding, grouped queries"),
    "Mistral": Family(config="Mistral", settings={"sliding_window": 3}, differs="sliding window (in the mask)"),
    "Mixtral": Family(config="Mixtral", settings={"num_local_experts": 2}, differs="experts behind the attention"),
    "Qwen2": Family(config="Qwen2", differs="biases of q, k, v"),
    "Qwen2-MoE": Family(
        config="Qwen2Moe", settings={**EXPERTS, "shared_expert_intermediate_size": 32}, differs="biases, experts"
    ),
    "Qwen3": Family(
        config="Qwen3",
        settings={"head_dim": 32},
        head_dim=32,
        differs="q/k norm before transpose, head_dim ≠ hidden/heads",
    ),
    "Qwen3-MoE": Family(config="Qwen3Moe", settings={**EXPERTS, "head_dim": 16}, differs="q/k norm, experts"),
    "Phi": Family(config="Phi", differs="rotary embedding on a part of the head, biases"),
    "Phi-3": Family(config="Phi3", linears=("qkv_proj",) * 3, differs="one qkv_proj, sliced"),
    "Gemma": Family(
        config="Gemma",
        settings={"head_dim": 16, "num_key_value_heads": 1},
        kv_heads=1,
        differs="multi-query, scaled embedding",
    ),
    "Gemma-2": Family(
        config="Gemma2",
        settings={"num_hidden_layers": 2, "head_dim": 16, "attn_logit_softcapping": 20.0},
        fused={"sdpa": NO_SDPA},
        layers=(0, 1),
        differs="soft-cap of the scores, window every other layer",
    ),
    "Gemma-3": Family(
        config="Gemma3Text",
        settings={"num_hidden_layers": 2, "head_dim": 16},
        layers=(0, 1),
        differs="q/k norm after transpose",
    ),
    "Gemma-3n": Family(
        config="Gemma3nText",
        settings={
            "num_hidden_layers": 4,
            "head_dim": 16,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
        },
        layers=(0, 1, 2, 3),
        shares={2: 0, 3: 1},
        differs="the last layers use the keys and values of earlier ones",
    ),
    "Cohere": Family(config="Cohere", differs="interleaved rotary embedding in float32"),
    "OLMo-2": Family(config="Olmo2", differs="q/k norm right after the linear"),
    "StableLM": Family(config="StableLm", differs="rotary embedding on a part of the head"),
    "SmolLM3": Family(
        config="SmolLM3",
        settings={"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
        layers=(0, 1),
        differs="layers without rotary embedding",
    ),
    "Granite": Family(config="Granite", differs="its own softmax scale"),
    "GPT-NeoX": Family(
        config="GPTNeoX",
        kv_heads=4,
        attention="gpt_neox.layers.{}.attention",
        linears=("query_key_value",) * 3,
        lacks=_interleaved("q", "k", "v"),
        differs="one query_key_value, heads interleaved",
    ),
    "Falcon": Family(
        config="Falcon",
        kv_heads=1,
        attention="transformer.h.{}.self_attention",
        linears=("query_key_value",) * 3,
        lacks=_interleaved("q", "k", "v"),
        differs="multi-query, one query_key_value",
    ),
    "OPT": Family(
        config="OPT",
        settings={"ffn_dim": 96, "word_embed_proj_dim": 64},
        kv_heads=4,
        attention="model.decoder.layers.{}.self_attn",
        differs="learned positions, the query scaled first",
    ),
    "GPT-2": Family(
        config="GPT2",
        sizes=GPT_SIZES,
        kv_heads=4,
        attention="transformer.h.{}.attn",
        linears=("c_attn",) * 3,
        differs="one Conv1D c_attn, split",
    ),
    "DeepSeek-V3": Family(
        config="DeepseekV3",
        settings={
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 2,
            "moe_intermediate_size": 32,
        },
        kv_heads=4,
        v_head_dim=12,
        linears=("q_b_proj", "kv_b_proj", "kv_b_proj"),
        lacks={"k_proj.input": TWO_LINEARS, "k_proj.output": TWO_LINEARS, **_interleaved("v")},
        lacks_cached={"v_proj.input": LATENT},
        differs="latent attention: V head_dim ≠ QK head_dim",
    ),
    "gpt-oss": Family(
        config="GptOss",
        settings={"num_hidden_layers": 2, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
        fused={"sdpa": NO_SDPA},
        layers=(0, 1),
        differs="learned sinks, experts",
    ),
    "LFM2": Family(
        config="Lfm2",
        settings={"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        layers=(1,),
        differs="hybrid: convolutions, and attention in some layers only",
    ),
}
