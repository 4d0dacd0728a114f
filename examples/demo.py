"""The whole of graphquant on a real Llama: capture, prepare, calibrate, convert, report, evaluate, save, load, run.

make demo                                   or    python examples/demo.py --output model.pt2
"""

import argparse
from pathlib import Path

import torch
from tqdm import tqdm

import graphquant as gq
from graphquant.data import batches, split_rows, token_rows, topics_text
from graphquant.files import check_writable, written_whole
from graphquant.models import load_model
from graphquant.progress import working

RECIPE = Path(__file__).parent / "recipes" / "attention-int8.yaml"
PROMPT = "Python is a programming language that"


def main() -> None:
    """Quantize SmolLM2-135M-Instruct with the recipe, and show what it cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("model.pt2"), help="where to save the quantized program")
    parser.add_argument("--samples", type=int, default=8, help="rows to calibrate on, and as many to evaluate on")
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens to complete the sentence with")
    options = parser.parse_args()
    check_writable(options.output)

    print("loading SmolLM2-135M-Instruct (the first time: 93 MB to download, then about half a minute to unpack) …")
    with working("loading"):
        loaded = load_model("smollm2")
    rows = token_rows(loaded.tokenizer, topics_text(), options.length)
    calibration_rows, evaluation_rows = split_rows(rows, options.samples, options.samples)

    print("capturing the model with torch.export …")
    with working("capturing"):
        program = gq.capture(loaded.model)
    print("preparing: an observer and a fake-quant at every site that the recipe selects …")
    with working("preparing"):
        prepared = gq.prepare(program, gq.QuantizationConfig.from_recipe(RECIPE))
    print(f"calibrating on {len(calibration_rows)} rows of {options.length} tokens …")
    gq.calibrate(prepared, batches(calibration_rows))
    print("converting: the scales become constants of the program …")
    with working("converting"):
        quantized = gq.convert(prepared)

    print("measuring the error of every site on 2 other rows …\n")
    measurement = gq.measure(prepared, batches(evaluation_rows[:2]))
    print(gq.report(quantized, measurement))
    print(f"\nevaluating both programs on {len(evaluation_rows)} rows …\n")
    print(gq.evaluate({"original": program, "quantized": quantized}, batches(evaluation_rows)))

    print(f"\nsaving {options.output} …")
    with working("saving"), written_whole(options.output) as temporary:
        torch.export.save(quantized, temporary)
    print(f"saved {options.output} ({options.output.stat().st_size / 1e6:.0f} MB); loading it again …")
    with working("loading"):
        again = torch.export.load(options.output)
    print(complete(again, loaded.tokenizer, PROMPT, options.new_tokens))


def complete(program: torch.export.ExportedProgram, tokenizer: object, prompt: str, new_tokens: int) -> str:
    """Greedy continuation; the prefill graph has no cache, so every step reads the whole sequence again."""
    model = program.module()
    ids = tokenizer(prompt, return_tensors="pt").input_ids  # type: ignore[operator]
    with torch.no_grad():
        for _ in tqdm(range(new_tokens), desc="completing", unit="token", delay=2.0, leave=False):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids))
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return str(tokenizer.decode(ids[0]))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
