"""Text out of a KV cache that holds codes: SmolLM2 completes a prompt, and is compared with fake-quant without a cache.

python examples/generate.py                                       int8, one prompt, 24 tokens
python examples/generate.py --preset int4-kproj-v --batch 2       4 bits, keys before rotary embedding, two rows
python examples/generate.py --prompt-tokens 200 --new-tokens 65   200 tokens of held-out text for a prompt
python examples/generate.py --dtype float64                       the same without float32's rounding
python examples/generate.py --lanes                               prefill, then steps in the form that is fastest

Dims: B rows, S tokens of a prompt, N new tokens, V vocabulary.
"""

import argparse
import json
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import graphquant as gq
from graphquant.config import PRESETS
from graphquant.data import batches, split_rows, token_rows, topics_text
from graphquant.loops import runnable
from graphquant.models import load_model
from graphquant.progress import working
from graphquant.tables import cell

Model = torch.nn.Module
PROMPT = "Python is a programming language that"


def main() -> None:
    """Complete the prompts from a stored cache, and say how that differs from the fake-quant model."""
    options = parse()
    with working("loading"):
        loaded = load_model("smollm2")
    model = loaded.model.to(getattr(torch, options.dtype))
    model.model.layers = model.model.layers[: options.layers]
    model.config.num_hidden_layers = len(model.model.layers)
    rows = token_rows(loaded.tokenizer, topics_text(), options.length)
    calibration_rows, held_out = split_rows(rows, options.samples, 1)
    ids = prompts(options, loaded.tokenizer, held_out[0])
    with working("capturing"):
        prepared = gq.prepare(model, gq.preset(options.preset))
        program = gq.capture(model, cache="static", max_cache_len=options.max_cache_len, batch=len(ids))
    calibration = gq.calibrate(prepared, batches(calibration_rows))
    with working("converting"):
        stored = gq.convert(program, calibration, gq.preset(options.preset), kv_cache="stored")
        if options.compile:
            stored = gq.fold_scales(gq.pack_gqa(stored))
        step = module = runnable(stored)  # with buffers of its own: those of the program stay empty
        if options.lanes:
            step = runnable(gq.fuse_decode(gq.fold_scales(gq.pack_gqa(gq.specialize(stored, sequence=1)))))
    if options.compile or options.lanes:
        step = torch.compile(step, dynamic=False)
    new, logits = decode(module, step, ids, options.new_tokens, carry=options.lanes)
    whole = torch.cat([ids, new], 1)
    texts = [loaded.tokenizer.decode(row) for row in whole]
    facts = {"preset": options.preset, "prompt tokens": ids.shape[1]}
    facts |= compare(prepared, whole, logits) | sizes(program, stored)
    if options.json:
        print(json.dumps(facts | {"texts": texts}))
    else:
        print(*texts, tabulate([(name, cell(value)) for name, value in facts.items()], tablefmt="plain"), sep="\n\n")


