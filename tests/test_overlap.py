"""What is read from a compiled schedule, on small modules written by hand."""

import dataclasses

import hlo_modules as hm
import pytest
import tiny_model

from octablox.aot import compiler, hlo
from octablox.aot.chips import parse_topology
from octablox.aot.collectives import phase_of
from octablox.aot.costs import Costs
from octablox.aot.overlap import read_schedule

CHIP = parse_topology("tpu7x:2x2x1").chip
# All-gather over fsdp: three more shards come in.
GATHERED = 3 * 512 * 512 * 2
PRODUCT_SECONDS = hm.PRODUCT_CYCLES / CHIP.clock


def read(text, *, chip=CHIP, mesh=None, **settings):
    return read_schedule(hlo.parse(text), chip, mesh or hm.MESH, **settings)


def gather(place=f"{hm.FORWARD}/all_gather", kind="all-gather", axes=("fsdp",)):
    return hm.collective("gathers", kind, hm.groups(*axes), place)


def lines(*some):
    return "\n".join([hm.PARAMETER, *some, "  ROOT %r = bf16[512,512]{1,0} bitcast(%a)"])


def test_a_transfer_under_a_product_is_overlapped_and_hidden():
    entry = lines(hm.start("g", "gathers"), hm.update("g"), hm.product("p"), hm.done("g"))
    schedule = read(hm.module(entry, gather()))
    (one,) = schedule.collectives
    assert (one.kind, one.axes, one.phase) == ("all-gather", "fsdp", "forward")
    assert (one.times, one.products, one.is_async) == (1, 1, True)
    assert one.bytes == GATHERED
    assert one.seconds == GATHERED / CHIP.ring_rate
    assert one.exposed == 0.0
    assert schedule.seconds == schedule.compute["forward"] == PRODUCT_SECONDS


def test_a_transfer_that_is_awaited_at_once_is_exposed():
    # So the schedule is with the latency hiding scheduler off.
    entry = lines(hm.start("g", "gathers"), hm.update("g"), hm.done("g"), hm.product("p"))
    schedule = read(hm.module(entry, gather()))
    (one,) = schedule.collectives
    assert (one.products, one.exposed) == (0, one.seconds)
    assert schedule.seconds == pytest.approx(PRODUCT_SECONDS + one.seconds, rel=1e-12)


def test_what_a_product_does_not_cover_is_exposed():
    slow = dataclasses.replace(CHIP, ring_rate=GATHERED / (3 * PRODUCT_SECONDS))
    entry = lines(hm.start("g", "gathers"), hm.update("g"), hm.product("p"), hm.done("g"))
    (one,) = read(hm.module(entry, gather()), chip=slow).collectives
    assert one.products == 1
    assert one.exposed == pytest.approx(2 * PRODUCT_SECONDS, rel=1e-12)


def test_the_transfer_begins_with_its_operand_not_with_its_start():
    entry = lines(hm.start("g", "gathers"), hm.product("p"), hm.update("g"), hm.done("g"))
    (one,) = read(hm.module(entry, gather())).collectives
    assert one.products == 0
    assert one.exposed == pytest.approx(one.seconds, rel=1e-9)


def test_transfers_share_one_ring():
    # Each is as long as the product: the second one still travels when the product is done.
    slow = dataclasses.replace(CHIP, ring_rate=GATHERED / PRODUCT_SECONDS)
    entry = lines(
        *(hm.start("g", "gathers"), hm.start("h", "gathers"), hm.update("g"), hm.update("h")),
        *(hm.product("p"), hm.done("g"), hm.done("h")),
    )
    first, second = read(hm.module(entry, gather()), chip=slow).collectives
    assert first.exposed == 0.0
    assert second.exposed == pytest.approx(PRODUCT_SECONDS, rel=1e-12)


