"""PT2E users compose the attention sites with torchao's quantizers of linears, and get our path's scales and values."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.errors import SelectorError, StrategyError
from tests.passes.helpers import args, both, calibrated, config
from tests.tiny import tiny_batch, tiny_llama

pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
from torchao.quantization.pt2e.quantizer import ComposableQuantizer  # noqa: E402
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86  # noqa: E402

from graphquant.integrations.torchao import AttentionQuantizer  # noqa: E402

BATCHES = [tiny_batch(3, 11), tiny_batch(2, 7, seed=1)]
MIXES = {
    "states": config("states", args("tensor"), args("attn_head"), args("channel", num_bits=4)),
    "asymmetric": config("states", *(args(s, symmetric=False) for s in ("tensor", "attn_head", "channel"))),
    "both": both(config("states", args("attn_head")), config("outputs", args("channel"))),
}


@pytest.fixture(scope="module")
def one_layer() -> ExportedProgram:
    return gq.capture(tiny_llama(num_hidden_layers=1))


def through_pt2e(program: ExportedProgram, quantizer: object) -> torch.fx.GraphModule:
    prepared = pt2e.prepare_pt2e(program.module(), quantizer)
    with torch.no_grad():
        for batch in BATCHES:
            prepared(**batch)
    return pt2e.convert_pt2e(prepared, fold_quantize=False)


@pytest.mark.parametrize("mix", MIXES)
def test_it_quantizes_as_our_own_path_does(one_layer: ExportedProgram, mix: str) -> None:
    theirs = through_pt2e(one_layer, AttentionQuantizer(MIXES[mix]))
    ours = gq.convert(calibrated(one_layer, MIXES[mix], BATCHES))
    pairs = [node for node in theirs.graph.nodes if "dequantize" in str(node.target)]
    assert len(pairs) == len(gq.report(ours).rows)
    batch = tiny_batch(2, 9, seed=4)
    with torch.no_grad():
        expected, original = ours.module()(**batch), one_layer.module()(**batch)
        torch.testing.assert_close(theirs(**batch), expected, rtol=1e-3, atol=1e-5)
    assert not torch.equal(expected, original)


def of_linears(name: str) -> object:
    """A quantizer of weights and inputs of linears, int8."""
    if name == "x86":
        return x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    module = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    quantizer = module.XNNPACKQuantizer().set_global(module.get_symmetric_quantization_config(is_per_channel=True))
    # It would turn integer scalars into float tensors, and the positions of the mask with them: no index any more.
    quantizer.transform_for_annotation = lambda model: model
    return quantizer


@pytest.mark.parametrize("name", ["x86", "xnnpack"])
def test_it_composes_with_a_quantizer_of_linears(one_layer: ExportedProgram, name: str) -> None:
    """The sites have our path's scales, and are quantized on top of what the other one does."""
    scheme = MIXES["states"]
    alone = through_pt2e(one_layer, of_linears(name))
    composed = through_pt2e(one_layer, ComposableQuantizer([AttentionQuantizer(scheme), of_linears(name)]))
    counts = [sum("dequantize_per" in str(node.target) for node in module.graph.nodes) for module in (alone, composed)]
    assert counts[1] > counts[0] > 0  # XNNPACK shares the scales of views among them: ours come in their place
    ours = gq.convert(calibrated(one_layer, scheme, BATCHES))
    scales = [value for key, value in ours.state_dict.items() if key.endswith("key_states_scale")]
    theirs = [value.flatten() for value in _scales(composed) if value.numel() == scales[0].numel()]
    assert any(torch.allclose(value, scales[0].flatten(), rtol=1e-4) for value in theirs)
    batch = tiny_batch(2, 9, seed=4)
    with torch.no_grad():
        found, original = composed(**batch), one_layer.module()(**batch)
        each = [module(**batch) for module in (alone, ours.module())]
    assert not torch.equal(found, each[0])
    assert (found - original).norm() < 1.5 * sum((one - original).norm() for one in each)


def _scales(module: torch.fx.GraphModule) -> list[Tensor]:
    """The scales along one dim that its per-channel ops are given."""
    return [
        torch.as_tensor(getattr(module, str(node.args[1].target)))
        for node in module.graph.nodes
        if "quantize_per_channel" in str(node.target) and node.args[1].op == "get_attr"
    ]


def test_a_projection_keeps_its_own_quantizer(one_layer: ExportedProgram) -> None:
    """Its output is a site of ours, its weight and input are theirs."""

    def quantized_weights(module: torch.fx.GraphModule) -> int:
        return sum(
            node.target == torch.ops.aten.linear.default and "dequantize" in str(node.args[1])
            for node in module.graph.nodes
        )

    ours = AttentionQuantizer(MIXES["both"])
    alone, composed = (
        through_pt2e(one_layer, q) for q in (of_linears("x86"), ComposableQuantizer([ours, of_linears("x86")]))
    )
    assert quantized_weights(composed) == quantized_weights(alone) == 8


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (2, 8)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        keys = k.new_empty(k.shape)
        keys[..., :3], keys[..., 3:] = k[..., :3], k[..., 3:]
        return nn.functional.scaled_dot_product_attention(q, keys, v).transpose(1, 2).flatten(2)


def test_a_tensor_that_is_filled_in_place_is_refused() -> None:
    program = gq.capture(Filled(), {"x": torch.randn(2, 5, 16)})
    with pytest.raises(StrategyError, match="is filled in place after its node, and PT2E observes behind the node"):
        AttentionQuantizer(gq.preset("int8-kv-tensor")).annotate(program.module())


@pytest.mark.parametrize(
    ("c", "message"),
    [
        (config("inputs", args()), "the input of a linear is for a quantizer of linears to annotate: leave it out"),
        (
            config("states", args("token")),
            "PT2E has one scale or scales along one dim, which int8 sym token dyn",
        ),
        (
            config("states", args("attn_head_channel")),
            "one scale or scales along one dim, which int8 sym attn_head_channel",
        ),
        (
            config("outputs", args("attn_head")),
            "use gq.prepare and gq.convert, or tensor, channel or attn_head",
        ),
        (config("states", args(type="float")), "PT2E's observers make int scales, not fp8_e4m3 tensor: use int"),
        (config("states", args(observer="mse")), "PT2E brings its own min/max observer, not 'mse'"),
    ],
)
def test_what_pt2e_cannot_say_is_refused(one_layer: ExportedProgram, c: gq.QuantizationConfig, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        AttentionQuantizer(c).annotate(one_layer.module())


def test_a_selector_that_selects_nothing(one_layer: ExportedProgram) -> None:
    scheme = gq.QuantizationScheme(targets=("re:none",), input_activations=args())
    with pytest.raises(SelectorError):
        AttentionQuantizer(gq.QuantizationConfig(config_groups={"x": scheme})).annotate(one_layer.module())
