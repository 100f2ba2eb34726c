"""Truth: what torch's own layers keep for backward, worked out from shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from .measuring import F32, I64, Kept, assert_saved, layer, line_of, measured, memory_of, place

ROWS, WIDTH, HIDDEN = 8, 16, 32
X = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
WIDE = ROWS * HIDDEN * F32  # an activation of HIDDEN features: 1,024 bytes

#: The Linear below every layer of interest keeps its input, the batch.
STEM = Kept("0", "AddmmBackward0", "mat1", "8x16", "float32", ROWS * WIDTH * F32)


def on_stem(*layers: nn.Module) -> nn.Module:
    """``layers`` after a Linear, so that their input needs a gradient."""
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), *layers)


def test_linear_keeps_its_input_and_never_its_weight() -> None:
    data = measured(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 4)), X)
    assert_saved(data, STEM, Kept("1", "AddmmBackward0", "mat1", "8x32", "float32", WIDE))


def test_linear_of_more_dimensions_keeps_its_input_flattened() -> None:
    x = torch.ones(2, 3, WIDTH)
    data = measured(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 4)), x)
    assert_saved(
        data,
        Kept("0", "AddmmBackward0", "mat1", "6x16", "float32", 2 * 3 * WIDTH * F32),
        Kept("1", "AddmmBackward0", "mat1", "6x32", "float32", 2 * 3 * HIDDEN * F32),
    )


def test_totals_hold_what_lies_at_any_depth() -> None:
    deep = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(HIDDEN, HIDDEN)), nn.Linear(HIDDEN, HIDDEN)))
    data = measured(on_stem(deep), X)
    kept = [Kept(path, "AddmmBackward0", "mat1", "8x32", "float32", WIDE) for path in ("1.0.0.0", "1.0.1")]
    assert_saved(data, STEM, *kept)
    assert [layer(data, path).saved_total_bytes for path in ("1.0.0.0", "1.0.0", "1.0", "1")] == [
        WIDE,
        WIDE,
        2 * WIDE,
        2 * WIDE,
    ]


def test_a_frozen_linear_keeps_nothing() -> None:
    """The gradient of its input needs the weight alone."""
    frozen = nn.Linear(HIDDEN, 4).requires_grad_(False)
    assert_saved(measured(on_stem(frozen), X), STEM)


def test_layer_norm_keeps_input_mean_and_deviation() -> None:
    node = "NativeLayerNormBackward0"
    assert_saved(
        measured(on_stem(nn.LayerNorm(HIDDEN)), X),
        STEM,
        Kept("1", node, "input", "8x32", "float32", WIDE),
        Kept("1", node, "result1", "8x1", "float32", ROWS * F32),
        Kept("1", node, "result2", "8x1", "float32", ROWS * F32),
    )


def test_softmax_keeps_its_output() -> None:
    data = measured(on_stem(nn.Softmax(-1)), X)
    assert_saved(data, STEM, Kept("1", "SoftmaxBackward0", "output", "8x32", "float32", WIDE))


def test_dropout_keeps_its_mask() -> None:
    """On the CPU the mask is a float tensor, already divided by the probability to keep."""
    data = measured(on_stem(nn.Dropout(0.5)), X)
    assert_saved(data, STEM, Kept("1", "MulBackward0", "other", "8x32", "float32", WIDE))


def test_dropout_in_eval_mode_keeps_nothing() -> None:
    assert_saved(measured(on_stem(nn.Dropout(0.5)).eval(), X), STEM)


def test_gelu_keeps_its_input() -> None:
    assert_saved(measured(on_stem(nn.GELU()), X), STEM, Kept("1", "GeluBackward0", "self", "8x32", "float32", WIDE))


@pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])
def test_relu_keeps_its_output(inplace: bool) -> None:
    data = measured(on_stem(nn.ReLU(inplace)), X)
    assert_saved(data, STEM, Kept("1", "ReluBackward0", "output", "8x32", "float32", WIDE))


def test_a_storage_that_a_neighbour_keeps_counts_once() -> None:
    """The output of ReLU is the input of the next Linear: the first node to keep it gets the bytes."""
    data = measured(on_stem(nn.ReLU(), nn.Linear(HIDDEN, 4)), X)
    assert_saved(data, STEM, Kept("1", "ReluBackward0", "output", "8x32", "float32", WIDE))


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def test_a_tensor_kept_twice_by_one_node_counts_once() -> None:
    data = measured(on_stem(Squares()), X)
    assert_saved(data, STEM, Kept("1", "MulBackward0", "other", "8x32", "float32", WIDE))


def test_convolution_batch_norm_relu_and_pooling() -> None:
    """2 images of 3 channels, 8x8: four channels, and half as many rows and columns after the pool."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(4 * 4 * 4, 2),
    )  # fmt: skip
    norm, maps = "NativeBatchNormBackward0", 2 * 4 * 8 * 8 * F32
    assert_saved(
        measured(model, torch.ones(2, 3, 8, 8)),
        Kept("0", "ConvolutionBackward0", "input", "2x3x8x8", "float32", 2 * 3 * 8 * 8 * F32),
        Kept("1", norm, "input", "2x4x8x8", "float32", maps),
        Kept("1", norm, "result1", "4", "float32", 4 * F32),  # mean of the batch; running_mean is a buffer
        Kept("1", norm, "result2", "4", "float32", 4 * F32),  # 1 / deviation
        Kept("2", "ReluBackward0", "output", "2x4x8x8", "float32", maps),  # which the pool keeps, too
        Kept("3", "MaxPool2DWithIndicesBackward0", "result1", "2x4x4x4", "int64", 2 * 4 * 4 * 4 * I64),
        Kept("5", "AddmmBackward0", "mat1", "2x64", "float32", 2 * 64 * F32),
    )