def test_a_synchronous_collective_does_not_queue():
    """It shares the ring with what travels: it takes twice its time, no more."""
    sync = (
        f"  %s = bf16[512,512]{{1,0}} all-reduce(%a), channel_id=1, {hm.groups('fsdp')}, "
        f'to_apply=%add, metadata={{op_name="{hm.FORWARD}/psum"}}'
    )
    slow = dataclasses.replace(CHIP, ring_rate=GATHERED / PRODUCT_SECONDS)
    entry = lines(hm.start("g", "gathers"), hm.update("g"), sync, hm.product("p"), hm.done("g"))
    short, long = read(hm.module(entry, gather()), chip=slow).collectives
    assert short.seconds < 0.75 * long.seconds
    assert short.exposed == pytest.approx(short.seconds, rel=1e-12)
    # While it was awaited as much of the long one came; the rest was under the product.
    assert long.exposed == pytest.approx(short.seconds, rel=1e-12)


def test_a_permute_does_not_queue():
    """A small one, started behind a gather, is there long before it."""
    permute = (
        "  %p-start = (bf16[512,512]{1,0}, bf16[512,512]{1,0}) collective-permute-start(%a), "
        f"channel_id=2, source_target_pairs={{{{0,1}},{{1,0}}}}, "
        f'metadata={{op_name="{hm.FORWARD}/ppermute"}}\n'
        "  %p-done = bf16[512,512]{1,0} collective-permute-done(%p-start)"
    )
    slow = dataclasses.replace(CHIP, ring_rate=GATHERED / PRODUCT_SECONDS)
    entry = lines(hm.start("g", "gathers"), hm.update("g"), permute, hm.product("q"), hm.done("g"))
    short, long = read(hm.module(entry, gather()), chip=slow).collectives
    assert (short.kind, long.kind) == ("collective-permute", "all-gather")
    assert short.exposed == pytest.approx(short.seconds, rel=1e-9)
    assert long.exposed == pytest.approx(short.seconds, rel=1e-9)


def test_what_the_sparse_core_computes_stands_in_the_queue():
    """A change of layout behind a gather waits for it; what is waited for it is compute."""
    layout = (
        f"{hm.start('l', 'layout')}\n{hm.update('l')}\n"
        f'{hm.done("l")}, metadata={{op_name="{hm.FORWARD}/reshape"}}'
    )
    inside = (
        "%layout (p: bf16[512,512]) -> bf16[512,512] {\n  ROOT %p = bf16[512,512] parameter(0)\n}"
    )
    begin, end = (hm.start("g", "gathers"), hm.update("g")), hm.done("g")
    alone = read(hm.module(lines(layout), gather(), inside))
    seconds = 2 * 512 * 512 * 2 / CHIP.hbm_rate
    assert alone.collectives == ()
    assert alone.compute["forward"] == alone.seconds == pytest.approx(seconds, rel=1e-9)
    both = read(hm.module(lines(*begin, layout, end), gather(), inside))
    (one,) = both.collectives
    assert one.exposed == pytest.approx(one.seconds, rel=1e-9)
    assert both.compute["forward"] == pytest.approx(seconds, rel=1e-9)
    hidden = read(hm.module(lines(*begin, hm.product("p"), layout, end), gather(), inside))
    assert hidden.collectives[0].exposed == 0.0


def test_what_is_on_the_ring_while_a_later_transfer_is_awaited_is_exposed():
    # h is awaited first, but waits for g on the ring.
    entry = lines(
        *(hm.start("g", "gathers"), hm.start("h", "gathers"), hm.update("g"), hm.update("h")),
        *(hm.done("h"), hm.product("p"), hm.done("g")),
    )
    schedule = read(hm.module(entry, gather()))
    assert [one.name for one in schedule.collectives] == ["h-update", "g-update"]
    for one in schedule.collectives:
        assert one.exposed == pytest.approx(one.seconds, rel=1e-9)
    waited = schedule.seconds - PRODUCT_SECONDS
    assert waited == pytest.approx(sum(one.exposed for one in schedule.collectives), rel=1e-9)


