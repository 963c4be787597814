"""Small scheduled modules, written by hand in the form of a compiled TPU program."""

MESH = {"data": 1, "fsdp": 4, "expert": 2}
FORWARD = "jit(_step)/shard_map/jvp()/while/body/eval_jaxpr"
BACKWARD = "jit(_step)/shard_map/transpose(jvp())/while/body/eval_jaxpr"
PRODUCT_CYCLES = 2_200_000  # about a millisecond of a TPU7x


def module(entry: str, *others: str) -> str:
    """A module whose entry computation has these lines, beside other computations."""
    return "\n\n".join(
        [
            "HloModule jit__step, is_scheduled=true, entry_computation_layout={()->()}",
            _PRODUCT,
            *others,
            f"ENTRY %main (a: bf16[512,512]) -> bf16[512,512] {{\n{entry.strip(chr(10))}\n}}",
        ]
    )


_PRODUCT = """\
%fused_product (x: bf16[512,512], y: bf16[512,512]) -> bf16[512,512] {
  %x = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(0)
  %y = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution = bf16[512,512]{1,0} convolution(%x, %y), dim_labels=bf_io->bf
}"""


def product(name: str, place: str = FORWARD, cycles: int = PRODUCT_CYCLES) -> str:
    """A line with a dense product of `%a` with itself."""
    return (
        f"  %{name} = bf16[512,512]{{1,0}} fusion(%a, %a), kind=kOutput, calls=%fused_product, "
        f'metadata={{op_name="{place}/dot_general" stack_frame_id=1}}, '
        f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    )


PARAMETER = "  %a = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(0)"


def groups(*axes: str) -> str:
    names = ",".join(f"'{axis}'" for axis in axes)
    sizes = ",".join(f"'{axis}'={size}" for axis, size in MESH.items())
    return f"replica_groups=mesh[{sizes}] {{{names}}}"


def collective(name: str, kind: str, where: str, place: str, rows: int = 512) -> str:
    """A computation that a start calls: one collective of a bf16 [rows, 512]."""
    return f"""\
%{name} (p: bf16[{rows},512]) -> bf16[{rows},512] {{
  %p = bf16[{rows},512]{{1,0}} parameter(0)
  ROOT %inner.{name} = bf16[{rows},512]{{1,0}} {kind}(%p), channel_id=1, {where}, \
dimensions={{0}}, use_global_device_ids=true, metadata={{op_name="{place}"}}
}}"""


def start(name: str, called: str) -> str:
    """As on chips with SparseCores: the operand comes with the update."""
    return (
        f"  %{name}-start = ((), (), (s32[8192]{{0:T(1024)}}, s32[0]{{0:S(8)}})) "
        f'custom-call-start(), async_execution_thread="sparsecore", '
        f'custom_call_target="x(y)", called_computations={{%{called}}}'
    )


def update(name: str, operand: str = "a") -> str:
    return (
        f"  %{name}-update = ((bf16[512,512]{{1,0}}), bf16[512,512]{{1,0}}) "
        f"custom-call-update(%{name}-start, %{operand})"
    )


def done(name: str) -> str:
    return f"  %{name}-done = bf16[512,512]{{1,0}} custom-call-done(%{name}-update)"


def loop(body: str, trips: str = "5", *, place: str = "jit(_step)/shard_map/jvp()/while") -> str:
    """A body and a condition of a loop; `while_line` calls them."""
    return f"""\
%body (t: (s32[], bf16[512,512])) -> (s32[], bf16[512,512]) {{
  %t = (s32[], bf16[512,512]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %a = bf16[512,512]{{1,0}} get-tuple-element(%t), index=1
{body.strip(chr(10))}
  ROOT %out = (s32[], bf16[512,512]{{1,0}}) tuple(%i, %a)
}}

%condition (t: (s32[], bf16[512,512])) -> pred[] {{
  %t = (s32[], bf16[512,512]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %limit = s32[] {trips if "(" in trips else f"constant({trips})"}
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}}"""


def while_line(place: str = "jit(_step)/shard_map/jvp()") -> str:
    return (
        "  %init = (s32[], bf16[512,512]{1,0}) tuple(%a, %a)\n"
        "  %loop = (s32[], bf16[512,512]{1,0}) while(%init), condition=%condition, body=%body, "
        f'metadata={{op_name="{place}/while" stack_frame_id=1}}'
    )