def parse() -> argparse.Namespace:
    """The options; counts are at least 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="int8-kv-attn-head", help="what to quantize, and how")
    prompt = parser.add_mutually_exclusive_group().add_argument
    prompt("--prompt", action="append", help="give it again for more rows; all of as many tokens")
    prompt("--prompt-tokens", type=count, help="that many tokens of held-out text, up to --length")
    add("--batch", type=count, help="that many rows of the one prompt")
    add("--new-tokens", type=count, default=24, help="tokens to complete each prompt with")
    add("--max-cache-len", type=count, default=512, help="tokens that the cache has room for")
    add("--samples", type=count, default=8, help="rows to calibrate on")
    add("--length", type=count, default=256, help="tokens a row")
    add("--layers", type=count, help="the first layers only")
    add("--dtype", choices=("float32", "float64"), default="float32", help="of the model; codes stay what they are")
    compiled = parser.add_mutually_exclusive_group().add_argument
    compiled("--compile", action="store_true", help="pack the heads, fold the scales, and torch.compile the step")
    compiled("--lanes", action="store_true", help="the step in lanes too: a graph of its own, of one token, compiled")
    add("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def count(text: str) -> int:
    """A number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def prompts(options: argparse.Namespace, tokenizer: Any, text: Tensor) -> Tensor:
    """The prompts ``[B, S]``; an error where they are of several lengths, or the cache has no room for them."""
    ids = [tokenizer(prompt).input_ids for prompt in options.prompt or [PROMPT]]
    if options.prompt_tokens is not None:
        ids = [text[: options.prompt_tokens].tolist()]
        if len(text) < options.prompt_tokens:
            raise SystemExit(f"--prompt-tokens {options.prompt_tokens} is beyond the {len(text)} tokens of --length")
    if options.batch is not None and len(ids) > 1:
        raise SystemExit(f"--batch {options.batch} repeats one prompt, and there are {len(ids)}")
    lengths = [len(row) for row in ids]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise SystemExit(f"the prompts have {', '.join(map(str, lengths))} tokens: expected as many in each, 1 or more")
    needed = lengths[0] + options.new_tokens - 1  # the last token is not read again
    if needed > options.max_cache_len:
        raise SystemExit(
            f"{lengths[0]} tokens of prompt and {options.new_tokens} new ones need a cache of {needed} tokens, and "
            f"--max-cache-len is {options.max_cache_len}"
        )
    return torch.tensor(ids).repeat(options.batch or 1, 1)


@torch.no_grad()
def decode(prefill: Model, step: Model, ids: Tensor, new_tokens: int, *, carry: bool = False) -> tuple[Tensor, Tensor]:
    """Greedy: the new tokens ``[B, N]``, and the logits ``[B, N, V]`` that each was taken from.

    ``carry`` where the step has caches of its own.
    """
    seen = ids.shape[1]
    logits = [prefill(input_ids=ids, cache_position=torch.arange(seen))[:, -1]]
    if carry:
        gq.carry_caches(prefill, step)
    token = [logits[0].argmax(-1, keepdim=True)]
    for position in tqdm(range(seen, seen + new_tokens - 1), desc="decoding", unit="token", delay=2.0, leave=False):
        logits.append(step(input_ids=token[-1], cache_position=torch.tensor([position]))[:, -1])
        token.append(logits[-1].argmax(-1, keepdim=True))
    return torch.cat(token, 1), torch.stack(logits, 1)


@torch.no_grad()
def compare(prepared: torch.fx.GraphModule, ids: Tensor, logits: Tensor) -> dict[str, Any]:
    """The next tokens and the logits of the fake-quant model on the whole text; a step's, by its largest logit."""
    gq.set_mode(prepared, "fake_quant")
    with working("comparing"):
        whole = prepared(input_ids=ids, attention_mask=torch.ones_like(ids))
    expected = whole[:, -1 - logits.shape[1] : -1]
    off = (logits - expected).abs().amax(-1) / expected.abs().amax(-1)
    same = logits.argmax(-1) == expected.argmax(-1)
    facts = {"top-1 agreement": same.float().mean(), "median difference": off.median(), "largest difference": off.max()}
    return {"compared tokens": off.numel()} | {name: value.item() for name, value in facts.items()}


def sizes(program: torch.export.ExportedProgram, stored: torch.export.ExportedProgram) -> dict[str, int]:
    """Bytes of the cache, as it is stored and as it would be in floats."""
    codes, floats = (
        [value for name, value in part.constants.items() if name.startswith(("key_cache", "value_cache"))]
        for part in (stored, program)
    )
    held, values = sum(cache.nbytes for cache in codes), sum(cache.numel() for cache in floats)
    return {"cache bytes": held, "cache bytes in bf16": 2 * values, "cache bytes in fp32": 4 * values}


if __name__ == "__main__":
    main()