def test_what_is_called_forward_in_the_backward_loop_runs_again():
    body = "\n".join([hm.start("g", "gathers"), hm.update("g"), hm.product("p"), hm.done("g")])
    backward = hm.while_line("jit(_step)/shard_map/transpose(jvp())")
    schedule = read(hm.module(lines(backward), gather(), hm.loop(body)))
    assert [one.phase for one in schedule.collectives] == ["remat"]
    assert schedule.compute["remat"] == schedule.seconds > 0


def test_a_synchronous_collective_is_exposed_whatever_stands_around_it():
    inner = (
        f"  %s = bf16[512,512]{{1,0}} all-reduce(%a), channel_id=1, {hm.groups('fsdp', 'expert')}, "
        f'to_apply=%add, metadata={{op_name="{hm.BACKWARD}/transpose(jvp())/psum"}}'
    )
    (one,) = read(hm.module(lines(hm.product("p"), inner, hm.product("q")))).collectives
    assert (one.kind, one.axes, one.phase) == ("all-reduce", "fsdp+expert", "backward")
    assert not one.is_async
    assert one.exposed == pytest.approx(one.seconds, rel=1e-9)
    assert one.bytes == 2 * 7 / 8 * 512 * 512 * 2


def test_what_is_in_a_loop_counts_as_often_as_it_runs():
    body = "\n".join([hm.start("g", "gathers"), hm.update("g"), hm.product("p"), hm.done("g")])
    text = hm.module(lines(hm.while_line()), gather(), hm.loop(body))
    schedule = read(text)
    (one,) = schedule.collectives
    assert one.times == 5
    assert schedule.seconds == pytest.approx(5 * PRODUCT_SECONDS, rel=1e-12)
    assert schedule.flops == {"bf16": 5 * 2 * 512**3}
    assert schedule.notes == ()


def test_a_loop_of_unknown_length_is_counted_once_and_said():
    body = hm.product("p")
    text = hm.module(lines(hm.while_line()), hm.loop(body, "get-tuple-element(%t), index=0"))
    schedule = read(text)
    assert schedule.flops == {"bf16": 2 * 512**3}
    assert schedule.notes == ("1 loops of unknown length are counted once",)


def test_a_reduce_scatter_that_xla_fuses_is_one():
    fused = f"""\
%scatters (p: bf16[512,512]) -> bf16[128,512] {{
  %p = bf16[512,512]{{1,0}} parameter(0)
  %sum = bf16[512,512]{{1,0}} all-reduce(%p), channel_id=1, {hm.groups("fsdp")}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %mine = bf16[128,512]{{1,0}} dynamic-slice(%sum, %zero, %zero)
}}"""
    place = f"{hm.BACKWARD}/transpose(jvp())/reduce_scatter"
    line = (
        "  %rs = bf16[128,512]{1,0} fusion(%a), kind=kCustom, calls=%scatters, "
        f'metadata={{op_name="{place}"}}'
    )
    (one,) = read(hm.module(lines(line), fused)).collectives
    assert (one.kind, one.phase) == ("reduce-scatter", "backward")
    assert one.bytes == 3 / 4 * 512 * 512 * 2


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", "fsdp"),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", "expert"),
        ("replica_groups=[4,2]<=[8]", "expert"),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", "fsdp"),
        ("replica_groups=[1,8]<=[8]", "fsdp+expert"),
        ("replica_groups={}", "fsdp+expert"),
        (hm.groups("expert", "data"), "expert"),
    ],
)
def test_axes_of_every_spelling_of_groups(groups, axes):
    text = hm.module(
        lines(hm.start("g", "gathers"), hm.update("g"), hm.done("g")),
        hm.collective("gathers", "all-gather", groups, f"{hm.FORWARD}/all_gather"),
    )
    assert [one.axes for one in read(text).collectives] == [axes]


