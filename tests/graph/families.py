"""Tiny random models of the families, each exported once a session, and what their own code computes in eager mode."""

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Interpreter, Node
from transformers import PreTrainedModel

from graphquant.capture import capture

torch.set_num_threads(1)

IMPLEMENTATIONS = ("sdpa", "eager")
ROLES = tuple(f"{letter}_proj.{end}" for end in ("input", "output") for letter in "qkv") + tuple(
    f"{name}_states" for name in ("query", "key", "value")
)
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """A config, its heads, and where its projections are: three linears, or slices of one."""

    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    kv_heads: int = 2
    head_dim: int = 8
    layers: int = 1
    fused: bool = False
    heads: int = 4

    def linear(self, letter: str) -> str:
        """The module that projects to q, k or v."""
        return "qkv_proj" if self.fused else f"{letter}_proj"


FAMILIES = {
    "llama": Family("Llama", {"head_dim": 16}, head_dim=16),
    "mistral": Family("Mistral", {"head_dim": 16, "sliding_window": 3}, head_dim=16),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3", {"head_dim": 16}, head_dim=16),
    "smollm3": Family("SmolLM3", {"num_hidden_layers": 2, "no_rope_layers": [1, 0]}, layers=2),
    "phi3": Family("Phi3", fused=True),
}
LLAMAS = {
    "llama-mha": Family("Llama", {"num_key_value_heads": 4}, kv_heads=4),
    "llama-mqa": Family("Llama", {"num_key_value_heads": 1}, kv_heads=1),
    "llama-bias": Family("Llama", {"attention_bias": True}),
}
CASES = FAMILIES | LLAMAS


@cache
def model(name: str, implementation: str = "sdpa") -> PreTrainedModel:
    """A random model of a case; its biases and norms are random too."""
    config = getattr(transformers, f"{CASES[name].config}Config")(**_SIZES | CASES[name].changes)
    torch.manual_seed(0)
    built = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for key, parameter in built.named_parameters():
        if "bias" in key or "norm" in key:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return built.eval()


@cache
def program(name: str, implementation: str = "sdpa", decomposed: bool = False) -> ExportedProgram:
    """The captured program of a case, in training IR or core ATen."""
    if not decomposed:
        return capture(model(name, implementation))
    with torch.no_grad():  # a fifth faster, and the same graph
        return program(name, implementation).run_decompositions()


def batch() -> dict[str, Tensor]:
    """Two sequences of 7 tokens, the second with padding on its left."""
    ids = torch.randint(1, 32, (2, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


@contextmanager
def _watched_attention(model: PreTrainedModel, seen: dict[str, list[Tensor]]) -> Iterator[None]:
    """Every attention function that the model calls records the q, k and v given to it."""
    modeling = sys.modules[type(model).__module__]
    known = modeling.ALL_ATTENTION_FUNCTIONS

    def get_interface(*names: Any) -> Any:
        real = known.get_interface(*names)

        def watched(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            for role, states in zip(("query_states", "key_states", "value_states"), (query, key, value), strict=True):
                seen[role].append(states)
            return real(module, query, key, value, *args, **kwargs)

        return watched

    modeling.ALL_ATTENTION_FUNCTIONS = SimpleNamespace(get_interface=get_interface)
    try:
        yield
    finally:
        modeling.ALL_ATTENTION_FUNCTIONS = known


def eager_values(name: str, implementation: str) -> dict[str, list[Tensor]]:
    """Role → its value in each layer, as the model's own modules and attention function see it."""
    built, family = model(name, implementation), CASES[name]
    seen: dict[str, list[Tensor]] = defaultdict(list)
    widths = [heads * family.head_dim for heads in (family.heads, family.kv_heads, family.kv_heads)]

    def hook(letters: str) -> Any:
        def record(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            for letter, part in zip(letters, output.split(widths, -1) if family.fused else (output,), strict=True):
                seen[f"{letter}_proj.input"].append(inputs[0])
                seen[f"{letter}_proj.output"].append(part)

        return record

    handles = [
        layer.self_attn.get_submodule(linear).register_forward_hook(hook(letters))
        for layer in built.model.layers
        for linear, letters in ((("qkv_proj", "qkv"),) if family.fused else [(f"{c}_proj", c) for c in "qkv"])
    ]
    with torch.no_grad(), _watched_attention(built, seen):
        built(**batch(), use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


class _Recorder(Interpreter):
    """Runs a graph and keeps what every node computes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        # A copy: an op in place would change it afterwards.
        self.values[n.name] = result.clone() if isinstance(result, Tensor) else result
        return result


def graph_values(exported: ExportedProgram, *args: Tensor) -> dict[str, Any]:
    """Node name → its value, running the program's graph on positional inputs."""
    recorder = _Recorder(exported.module(check_guards=False))
    with torch.no_grad():
        recorder.run(*args)
    return recorder.values
