"""What several benchmarks need: the first layers of SmolLM2, and the bytes of a cache."""

from typing import Any

from torch.export import ExportedProgram

from graphquant.models import LoadedModel, load_model


def first_layers(layers: int) -> LoadedModel:
    """SmolLM2 with that many layers."""
    loaded = load_model("smollm2")
    model: Any = loaded.model
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    return loaded


def cache_bytes(program: ExportedProgram) -> int:
    """Bytes of the static KV cache of a program, scales per token included."""
    return sum(value.nbytes for name, value in program.constants.items() if "_cache_" in name)