def test_a_ragged_all_to_all_counts_what_is_sent():
    """Of [512, 512] in bf16, a quarter: three of four slots are empty, and 1/2 stays here."""
    text = hm.module(
        lines(hm.start("g", "gathers"), hm.update("g"), hm.done("g")),
        gather(kind="ragged-all-to-all", axes=("expert",)),
    )
    (one,) = read(text, slots_used=0.25).collectives
    assert one.bytes == 512 * 512 * 2 / 4 / 2


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        ({"num_experts_per_tok": 1, "n_routing_groups": 1, "topk_routing_group": 1}, 1 / 4),
        ({"num_experts_per_tok": 2, "n_routing_groups": 1, "topk_routing_group": 1}, 7 / 16),
        # Both experts in one of two groups: on two of the four devices.
        ({"num_experts_per_tok": 2, "n_routing_groups": 2, "topk_routing_group": 1}, 3 / 8),
    ],
)
def test_slots_that_an_even_load_uses(settings, used):
    config = tiny_model.config(num_experts=8, **settings)
    assert compiler._slots_used(config, tiny_model.mesh(expert=4)) == pytest.approx(used)


def test_a_collective_over_axes_of_one_device_is_none():
    text = hm.module(
        lines(hm.start("g", "gathers"), hm.update("g"), hm.done("g")), gather(axes=("data",))
    )
    assert read(text).collectives == ()


def test_an_axis_between_slices_is_slow():
    mesh = {"data": 2, "fsdp": 4, "expert": 2}
    text = hm.module(
        lines(hm.start("g", "gathers"), hm.update("g"), hm.done("g")), gather(axes=("data",))
    )
    (one,) = read(text, mesh=mesh, slow_axes=("data",)).collectives
    assert one.seconds == 512 * 512 * 2 / CHIP.slice_rate


def test_what_goes_between_slices_through_the_host():
    attributes = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="sum.1",'
        '_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    entry = lines(
        *("  %t = token[] after-all()", hm.product("p", f"{hm.BACKWARD}/transpose(jvp())")),
        f"  %s = (bf16[512,512]{{1,0}}, u32[]{{:S(2)}}, token[]) send(%p, %t), {attributes}",
        f"  %g = (bf16[512,512]{{1,0}}, u32[]{{:S(2)}}, token[]) recv(%t), {attributes}",
        *("  %sd = token[] send-done(%s)", "  %gd = (bf16[512,512]{1,0}, token[]) recv-done(%g)"),
    )
    mesh = {"data": 2, "fsdp": 4, "expert": 2}
    (one,) = read(hm.module(entry), mesh=mesh, slow_axes=("data",)).collectives
    assert (one.kind, one.axes, one.phase) == ("all-reduce", "data", "backward")
    assert one.bytes == 2 * 1 / 2 * 512 * 512 * 2
    assert one.exposed == pytest.approx(one.bytes / CHIP.slice_rate, rel=1e-9)


def test_a_transfer_that_v5e_fuses_with_compute_is_one():
    def fused(name, more=""):
        return (
            f"%{name} (p: bf16[512,512]) -> bf16[512,512] {{\n"
            f"  %p = bf16[512,512]{{1,0}} parameter(0)\n{more}"
            f"  ROOT %g = bf16[512,512]{{1,0}} all-gather(%p), channel_id=7, "
            f"{hm.groups('fsdp')}, dimensions={{0}}\n}}"
        )

    step = "  %c = bf16[512,512]{1,0} convolution(%p, %p), dim_labels=bf_io->bf\n"
    parts = fused("begins"), fused("async_collective_fusion.1", step), fused("ends")
    entry = lines(
        "  %async-collective-start.1 = bf16[512,512]{1,0} fusion(%a), calls=%begins",
        "  %f = bf16[512,512]{1,0} fusion(%a), calls=%async_collective_fusion.1, "
        f'backend_config={{"estimated_cycles":"{hm.PRODUCT_CYCLES}"}}',
        "  %async-collective-done.1 = bf16[512,512]{1,0} fusion(%a), calls=%ends",
    )
    schedule = read(hm.module(entry, *parts))
    (one,) = schedule.collectives
    assert (one.bytes, one.products, one.exposed) == (GATHERED, 1, 0.0)
    assert schedule.seconds == PRODUCT_SECONDS


