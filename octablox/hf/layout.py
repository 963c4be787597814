"""Which tensor of a Hugging Face checkpoint is which parameter: one table, read both ways.

A Hugging Face linear weight is [outputs, inputs], a parameter here [inputs, outputs]. Gate and up
are one parameter [inputs, 2, outputs], and the experts of a layer one parameter, experts first.
RoPE rotates neighbours in both, so that nothing is permuted.

Names of parameters are those of `transformer.parameter_specs`, joined by dots, with the layer's
number after the kind of layers: `moe_layers.0.experts.down`. The multi-token prediction layer is
`mtp`, its one layer `mtp.layers.0`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from octablox.fp8_blocks import grid
from octablox.model.config import ModelConfig
from octablox.moe.config import MoeConfig

SCALE = "_scale_inv"  # the end of the name of a weight's scales, in a Hugging Face checkpoint


class Row(NamedTuple):
    """One line of the table.

    Attributes:
      ours: the parameter's name after its layer's.
      theirs: the tensors' names after their layer's; {e} is an expert. Several are gate and up.
      linear: whether it is transposed.
      fp8: whether DeepSeek's FP8 checkpoints hold it in e4m3 with a scale for each block.
    """

    ours: str
    theirs: tuple[str, ...]
    linear: bool = True
    fp8: bool = True


def _plain(ours: str, theirs: str) -> Row:
    return Row(ours, (theirs,), linear=False, fp8=False)


def _swiglu(ours: str, theirs: str) -> tuple[Row, Row]:
    gate_up = Row(f"{ours}.gate_up", (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"))
    return gate_up, Row(f"{ours}.down", (f"{theirs}.down_proj.weight",))


TOP = (
    _plain("embedding", "model.embed_tokens.weight"),
    _plain("final_norm", "model.norm.weight"),
    Row("head", ("lm_head.weight",), fp8=False),
)
ATTENTION = (
    _plain("attention.norm", "input_layernorm.weight"),
    Row("attention.q", ("self_attn.q_proj.weight",)),
    Row("attention.q_a", ("self_attn.q_a_proj.weight",)),
    _plain("attention.q_norm", "self_attn.q_a_layernorm.weight"),
    Row("attention.q_b", ("self_attn.q_b_proj.weight",)),
    Row("attention.kv_a", ("self_attn.kv_a_proj_with_mqa.weight",)),
    _plain("attention.kv_norm", "self_attn.kv_a_layernorm.weight"),
    Row("attention.kv_b", ("self_attn.kv_b_proj.weight",)),
    Row("attention.out", ("self_attn.o_proj.weight",)),
)
DENSE = (
    *ATTENTION,
    _plain("mlp.norm", "post_attention_layernorm.weight"),
    *_swiglu("mlp", "mlp"),
)
MOE = (
    *ATTENTION,
    _plain("router.norm", "post_attention_layernorm.weight"),
    Row("router.gate", ("mlp.gate.weight",), fp8=False),
    _plain("router.bias", "mlp.gate.e_score_correction_bias"),
    *_swiglu("experts", "mlp.experts.{e}"),
    *_swiglu("shared", "mlp.shared_experts"),
)
MTP = (
    _plain("embedding_norm", "enorm.weight"),
    _plain("hidden_norm", "hnorm.weight"),
    Row("projection", ("eh_proj.weight",), fp8=False),
    _plain("final_norm", "shared_head.norm.weight"),
)
# What the multi-token prediction layer shares with the model, and checkpoints hold twice.
MTP_COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}
# What may stand in a checkpoint and follows from its config.
DERIVED = ("rotary_emb.inv_freq",)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint, and where its values are here.

    Attributes:
      theirs: its name.
      shape: of the tensor there.
      ours: the parameter's name.
      expert: its index in the parameter's first dim, or None if that has no experts.
      part: 0 gate, 1 up; None if the parameter is not both.
      row: of the table.
      experts: how many the parameter has, if it has any.
      copy: whether another entry is the parameter's own, of which this is a copy.
    """

    theirs: str
    shape: tuple[int, ...]
    ours: str
    expert: int | None
    part: int | None
    row: Row
    experts: int = 0
    copy: bool = False

    def view(self, parameter: Any) -> Any:
        """The values in the tensor's own layout, of the parameter (or of the parameter's scales).

        `parameter` is anything that is indexed and transposed as NumPy's arrays are.
        """
        if self.expert is not None:
            parameter = parameter[self.expert]
        if self.part is not None:
            parameter = parameter[:, self.part]
        return parameter.T if self.row.linear else parameter


