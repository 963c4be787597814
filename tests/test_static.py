"""Compiled schedules and what is read from them; a short dump stands for libtpu's."""

import dataclasses

import pytest

from octablox import cli, show
from octablox.bench import static as bench
from octablox.errors import UserError
from octablox.kernels import chips, pallas_tpu, static_gmm, static_schedule, tiles
from octablox.kernels.static_schedule import Piece, Report, Schedule
from octablox.kernels.tiles import Gmm, GmmTiles, Limits, Tgmm, TgmmTiles

# A loop that plans, then one with two pieces of matrix code, then code that runs once.
DUMP = """
     0   : { %a = sst } /* Start region 1 */
 0x1 LB: > { %b = sadd } /* Start region 2 */
 0x2   : > { %c = sadd } /* End region 2 */
 0x3   : { %d = sst } /* Start region 3 */ /* End region 3 */
 0x4 LB: > { %e = sadd } /* Start region 4 */
 0x5   : > { %f = vmatmul.mubr.bf16.gmra %x ;; %g = vmatmul.mubr.bf16.gmra %y }
  /* Start region 5 */
 0x6   : { %h = vadd }
 0x7   : > { %i = vmatmul.mubr.bf16.gmra %z } /* End region 5 */
 0x8   : > { %j = sadd } /* End region 4 */
 0x9   : { %k = sst } /* End region 1 */
"""


def test_pieces_and_the_code_around_them(tmp_path):
    (tmp_path / "1-kernel.1-01-packed-bundles-post-ra.txt").write_text(DUMP)
    schedule = static_schedule.read_schedule(str(tmp_path), "kernel.1")
    assert schedule.pieces == (Piece(3, 3, ".mubr.bf16.gmra"),)
    assert (schedule.loop, schedule.plan) == (2, 2)