@pytest.mark.parametrize(
    ("name", "kind", "axes", "phase"),
    [
        ("jit(_step)/shard_map/jvp()/while/body/eval_jaxpr/all_gather", "", "", "forward"),
        ("jit(_step)/shard_map/jvp()/all_gather", "", "", "forward"),
        (f"{hm.BACKWARD}/jvp()/all_gather", "", "", "remat"),
        (f"{hm.BACKWARD}/checkpoint/rematted_computation/dot_general", "", "", "remat"),
        (f"{hm.BACKWARD}/transpose(jvp())/reduce_scatter", "", "", "backward"),
        ("jit(_step)/shard_map/transpose(jvp(loss))/dot_general", "", "", "backward"),
        (f"{hm.BACKWARD}/all_gather", "all-gather", "fsdp", "remat"),
        (f"{hm.BACKWARD}/reduce_scatter", "reduce-scatter", "expert", "remat"),
        (f"{hm.BACKWARD}/reduce_scatter", "reduce-scatter", "fsdp", "backward"),
        (f"{hm.BACKWARD}/reduce_scatter", "reduce-scatter", "fsdp+expert", "backward"),
        ("jit(_step)/reduce_sum", "", "", "update"),
        ("", "", "", None),
    ],
)
def test_phases(name, kind, axes, phase):
    assert phase_of(name, kind, axes) == phase


def test_a_collective_without_a_name_has_the_phase_of_what_it_reads():
    inner = (
        f"  %s = bf16[512,512]{{1,0}} all-reduce(%p), channel_id=1, {hm.groups('fsdp')}, "
        "to_apply=%add"
    )
    place = f"{hm.BACKWARD}/transpose(jvp())"
    (one,) = read(hm.module(lines(hm.product("p", place), inner))).collectives
    assert one.phase == "backward"


def test_of_branches_the_longest_counts_and_a_fallback_does_not():
    def branch(name, place, number):
        products = "\n".join(hm.product(f"{name}{i}", place) for i in range(number))
        return (
            f"%{name} (a: bf16[512,512]) -> bf16[512,512] {{\n{hm.PARAMETER}\n{products}\n"
            f"  ROOT %r = bf16[512,512]{{1,0}} bitcast(%a)\n}}"
        )

    fast = branch("fast", hm.FORWARD, 1)
    inside = f"{hm.FORWARD}/cond/branch_{{}}_fun"
    # A conditional of its own may have a rare branch, whose names reach this one.
    slow = branch("slow", inside.format(1) + "/cond/branch_1_fun/fallback", 2)
    rare = branch("rare", inside.format(2) + "/fallback", 9)
    line = (
        "  %c = bf16[512,512]{1,0} conditional(%a, %a, %a, %a), "
        "branch_computations={%fast, %slow, %rare}, "
        f'metadata={{op_name="{hm.FORWARD}/cond"}}'
    )
    schedule = read(hm.module(lines(line), fast, slow, rare))
    assert schedule.flops == {"bf16": 2 * 2 * 512**3}


@pytest.mark.parametrize(
    ("left", "right", "out", "window", "labels"),
    [
        # [2, 64, 32] = [2, 64, 48] @ [2, 48, 32], the batch kept apart by dilation
        ("2,48,64", "48,2,32", "2,64,32", "size=2 lhs_dilate=2", "0fb_i0o->0bf"),
        # [64, 2, 32] = [64, 48] @ [2, 48, 32], of which a window that reaches past the one left
        # operand meets it once for each output
        ("64,48,1", "2,32,48", "64,2,32", "size=2 pad=1_1 rhs_reversal=1", "bf0_0oi->b0f"),
    ],
)
def test_flops_of_batched_products_written_as_convolutions(left, right, out, window, labels):
    text = f"""\
HloModule m, is_scheduled=true

ENTRY %main (x: bf16[{left}], y: bf16[{right}]) -> bf16[{out}] {{
  %x = bf16[{left}]{{2,1,0}} parameter(0)
  %y = bf16[{right}]{{2,1,0}} parameter(1)
  ROOT %c = bf16[{out}]{{2,1,0}} convolution(%x, %y), window={{{window}}}, dim_labels={labels}
}}"""
    module = hlo.parse(text)
    main = module.computations["main"]
    assert Costs(module, 0.0).flops(main, main.by_name["c"]) == {"bf16": 2 * 64 * 32 * 48 * 2}