def entries(model: ModelConfig, moe: MoeConfig) -> list[Entry]:
    """Every tensor of a model, in the order of its layers."""
    return list(_entries(model, moe))


def parameter_shape(entry: Entry) -> tuple[int, ...]:
    """Of the whole parameter that the tensor is, or is a part of."""
    return _our_shape(entry, entry.shape)


def scale_shape(entry: Entry) -> tuple[int, ...]:
    """Of that parameter's scales, where it is held in FP8 blocks."""
    return _our_shape(entry, grid(entry.shape))


def _our_shape(entry: Entry, shape: tuple[int, ...]) -> tuple[int, ...]:
    if entry.row.linear:
        shape = shape[::-1]
    if entry.part is not None:
        shape = (shape[0], len(entry.row.theirs), *shape[1:])
    return shape if entry.expert is None else (entry.experts, *shape)


def _entries(model: ModelConfig, moe: MoeConfig) -> Iterator[Entry]:
    shapes = _shapes(model, moe)
    embedding, final_norm, head = (_of_row(row, row.ours, "", shapes, moe) for row in TOP)
    yield from embedding
    dense = model.first_num_dense_layers
    for n in range(model.base_num_decoder_layers):
        kind, rows, at = ("dense_layers", DENSE, n) if n < dense else ("moe_layers", MOE, n - dense)
        for row in rows:
            yield from _of_row(row, f"{kind}.{at}.{row.ours}", f"model.layers.{n}.", shapes, moe)
    yield from final_norm
    yield from head
    if model.mtp_num_layers:
        prefix = f"model.layers.{model.base_num_decoder_layers}."
        for row in MTP:
            yield from _of_row(row, f"mtp.{row.ours}", prefix, shapes, moe)
        for row in MOE:
            yield from _of_row(row, f"mtp.layers.0.{row.ours}", prefix, shapes, moe)
        by_name = {row.theirs[0]: row for row in TOP}
        for name, original in MTP_COPIES.items():
            row = by_name[original]
            yield Entry(prefix + name, shapes[row.ours], row.ours, None, None, row, copy=True)


def _of_row(
    row: Row, ours: str, prefix: str, shapes: dict[str, tuple[int, ...]], moe: MoeConfig
) -> Iterator[Entry]:
    """The tensors of one row in one layer; none where the model has no such parameter."""
    if row.ours not in shapes:
        return
    parts = range(len(row.theirs)) if len(row.theirs) > 1 else (None,)
    experts = range(moe.num_experts) if "{e}" in row.theirs[0] else (None,)
    for expert in experts:
        for part in parts:
            theirs = prefix + row.theirs[part or 0].format(e=expert)
            yield Entry(theirs, shapes[row.ours], ours, expert, part, row, moe.num_experts)


def _shapes(model: ModelConfig, moe: MoeConfig) -> dict[str, tuple[int, ...]]:
    """A row's name -> the shape of its tensors, [outputs, inputs] of linear weights."""
    d, heads = model.base_emb_dim, model.base_num_query_heads
    q_lora, kv_lora = model.q_lora_rank, model.kv_lora_rank
    nope, rope, v = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (model.vocab_size, d),
        "final_norm": (d,),
        "head": (model.vocab_size, d),
        "attention.norm": (d,),
        "attention.kv_a": (kv_lora + rope, d),
        "attention.kv_norm": (kv_lora,),
        "attention.kv_b": (heads * (nope + v), kv_lora),
        "attention.out": (d, heads * v),
        "mlp.norm": (d,),
        "router.norm": (d,),
        "router.gate": (moe.num_experts, d),
        "embedding_norm": (d,),
        "hidden_norm": (d,),
        "projection": (d, 2 * d),
    }
    if moe.routed_score_func == "sigmoid":
        shapes["router.bias"] = (moe.num_experts,)
    if q_lora:
        shapes["attention.q_a"] = (q_lora, d)
        shapes["attention.q_norm"] = (q_lora,)
        shapes["attention.q_b"] = (heads * (nope + rope), q_lora)
    else:
        shapes["attention.q"] = (heads * (nope + rope), d)
    shared = moe.shared_experts * moe.base_moe_mlp_dim
    widths = {"mlp": model.base_mlp_dim, "experts": moe.base_moe_mlp_dim, "shared": shared}
    for name, width in widths.items():
        if width:
            shapes |= {f"{name}.gate_up": (width, d), f"{name}.down": (d, width)}
    return shapes
