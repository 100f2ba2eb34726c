"""What torch's operations are: matmuls, views, casts, what they save for backward; and the bytes of a dtype.

The one place that says so, by their names in a recording (``matmul``), in a trace (``aten::mm``) and of their nodes
(``MmBackward0``). Rules and patterns that mean fewer of them say which, beside these.
"""

from __future__ import annotations

import re


def names(*lines: str) -> frozenset[str]:
    """Return the names of operations in ``lines``, separated by spaces."""
    return frozenset(name for line in lines for name in line.split())


# Of matrices, any number of them in a batch.
MATMULS = names("matmul rmatmul linear mm bmm addmm addbmm baddbmm einsum tensordot")
# Of these, those of two activations: queries with keys, weights with values.
BATCHED_MATMULS = names("matmul rmatmul bmm baddbmm einsum")
CONVOLUTIONS = names("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution")
ATTENTION = "scaled_dot_product_attention"
# All whose FLOPs are multiplications of many numbers for each that is read.
PRODUCTS = MATMULS | CONVOLUTIONS | {ATTENTION} | names("mv dot addmv bilinear outer inner")

# The same numbers in the same memory, in another shape. The first are given the new sizes.
RESHAPES_TO_SIZES = names("view reshape unflatten")
RESHAPES_OR_FLATTEN = RESHAPES_TO_SIZES | {"flatten"}
RESHAPES = RESHAPES_OR_FLATTEN | names("view_as reshape_as ravel squeeze unsqueeze")
TURNS = names("transpose swapaxes swapdims t T mT H mH adjoint permute movedim moveaxis")
EXPANSIONS = names("expand expand_as broadcast_to")
# Some of the numbers, in the same memory.
PARTS = names(
    "getitem narrow select diagonal unfold chunk split tensor_split hsplit vsplit dsplit unbind",
    "unsafe_chunk unsafe_split split_with_sizes as_strided",
)
VIEWS = RESHAPES | TURNS | EXPANSIONS | PARTS
# Another dtype, or the tensor itself where it has that already; those of the first line say in their name which.
CASTS_TO_ONE = names("float double half bfloat16")
CASTS = CASTS_TO_ONE | names("to type type_as")
# The same numbers in memory of their own; contiguous returns its argument where that is so already.
COPIES = names("contiguous clone")
# They may return their argument's memory as it is: then they move nothing.
MAY_BE_VIEWS = (
    VIEWS
    | CASTS
    | names(
        "broadcast_tensors contiguous detach alias cpu cuda real imag view_as_real view_as_complex",
        "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout",
    )
)
# By a number, as scores and logits are scaled.
SCALES = names("mul div")
# Losses of logits, and of their logarithmic softmax.
LOSSES = names("cross_entropy nll_loss")
# They read as much of their source as they make.
PICKS = names("embedding index_select gather getitem take take_along_dim masked_select")

# What backward hands to an input is a view of the gradient, whatever the shapes are.
SPLITS_GRADIENT = names("cat stack hstack vstack sum reshape flatten contiguous clone")
# The gradient goes on as it is to an input of the same shape and dtype.
HANDS_GRADIENT_ON = CASTS | names("add sub")
# What is saved for backward, of floating numbers: none; each of the first two inputs, where the other wants a gradient;
# the first input; the result. An operation that is in none of these saves what it is not known to need less of.
SAVES_NOTHING = names(
    "neg mean masked_fill where tril triu embedding index_select gather getitem take take_along_dim masked_select",
    "cumsum pad roll flip repeat repeat_interleave tile scatter_add index_add rsub dropout avg_pool1d avg_pool2d",
    "adaptive_avg_pool1d adaptive_avg_pool2d interpolate pixel_shuffle",
)
SAVES_EACH_OTHER = (
    (MATMULS - {"addmm", "addbmm", "baddbmm", "einsum"}) | CONVOLUTIONS | names("mv dot mul div rdiv outer inner")
)
SAVES_INPUT = names("gelu silu layer_norm rms_norm group_norm batch_norm pow log sin cos")
SAVES_RESULT = names("relu tanh sigmoid softmax log_softmax exp sqrt rsqrt")

# As rows of a trace: what torch's dispatcher runs.
ATEN = "aten::"  # so their names begin
ATEN_MATMULS = names("aten::mm aten::bmm aten::addmm aten::baddbmm aten::_addmm_activation")
ATEN_CONVOLUTIONS = names(
    "aten::convolution aten::_convolution aten::mkldnn_convolution aten::cudnn_convolution aten::thnn_conv2d",
    "aten::cudnn_convolution_transpose",
)
ATEN_ATTENTION = "aten::_scaled_dot_product_"  # so begin the names of its kernels
# A linear has no row below it in inference mode, nor has what a library's operation calls; the products of groups, and
# of recurrent layers, have none on a device.
_PRODUCT_ROWS = (
    ATEN_MATMULS
    | ATEN_CONVOLUTIONS
    | names(
        "aten::linear aten::matmul aten::_grouped_mm aten::_scaled_grouped_mm",
        "aten::mkldnn_rnn_layer aten::_cudnn_rnn aten::miopen_rnn",
    )
)
ATEN_CASTS = names("aten::_to_copy aten::to")
ATEN_FILLS = names("aten::zero_ aten::fill_ aten::_foreach_zero_")  # of gradients, by zero_grad
# What these allocate is filled by a plain copy. contiguous, reshape, permute-then-view, matmul on strided operands and
# the gradient of a copied parameter all come down to clone; stack and hstack to cat; .half() and autocast to _to_copy.
ATEN_REPEAT = "aten::repeat"  # besides its result it allocates a few numbers, to index it with
ATEN_COPIES = names("aten::clone aten::cat aten::_to_copy aten::_reshape_copy") | {ATEN_REPEAT}
ATEN_EMPTIES = names("aten::empty aten::empty_like aten::empty_strided")