GMM = """\
  %{name} = bf16[8,32,256]{{2,1,0}} custom-call(%sizes, %rows, %w), \
custom_call_target="tpu_custom_call", metadata={{op_name="{place}/octablox_gmm/pallas_call"}}, \
backend_config={{"custom_call_config":{{"body":"QUJD"}}}}"""
OPERANDS = """\
  %a = bf16[512,512]{1,0} parameter(0)
  %sizes = s32[4]{0} parameter(1)
  %rows = f8e4m3fn[8,32,128]{2,1,0} parameter(2)
  %w = f8e4m3fn[4,128,256]{2,1,0} parameter(3)"""


def test_flops_of_the_experts_are_those_of_the_rows_that_the_config_gives():
    text = hm.module(f"{OPERANDS}\n{GMM.format(name='k', place=hm.FORWARD)}")
    schedule = read(text, expert_rows=100.0)
    assert schedule.flops == schedule.expert_flops == {"fp8": 2 * 100 * 128 * 256}
    # The kernel has no estimate: it takes what its bytes need, more than its FLOPs here.
    moved = 4 * 4 + 8 * 32 * 128 + 4 * 128 * 256 + 2 * 8 * 32 * 256
    assert schedule.hbm_bytes == moved
    assert schedule.seconds == moved / CHIP.hbm_rate


def test_flops_of_the_transposed_experts_product():
    line = (
        "  %k = f32[4,128,256]{2,1,0} custom-call(%sizes, %rows, %more), "
        'custom_call_target="tpu_custom_call", '
        f'metadata={{op_name="{hm.BACKWARD}/transpose(jvp(octablox_tgmm))/pallas_call"}}'
    )
    more = "  %more = f8e5m2[8,32,256]{2,1,0} parameter(4)"
    schedule = read(hm.module("\n".join([OPERANDS, more, line])), expert_rows=100.0)
    assert schedule.expert_flops == {"fp8": 2 * 100 * 128 * 256}
    assert schedule.compute["backward"] == schedule.seconds > 0


def test_xlas_senseless_cost_of_a_ragged_product_is_not_believed():
    fused = """\
%ragged (x: bf16[256,128], w: bf16[4,128,256]) -> bf16[256,256] {
  %x = bf16[256,128]{1,0} parameter(0)
  %w = bf16[4,128,256]{2,1,0} parameter(1)
  %v = bf16[128,256]{1,0} bitcast(%w)
  ROOT %c = bf16[256,256]{1,0} convolution(%x, %v), dim_labels=bf_io->bf
}"""
    entry = f"""\
{hm.PARAMETER}
  %x = bf16[256,128]{{1,0}} parameter(1)
  %w = bf16[4,128,256]{{2,1,0}} parameter(2)
  %k = bf16[256,256]{{1,0}} fusion(%x, %w), kind=kOutput, calls=%ragged, \
metadata={{op_name="{hm.FORWARD}/ragged_dot_general"}}, \
backend_config={{"estimated_cycles":"9223372036854775807"}}"""
    schedule = read(hm.module(entry, fused), expert_rows=100.0)
    assert schedule.expert_flops == {"bf16": 2 * 100 * 128 * 256}
    assert schedule.seconds < 1e-3


def test_another_kernel_counts_what_it_declares_or_is_named():
    def kernel(name, config):
        return (
            f"  %{name}.1 = bf16[512,512]{{1,0}} custom-call(%a), "
            'custom_call_target="tpu_custom_call", '
            f'metadata={{op_name="{hm.FORWARD}/{name}"}}, backend_config={{{config}}}'
        )

    declares = kernel("splash", '"custom_call_config":{"cost_estimate":{"flops":"1000"}}')
    silent = kernel("mystery", '"custom_call_config":{}')
    schedule = read(hm.module(lines(declares, silent)))
    assert schedule.flops == {"bf16": 1000.0}
    assert schedule.notes == ("kernels whose FLOPs are not known count by their bytes: mystery",)