def test_ops_beside_the_kernel():
    hlo = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = f32[8]{0} fusion(%a), kind=kLoop
  ROOT %c = f32[8]{0} custom-call(%b), custom_call_target="tpu_custom_call"
}"""
    assert static_schedule.ops_beside(hlo) == 1


def case(product="gmm", tile=None):
    return static_gmm.Case("tpu7x", product, "bf16", 2048, 256, 512, 4, tile)


def test_figures_of_a_kernel_at_the_limit():
    """512 rows of 256 by 512 are 256 cycles of 262144 multiply-adds; 64 vmatmuls of 16 rows."""
    tile = GmmTiles(512, 512, 256, (512,))
    report = Report(Schedule((Piece(256, 64, ".bf16"),), 0, 0), 0, 0, 1.0)
    got = static_gmm.figures(case(tile=tile), report)
    assert got["step"] == 1.0
    moved = 256 * 512 * 2 + 512 * (256 + 512) * 2
    assert got["hbm"] == round(moved / 256)
    assert got["equal"] == round(256 * 1680 / moved, 3)  # HBM is slower


def test_a_group_of_several_steps_and_a_folded_one():
    tile = GmmTiles(512, 512, 256, (128, 512))
    assert static_gmm._steps(case(tile=tile), 0, 600) == [512, 128]
    assert static_gmm._steps(case(tile=tile), 30, 500) == [512, 128]
    tile = TgmmTiles(512, 256, 512, (256, 512))
    assert static_gmm._steps(case("tgmm", tile), 30, 250) == [256]  # 280 rows, 24 in the last block
    assert static_gmm._steps(case("tgmm", tile), 10, 256) == [256]
    assert static_gmm._steps(case("tgmm", tile), 1, 260) == [512]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512,7168", "gmm_tiles: expected three numbers M,K,N, as 512,7168,2048, got '512,7168'"),
        ("a,7168,1", "gmm_tiles: expected three numbers M,K,N, as 512,7168,2048, got 'a,7168,1'"),
        ("100,7168,2048", "gmm_tiles: expected M to be a multiple of 32, got 100"),
        ("512,7168,100", "gmm_tiles: expected N to be a multiple of 128, got 100"),
    ],
)
def test_bad_limits(text, expected):
    with pytest.raises(UserError) as caught:
        tiles.parse_limits("gmm_tiles", text)
    assert str(caught.value) == expected


GMM = Gmm("tpu7x", 8192, 7168, 2048, 16, "float8_e4m3fn", "float8_e4m3fn", "bfloat16")
TGMM = Tgmm("tpu7x", 8192, 7168, 2048, 16, "bfloat16", "bfloat16", "bfloat16")


def test_limits_are_not_exceeded():
    with tiles.override(gmm=Limits(320, 7168, 1500), tgmm=Limits(512, 3000, 9999)):
        gmm, tgmm = tiles.choose(GMM), tiles.choose(TGMM)
    assert (gmm.rows, gmm.contracted, gmm.columns, gmm.buckets[-1]) == (320, 7168, 1024, 320)
    assert (tgmm.rows, tgmm.k, tgmm.n) == (512, 1792, 2048)


def test_limits_that_cannot_work():
    expected = "gmm_tiles: expected K of at least 7168, all of which a step multiplies, got 2048"
    with tiles.override(gmm=Limits(512, 2048, 2048)), pytest.raises(UserError, match=expected):
        tiles.choose(GMM)
    expected = r"tgmm_tiles: a tile of 2048 × 7168 × 2048 needs .* MiB of VMEM, tpu7x gives 61; "
    with tiles.override(tgmm=Limits(2048, 7168, 2048)), pytest.raises(UserError, match=expected):
        tiles.choose(TGMM)


def test_the_command_line_refuses_tiles_by_name(capsys):
    assert cli.main(["show", "dlhs_tiles=1,2"]) == 2
    assert "dlhs_tiles: expected three numbers M,K,N" in capsys.readouterr().err
    assert cli.main(["show", "tgmm_tiles=512,128,128"]) == 2
    assert "tgmm_tiles: only the TPU kernels have such tiles" in capsys.readouterr().err


def test_show_says_tiles_and_where_8_bits_gain_nothing():
    from octablox import config

    resolved = config.load(["quantization=fp8_full", "num_experts=8"])
    with pallas_tpu.target("v6e"), tiles.override(gmm=Limits(64, 8192, 128)):
        report = show.make_report(resolved, 1)
    row = report["gemms"][0]
    assert row["backend"] == "pallas_tpu"
    assert row["tiles"] == f"64 × {row['K']} × 128"
    assert row["no_gain"] == "v6e multiplies fp8 no faster than bf16"
    with pallas_tpu.target("tpu7x"):
        assert show.make_report(resolved, 1)["gemms"][0]["no_gain"] == ""


def test_the_chip_of_a_topology(monkeypatch):
    from octablox import config

    assert chips.chip_of_topology("v6e-256").name == "v6e"
    assert chips.chip_of_topology("") is None
    monkeypatch.setattr(show, "dump", lambda config: {"compile_topology": "tpu7x:2x2x1"})
    with show.described_chip(config.load([]).config):
        assert pallas_tpu.chip().name == "tpu7x"


def test_bench_ranks_what_it_compiled(monkeypatch, capsys, tmp_path):
    """Of three tiles one does not compile, and the second is the fastest."""

    def compiled(chip, target, argument, timeout):
        tile = argument["tile"]
        if tile["rows"] == seen[0].rows and tile["columns"] == seen[0].columns:
            raise static_schedule.CompileError("no room")
        work = tile["rows"] * tile["columns"] * tile["contracted"]
        matmuls = work // (32 * 256 * 256)
        pieces = tuple(Piece(100, matmuls, ".f8e4m3fn") for _ in tile["buckets"])
        return Report(Schedule(pieces, 0, 0), 0, 1 << 20, 1.0)

    settings = "model_name=deepseek3-671b quantization=fp8_full num_cpu_devices=256"
    settings += " ici_fsdp_parallelism=16 ici_expert_parallelism=16"
    line = f"gmm --static --chip tpu7x --gemm down --product gmm --json {tmp_path}/x {settings}"
    options, rest = bench.parse(line.split())
    from octablox import config

    resolved = config.load(rest)
    found = bench.cases(options, resolved, 256)
    seen = [case.tile for _, case in found]
    assert len(seen) == 3
    monkeypatch.setattr(static_gmm, "compile_for", compiled)
    monkeypatch.setattr(
        static_gmm,
        "_cost",
        lambda case, report: {
            bucket: [100 if case.tile == seen[1] else 200] for bucket in case.tile.buckets
        },
    )
    assert bench.bench(options, resolved, 256) == 0
    printed = capsys.readouterr().out
    assert printed.index(str(seen[1])) < printed.index(str(seen[2]))
    assert "not compiled: no room" in printed


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gmm", "bench: the following arguments are required: --static; octablox bench --help"),
        ("gmm --static --chip=v9", "bench: argument --chip: invalid choice: 'v9'"),
        ("gmm --static --candidates=0", "--candidates: expected at least 1, got 0"),
    ],
)
def test_bench_refuses(line, expected):
    with pytest.raises(UserError) as caught:
        bench.parse(line.split())
    assert str(caught.value).startswith(expected)


def test_bench_refuses_blocks():
    from octablox import config

    options, rest = bench.parse("gmm --static quantization=mxfp8".split())
    with pytest.raises(UserError, match="expected a recipe without blocks along K, got mxfp8"):
        bench.cases(options, config.load(rest), 1)


def test_a_tile_survives_the_way_to_the_worker():
    tile = GmmTiles(512, 512, 256, (128, 512))
    run, (lhs, rhs, sizes) = static_gmm.arguments(dataclasses.asdict(case(tile=tile)))
    assert run.args[-1] == tile
    assert (lhs.value.shape, rhs.value.shape, sizes.shape) == ((2048, 256), (4, 256, 512), (4,))