# What compiled graphs fuse into kernels of their own: none of these has a row there.
ATEN_FUSED = ATEN_COPIES | names(
    "aten::add aten::add_ aten::sub aten::sub_ aten::mul aten::mul_ aten::div aten::div_ aten::neg aten::abs aten::pow",
    "aten::exp aten::log aten::sqrt aten::rsqrt aten::reciprocal aten::sin aten::cos aten::erf aten::clamp aten::where",
    "aten::clamp_min aten::clamp_max aten::maximum aten::minimum aten::masked_fill aten::masked_fill_ aten::copy_",
    "aten::sum aten::mean aten::var aten::var_mean aten::amax aten::cumsum aten::bernoulli_ aten::addcmul",
    "aten::relu aten::relu_ aten::threshold_backward aten::gelu aten::gelu_backward aten::silu aten::silu_backward",
    "aten::sigmoid aten::sigmoid_backward aten::tanh aten::tanh_backward aten::softplus aten::softplus_backward",
    "aten::leaky_relu aten::leaky_relu_backward aten::elu aten::elu_backward aten::hardtanh aten::hardtanh_backward",
    "aten::hardswish aten::hardswish_backward aten::mish aten::mish_backward aten::log_sigmoid_forward",
    "aten::native_layer_norm aten::native_layer_norm_backward aten::native_group_norm aten::native_group_norm_backward",
    "aten::native_batch_norm aten::native_batch_norm_backward aten::_fused_rms_norm aten::_fused_rms_norm_backward",
    "aten::native_dropout aten::native_dropout_backward aten::_softmax aten::_softmax_backward_data",
    "aten::_log_softmax aten::_log_softmax_backward_data aten::nll_loss_forward aten::nll_loss_backward",
    "aten::mse_loss aten::mse_loss_backward aten::binary_cross_entropy_with_logits aten::smooth_l1_loss",
)

COMPILED_GRAPH = "## Call CompiledFxGraph"  # so begins the row of a graph of Inductor's

# Between ranks: so the names of their rows begin.
SPLIT_LAYERS = "_c10d_functional::"  # DTensor's collectives, of which tensor parallel is made
WRAPPED = ("FullyShardedDataParallel._", "FullyShardedDataParallel.rate_limiter")  # the older FSDP, a wrapping module
SHARDING = ("FSDP::", *WRAPPED)
COLLECTIVES = (
    "c10d::",
    "nccl:",
    "gloo:",
    "mpi:",
    "record_param_comms",
    SPLIT_LAYERS,
    "torch::distributed::reducer::",  # DDP's, before a collective
    "torch.distributed.ddp.reducer::",  # and behind it
)
WAIT_ROW = "c10d::wait"  # so begin gradscope's own rows around a wait that Python makes
UNKNOWN_WAIT = "a collective"  # where torch does not say for which
WAITS = "(waits for "  # so the names of waits begin in tables, which have no rows of their own
WAIT = WAITS + "other ranks)"  # behind the last node of a pass
COLLECTIVE_KERNEL = re.compile(
    r"^(?!triton_).*(?:nccl|rccl|oneccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)", re.IGNORECASE
)  # anywhere in the name of a device's kernel; Inductor's bear those of all that they compute

# As nodes of a graph.
CAST_NODE = "ToCopyBackward0"
LINEAR_NODES = names("AddmmBackward0 MmBackward0 LinearBackward0")
NODE_OF = {
    "gelu": "GeluBackward0",
    "silu": "SiluBackward0",
    "layer_norm": "NativeLayerNormBackward0",
    "group_norm": "NativeGroupNormBackward0",
    "rms_norm": "FusedRmsNormBackward0",
}


def is_product(row: str) -> bool:
    """Check that what a row is called multiplies matrices, convolves or attends."""
    return row in _PRODUCT_ROWS or row.startswith(ATEN_ATTENTION)


def item_bytes(dtype: str) -> int:
    """Return bytes of one element: the first number in the name of its dtype has the bits."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits.group()) // 8, 1) if bits else 1


# What Inductor calls the kernels that it generates, and AOTAutograd the node of a compiled graph.
GENERATED = ("cpp_", "triton_")
COMPILED_NODE = "CompiledFunctionBackward"
CACHE_LOOKUP = "TorchDynamo Cache Lookup"  # of a function that may have been compiled
COMPILED_REGION = "Torch-Compiled Region"  # so begins the name of each row of a function that Dynamo made
OF_TORCH = "a model or a function of torch's own"  # a compiled one, none of whose code is the program's
# Autograd makes it for a value that a compiled graph returns and the loss does not use.
ZEROS_OF_UNUSED = "aten::zeros (gradient of an unused output)"