def test_attention_counts_the_blocks_up_to_the_diagonal_at_its_share_of_the_peak():
    """4 heads of 2,048 tokens, keys 192 wide, values 128: 3 of 4 blocks of 1,024 x 1,024."""
    entry = """\
  %q = bf16[4,2048,192]{2,1,0} parameter(0)
  %k = bf16[4,2048,192]{2,1,0} parameter(1)
  %v = bf16[4,2048,128]{2,1,0} parameter(2)
  %ids = s32[2048,128]{1,0} parameter(3)
  ROOT %f = bf16[4,2048,128]{2,1,0} custom-call(%ids, %q, %k, %v), \
custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/splash_mha_KIND/pallas_call"}"""
    for kind, widths, share in (
        ("fwd_segmented", 192 + 128, 0.27),
        ("dkv_segmented", 2 * 192 + 2 * 128, 0.48),
        ("dq_segmented", 2 * 192 + 128, 0.43),
    ):
        schedule = read(hm.module(entry.replace("KIND", kind)))
        flops = 2 * 4 * 3 * 1024**2 * widths
        assert schedule.flops == {"bf16": flops} and not schedule.notes
        assert schedule.seconds == pytest.approx(flops / CHIP.flops["bf16"] / share)


def test_traffic_of_slices_is_that_of_the_slice():
    fused = """\
%sliced (big: f32[26,64,64], i: s32[]) -> f32[64,64] {
  %big = f32[26,64,64]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,64,64]{2,1,0} dynamic-slice(%big, %i, %zero, %zero), dynamic_slice_sizes={1,64,64}
  ROOT %b = f32[64,64]{1,0} bitcast(%one)
}

%written (big: f32[26,64,64], i: s32[], new: f32[1,64,64]) -> f32[26,64,64] {
  %big = f32[26,64,64]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %new = f32[1,64,64]{2,1,0} parameter(2)
  %zero = s32[] constant(0)
  ROOT %all = f32[26,64,64]{2,1,0} dynamic-update-slice(%big, %new, %i, %zero, %zero)
}"""
    entry = f"""\
{hm.PARAMETER}
  %big = f32[26,64,64]{{2,1,0}} parameter(1)
  %i = s32[]{{:S(6)}} parameter(2)
  %new = f32[1,64,64]{{2,1,0:S(1)}} parameter(3)
  %read = f32[64,64]{{1,0}} fusion(%big, %i), kind=kLoop, calls=%sliced
  %write = f32[26,64,64]{{2,1,0}} fusion(%big, %i, %new), kind=kLoop, calls=%written"""
    one = 64 * 64 * 4
    # Read and written once; then written from an array that lies in VMEM.
    assert read(hm.module(entry, fused)).hbm_bytes == 2 * one + one


def test_an_allocation_moves_nothing():
    """Memory that a program writes over takes no time to get."""
    entry = lines('  %e = bf16[4096,4096]{1,0} custom-call(), custom_call_target="AllocateBuffer"')
    schedule = read(hm.module(entry))
    assert schedule.seconds == 0.0
    assert schedule.hbm_bytes == 0.0


def test_traffic_with_the_host_is_counted_apart():
    entry = f"""\
{hm.PARAMETER}
  %out-start = (bf16[512,512]{{1,0:S(5)}}, bf16[512,512]{{1,0}}, u32[]{{:S(2)}}) copy-start(%a)
  %out-done = bf16[512,512]{{1,0:S(5)}} copy-done(%out-start)"""
    schedule = read(hm.module(entry))
    assert (schedule.hbm_bytes, schedule.host_bytes) == (512 * 512 * 2, 512 * 512 * 2)
    assert schedule.seconds == 0  # beside the TensorCore


def test_text_that_is_no_schedule_is_refused():
    with pytest.raises(ValueError, match="expected a scheduled HLO module, got 'HloModule m'"):
        hlo.parse("HloModule m\n\nENTRY %main () -> () {\n}\n")
