from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from graphquant.models import cache_dir


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """An empty cache folder, but for the tests of the real model, which keep the machine's own."""
    if "smollm2" not in request.fixturenames:
        monkeypatch.setenv("GRAPHQUANT_CACHE", str(tmp_path / "cache"))
    return cache_dir()


@pytest.fixture
def folder(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": len(tiny_tokenizer)}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    torch.manual_seed(0)
    path = tmp_path / "tiny"
    LlamaForCausalLM(config).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def gguf_file(folder: Path) -> Path:
    """The tiny model in llama.cpp's format, with a byte-pair tokenizer of its words' letters."""
    path = folder.with_name("tiny.gguf")
    config = LlamaConfig.from_pretrained(folder)
    out = gguf.GGUFWriter(path, "llama")
    out.add_block_count(2)
    out.add_context_length(64)
    out.add_embedding_length(16)
    out.add_feed_forward_length(24)
    out.add_head_count(4)
    out.add_head_count_kv(2)
    out.add_rope_dimension_count(4)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_vocab_size(11)
    out.add_tokenizer_model("gpt2")
    out.add_token_list(["<unk>", *"abcdefgh", "ab", "cd"])
    out.add_token_merges(["a b", "c d"])
    out.add_token_types([2, *[1] * 10])
    out.add_bos_token_id(0)
    out.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in load_file(folder / "model.safetensors").items():
        out.add_tensor(names.get_name(name, (".weight",)), tensor.numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
