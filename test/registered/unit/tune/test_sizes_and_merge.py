"""Sizes of models for tuning, the command line that takes them, and files of several people made one."""

import json
import sys

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.kernels.ops.moe import grouped_gemm_table
from sglang_w4afp8.srt.layers.moe import w4a8_gemm
from sglang_w4afp8.tune import cli, sizes
from sglang_w4afp8.tune.two_kernels import Size

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

GLM = {"hidden_size": 6144, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8}


def config(tmp_path, **fields):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GLM, **fields}))
    return path


def test_a_config_says_its_sizes_by_whatever_names_its_family_has(tmp_path):
    assert sizes.from_config(config(tmp_path)) == sizes.MODELS["glm-5"] == sizes.of(str(tmp_path))
    qwen = {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(qwen))
    assert sizes.from_config(path) == sizes.MODELS["qwen3-235b"]
    path.write_text(json.dumps({"model_type": "several", "text_config": qwen}))
    assert sizes.from_config(path) == sizes.MODELS["qwen3-235b"]
    mixtral = {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}
    path.write_text(json.dumps(mixtral))
    assert sizes.from_config(path) == sizes.ModelSizes(4096, 14336, 8, 2)


def test_the_group_size_is_that_of_the_checkpoints_quantization(tmp_path):
    w4afp8 = {"quant_method": "w4afp8", "weight_block_size": [128, 128]}
    assert sizes.from_config(config(tmp_path, quantization_config=w4afp8)).group_size == 128
    native = {"config_groups": {"group_0": {"weights": {"group_size": 32, "num_bits": 4}}}}
    assert sizes.from_config(config(tmp_path, quantization_config=native)).group_size == 32


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"n_routed_experts": None}, "has none of n_routed_experts, num_experts"),
        ({"hidden_size": "6144"}, "hidden_size is '6144', must be a positive integer"),
        ({"n_routed_experts": 0}, "n_routed_experts is 0, must be a positive integer"),
        ({"hidden_size": True}, "hidden_size is True, must be a positive integer"),
    ],
)
def test_a_config_without_sizes_is_refused_by_the_field(tmp_path, fields, message):
    with pytest.raises(sizes.SizesError, match=message):
        sizes.from_config(config(tmp_path, **fields))


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_what_is_no_config_is_refused_by_the_file(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(sizes.SizesError, match=str(path)):
        sizes.from_config(path)
    with pytest.raises(
        sizes.SizesError, match="model: is 'glm-55', must be a config.json, a folder with one, or one of"
    ):
        sizes.of("glm-55")


def asked(*words):
    return cli.layer_sizes(cli._parser().parse_args([*words]))


def test_layers_are_named_by_models_by_files_and_by_numbers(tmp_path):
    assert asked("--model", "glm-5", "--ep", "8", "16") == [Size(2048, 6144, 32), Size(2048, 6144, 16)]
    assert asked("--model", str(config(tmp_path)), "--ep", "8") == [Size(2048, 6144, 32)]
    assert asked("--size", "2048", "6144", "36") == [Size(2048, 6144, 36)]
    both = asked("--size", "2048", "6144", "32", "--model", "glm-5", "--ep", "8")
    assert both == [Size(2048, 6144, 32)]
    assert asked() == [Size(2048, 7168, 32), Size(2048, 7168, 16)]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model", "glm-5", "--ep", "7"], "ep: is 7, must divide the 256 experts (model glm-5)"),
        (["--model", "nobody"], "model: is 'nobody', must be"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_looked_for(capsys, words, message):
    assert cli.main(["two-kernels", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--ep", "0"], ["--size", "1", "2"], ["--time-limit", "-1"], ["--rows", "x"]])
def test_arguments_that_are_no_numbers_are_refused_by_argparse(words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2


def test_a_user_without_a_home_must_say_where(monkeypatch, capsys):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(tuned_config, "user_directory", none)
    assert cli.main(["gemm"]) == 2
    assert "home directory" in capsys.readouterr().err


# ---- merging


def two_kernels(path, experts, us=1.0, measured=None, **metadata):
    hints = {"block_m": 16, "groups_per_step": 1, "num_warps": 4, "num_stages": 3, "look_up": False}
    launch = {"expected_m": 2, "gate_up": hints, "down": hints, "triton_us": us, "cutlass_us": 2.0}
    shapes = [
        {"n": 2048, "k": 6144, "experts": count, "gate_up_block_n": 128, "down_block_n": 128, "launches": [launch]}
        for count in experts
    ]
    for shape in shapes:
        if measured:
            shape["measured"] = measured
    about = {
        "gpu": "NVIDIA H20",
        "schedule": "3",
        "triton": "3.8.0",
        "package_version": "0.1.0",
        "kernel_version": "0.4.10",
    }
    tuned_config.write_tuned(path, {**about, "created": "2026-12-01", **metadata}, {"shapes": shapes})
    return path


def test_entries_of_all_files_stand_in_one_with_where_each_came_from(tmp_path, capsys):
    mine = two_kernels(tmp_path / "mine.json", [32, 16], created="2026-12-01", triton="3.8.0")
    theirs = two_kernels(tmp_path / "theirs.json", [16, 8], 1.5, {"date": "2026-12-05", "triton": "3.7.1"})
    out = tmp_path / "merged.json"
    assert cli.main(["merge", str(mine), str(theirs), "--out", str(out)]) == 0
    table = grouped_gemm_table.parse(tuned_config.read_tuned(out, {"gpu": "NVIDIA H20", "schedule": "3"}))
    times = {experts: shape.pairs[0].triton_us for (_, _, experts), shape in table.items()}
    assert times == {32: 1.0, 16: 1.5, 8: 1.5}
    triton = {experts: shape.measured["triton"] for (_, _, experts), shape in table.items()}
    assert triton == {32: "3.8.0", 16: "3.7.1", 8: "3.7.1"}
    assert f"n 2048, k 6144, experts 16: from {theirs}, not {mine}" in capsys.readouterr().out
    # Whatever the order, the later measurement counts; a merged file can be merged again.
    assert cli.main(["merge", str(theirs), str(mine), "--out", str(tmp_path / "other.json")]) == 0
    assert json.loads((tmp_path / "other.json").read_text())["data"] == json.loads(out.read_text())["data"]
    assert cli.main(["merge", str(out), str(mine), "--out", str(out)]) == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gpu": "NVIDIA H100"}, "gpu is 'NVIDIA H100', must be 'NVIDIA H20' as in"),
        ({"schedule": "2"}, "schedule is '2', must be '3' as in"),
    ],
)
def test_files_that_cannot_be_one_are_refused_by_name_and_nothing_is_written(tmp_path, capsys, change, message):
    mine, theirs = two_kernels(tmp_path / "mine.json", [32]), two_kernels(tmp_path / "theirs.json", [8], **change)
    out = tmp_path / "merged.json"
    assert cli.main(["merge", str(mine), str(theirs), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert str(theirs) in error and message in error
    assert not out.exists()


def test_files_that_hold_no_table_are_refused_by_name(tmp_path, capsys):
    mine = two_kernels(tmp_path / "mine.json", [32])
    for name, text in (("broken.json", "{"), ("other.json", '{"schema": 1, "metadata": {}, "data": {}}')):
        (tmp_path / name).write_text(text)
        assert cli.main(["merge", str(mine), str(tmp_path / name), "--out", str(tmp_path / "out.json")]) == 2
        assert str(tmp_path / name) in capsys.readouterr().err


def tiles(path, choices, high=32, version="0.4.10", **metadata):
    shape = {
        "n": 4096,
        "k": 6144,
        "buckets": [{"low": 1, "high": high, "kernel": "a"}, {"low": high + 1, "high": None, "kernel": "b"}],
        "choices": [
            {"experts": e, "rows": r, "order": [f"m{high + 1}+" if last else f"m1-{high}"]} for e, r, last in choices
        ],
    }
    about = {"gpu": "NVIDIA H20", "triton": "3.8.0", "package_version": "0.1.0", "kernel_version": version}
    tuned_config.write_tuned(path, {**about, "created": "2026-12-01", **metadata}, {"shapes": [shape]})
    return path


def test_tile_tables_are_merged_count_by_count(tmp_path, capsys):
    mine = tiles(tmp_path / "mine.json", [(32, 8, False), (32, 16, False)])
    theirs = tiles(tmp_path / "theirs.json", [(32, 16, True), (8, 8, True)], created="2026-12-03")
    out = tmp_path / "out.json"
    assert cli.main(["merge", str(mine), str(theirs), "--out", str(out)]) == 0
    table = w4a8_gemm.GemmTileTable.parse(tuned_config.read_tuned(out, {}))
    assert table.shapes[4096, 6144].orders == {(8, 8): ("m33+",), (32, 8): ("m1-32",), (32, 16): ("m33+",)}
    other = tiles(tmp_path / "other.json", [(64, 8, False)], high=64)
    assert cli.main(["merge", str(mine), str(other), "--out", str(out)]) == 2
    assert "was measured with other tiles than in" in capsys.readouterr().err
    newer = tiles(tmp_path / "newer.json", [(64, 8, False)], version="0.4.11")
    assert cli.main(["merge", str(mine), str(newer), "--out", str(out)]) == 2
    assert "kernel_version is '0.4.11', must be '0.4.10'" in capsys.readouterr().err


def test_a_tile_table_is_no_table_of_launches(tmp_path, capsys):
    mine, theirs = two_kernels(tmp_path / "mine.json", [32]), tiles(tmp_path / "theirs.json", [(8, 8, True)])
    assert cli.main(["merge", str(mine), str(theirs), "--out", str(tmp_path / "out.json")]) == 2
    assert f"{theirs}: is of another kind than {mine}" in capsys.readouterr().err


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
