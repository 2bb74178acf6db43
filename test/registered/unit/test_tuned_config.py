"""Tuned files: used where they fit, refused with one warning where they do not, never an exception while serving."""

import json
import logging
import sys

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from sglang_w4afp8 import tuned_config
from sglang_w4afp8.tuned_config import TunedConfigError

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

METADATA = {"gpu": "NVIDIA H200", "triton": "3.6.0", "package_version": "0.1.0", "kernel_version": "0.4.5"}
MATCH = {"gpu": "NVIDIA H200", "kernel_version": "0.4.5"}
PARTS = ("NVIDIA H200", "0.4.5")
NAME = "demo_nvidia_h200_0.4.5.json"


@pytest.fixture(autouse=True)
def fresh_cache():
    tuned_config.clear_cache()
    yield
    tuned_config.clear_cache()


def _write(directory, content):
    directory.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (directory / NAME).write_text(text, encoding="utf-8")


def _load(*directories, match=MATCH, parse=lambda data: data["value"]):
    return tuned_config.load_tuned("demo", PARTS, match, parse, directories=tuple(directories))


def _valid(value=7, **metadata):
    return {"schema": tuned_config.SCHEMA, "metadata": {**METADATA, **metadata}, "data": {"value": value}}


def _warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_file_names_hold_kind_gpu_and_version():
    assert tuned_config.file_name("demo", *PARTS) == NAME
    assert tuned_config.file_name("gemm_tiles", "NVIDIA H100 80GB HBM3", "0.4.10") == (
        "gemm_tiles_nvidia_h100_80gb_hbm3_0.4.10.json"
    )


def test_what_is_written_is_what_is_read(tmp_path):
    path = tmp_path / "deep" / NAME
    tuned_config.write_tuned(path, METADATA, {"value": [1, 2]})
    assert tuned_config.read_tuned(path, MATCH) == {"value": [1, 2]}
    assert [entry.name for entry in path.parent.iterdir()] == [NAME]


def test_writing_refuses_incomplete_metadata(tmp_path):
    with pytest.raises(ValueError, match="^metadata: lacks triton"):
        tuned_config.write_tuned(tmp_path / NAME, {k: v for k, v in METADATA.items() if k != "triton"}, {})
    assert not (tmp_path / NAME).exists()


def test_a_fitting_file_is_used_without_a_warning(tmp_path, caplog):
    _write(tmp_path, _valid(11))
    with caplog.at_level(logging.INFO):
        assert _load(tmp_path) == 11
    assert _warnings(caplog) == []
    assert any(str(tmp_path / NAME) in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{not json", "unreadable"),
        ("", "unreadable"),
        ([1, 2], "no metadata"),
        ({"schema": 1, "data": {}}, "no metadata"),
        ({**_valid(), "schema": 99}, "schema is 99, must be 1"),
        ({**_valid(), "metadata": {"gpu": "NVIDIA H200"}}, "metadata lacks triton, package_version, kernel_version"),
        (_valid(gpu="NVIDIA H20"), "measured with gpu 'NVIDIA H20', running 'NVIDIA H200'"),
        (_valid(kernel_version="0.4.4"), "measured with kernel_version '0.4.4', running '0.4.5'"),
        ({**_valid(), "data": [3]}, "no data"),
        ({**_valid(), "data": {}}, "KeyError"),
    ],
)
def test_an_unusable_file_gives_one_warning_with_the_reason_and_no_exception(tmp_path, caplog, content, reason):
    _write(tmp_path, content)
    assert _load(tmp_path) is None
    assert _load(tmp_path) is None
    (warning,) = _warnings(caplog)
    assert reason in warning
    assert "default rule" in warning


def test_an_absent_file_gives_one_warning(tmp_path, caplog):
    assert _load(tmp_path) is None
    assert _load(tmp_path) is None
    (warning,) = _warnings(caplog)
    assert f"no tuned file {NAME}" in warning


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / NAME).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TunedConfigError, match="unreadable"):
        tuned_config.read_tuned(tmp_path / NAME, MATCH)


def test_a_directory_in_the_files_place_is_no_file(tmp_path, caplog):
    (tmp_path / NAME).mkdir()
    assert _load(tmp_path) is None
    assert len(_warnings(caplog)) == 1


def test_the_users_file_comes_before_the_shipped_one(tmp_path):
    user, shipped = tmp_path / "user", tmp_path / "shipped"
    _write(user, _valid(1))
    _write(shipped, _valid(2))
    assert _load(user, shipped) == 1


def test_a_stale_user_file_leaves_the_shipped_one_in_use_and_says_so(tmp_path, caplog):
    user, shipped = tmp_path / "user", tmp_path / "shipped"
    _write(user, _valid(1, kernel_version="0.4.4"))
    _write(shipped, _valid(2))
    assert _load(user, shipped) == 2
    (warning,) = _warnings(caplog)
    assert "0.4.4" in warning
    assert str(shipped / NAME) in warning


def test_a_file_is_read_once_a_process_until_the_cache_is_cleared(tmp_path):
    _write(tmp_path, _valid(1))
    assert _load(tmp_path) == 1
    _write(tmp_path, _valid(2))
    assert _load(tmp_path) == 1
    tuned_config.clear_cache()
    assert _load(tmp_path) == 2


def test_by_default_the_users_directory_and_the_shipped_one_are_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned_config, "user_directory", lambda: tmp_path / "user")
    monkeypatch.setattr(tuned_config, "SHIPPED_DIRECTORY", tmp_path / "shipped")
    _write(tmp_path / "shipped", _valid(5))
    assert tuned_config.load_tuned("demo", PARTS, MATCH, lambda data: data["value"]) == 5


def test_no_gpu_has_no_name(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert tuned_config.gpu_name() is None


def test_every_shipped_file_is_well_formed_and_named_after_its_metadata():
    for path in tuned_config.SHIPPED_DIRECTORY.glob("*.json"):
        assert tuned_config.read_tuned(path, {})
        metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"]
        assert tuned_config.slug(metadata["gpu"]) in path.name


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