def test_batch_norm_in_eval_mode_keeps_its_input_alone() -> None:
    """The running statistics are buffers."""
    model = on_stem(nn.BatchNorm1d(HIDDEN)).eval()
    assert_saved(measured(model, X), STEM, Kept("1", "NativeBatchNormBackward0", "input", "8x32", "float32", WIDE))


def test_embedding_keeps_its_indices() -> None:
    """Ten rows of six: the table is a parameter."""
    ids = torch.arange(2 * 5).reshape(2, 5)
    assert_saved(
        measured(nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 6)), ids),
        Kept("0", "EmbeddingBackward0", "indices", "2x5", "int64", 2 * 5 * I64),
        Kept("1", "AddmmBackward0", "mat1", "10x6", "float32", 2 * 5 * 6 * F32),
    )


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(ids))
        return out


def test_a_tied_weight_is_a_parameter_in_both_layers() -> None:
    ids = torch.arange(5)
    data = measured(Tied(), ids)
    assert_saved(
        data,
        Kept("embed", "EmbeddingBackward0", "indices", "5", "int64", 5 * I64),
        Kept("head", "MmBackward0", "self", "5x6", "float32", 5 * 6 * F32),
    )


class Unnamed(nn.Module):
    """Keeps memory on lines of its own, outside of every child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale  # keeps x
        return scaled.exp()  # keeps its output


def test_functional_code_is_charged_to_its_module_and_line() -> None:
    x = torch.ones(ROWS, WIDTH)
    data = measured(nn.Sequential(Unnamed()), x, lambda out, _: out.tanh().sum())  # outside of every module
    size = ROWS * WIDTH * F32
    assert_saved(
        data,
        Kept("0", "MulBackward0", "self", "8x16", "float32", size),
        Kept("0", "ExpBackward0", "output", "8x16", "float32", size),
        Kept(None, "TanhBackward0", "output", "8x16", "float32", size),
    )
    lines = {(row.node, place(row.line)) for row in memory_of(data).saved}
    assert lines == {
        ("MulBackward0", line_of("keeps x", __file__)),
        ("ExpBackward0", line_of("keeps its output", __file__)),
        ("TanhBackward0", line_of("outside of every module", __file__)),
    }
    by_line = {f"{place(row.file)}:{row.line}": row.saved_bytes for row in data.lines if row.saved_bytes}
    assert by_line == {line: size for _, line in lines}
