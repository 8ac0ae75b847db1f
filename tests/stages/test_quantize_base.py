"""The stage as a program: a folder that appears whole, or not at all."""

import shutil
from dataclasses import replace

import pytest
import torch

from tests.planning.preflight.test_decision import predicted
from tests.support.decisions import run_config
from tests.support.forked_stage import forked_stage, refusal_of
from tests.support.models import tiny_llama
from tests.support.tiny import tiny_tokenizer
from tests.system.test_checksums import flip, recorded_as_download
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.files import (
    file_sha256,
    provenance,
    read_checked_json,
    read_json,
    write_checked_json,
)


def stage(model, output):
    config = {"quantize": {"block_size": 64, "double_quant": True}}
    log = output.parent / "log.txt"
    return forked_stage("quantize_base", config=config, model=model, output=output, log=log)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantize")
    tiny_llama(folder / "model", dtype=torch.bfloat16)
    tiny_tokenizer(folder / "model")
    (folder / "model" / "LICENSE").write_text("terms\n")
    (folder / "base").mkdir()
    (folder / "base" / "stale").touch()  # a folder that Snakemake had made, or that was left over
    done = stage(folder / "model", folder / "base")
    assert done.returncode == 0, done.stderr
    assert "quantized 21 linears" in done.stderr
    return folder


def test_base_brings_tokenizer_licence_and_checksums_and_nothing_stale(folder):
    names = {p.name for p in (folder / "base").iterdir()}
    assert (folder / "base" / "LICENSE").read_text() == "terms\n"
    assert {"tokenizer.json", "tokenizer_config.json", "config.json", "quantization.json"} <= names
    assert "stale" not in names
    lines = (folder / "base" / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert listed.keys() == names - {"SHA256SUMS"}
    assert all(file_sha256(folder / "base" / name) == digest for name, digest in listed.items())


def test_record_counts_what_was_quantized(folder):
    record = read_checked_json(folder / "base" / "quantization.json")
    per_layer = 2 * 80 * 80 + 2 * 16 * 80 + 3 * 176 * 80
    assert record["quantized_linears"] == 3 * 7
    assert record["quantized_parameters"] == 3 * per_layer
    index = read_json(folder / "base" / "model.safetensors.index.json")
    assert record["total_bytes"] == index["metadata"]["total_size"]
    assert record["settings"] == QuantizeConfig().model_dump(mode="json")
    assert "calibration" not in record


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_damaged_download_leaves_no_base_and_is_named(folder, tmp_path, name):
    model = recorded_as_download(shutil.copytree(folder / "model", tmp_path / "model"))
    flip(model / name, -2)
    said = refusal_of(stage(model, tmp_path / "base"), output=tmp_path / "base")
    assert f"{model}/{name} is damaged: it does not have the SHA-256" in said
    assert f"Delete the folder {model} and repeat the command" in said


def test_record_names_the_bytes_of_the_weights_that_were_read(folder):
    record = read_checked_json(folder / "base" / "quantization.json")
    weights = folder / "model" / "model.safetensors"
    assert record["model_files"] == {weights.name: file_sha256(weights)}


def test_linears_that_preflight_chose_stay_in_16_bits(folder, tmp_path):
    _, document = predicted(run_config())
    plan = replace(document.plan, kept=("down_proj", r"layers\.0\.self_attn"))
    decided = document.model_copy(update={"plan": plan}).model_dump()
    write_checked_json(tmp_path / "preflight.json", decided | {"provenance": provenance()})
    done = forked_stage(
        "quantize_base",
        config={"quantize": {"keep": "auto"}},
        model=folder / "model",
        preflight=tmp_path / "preflight.json",
        output=tmp_path / "base",
        log=tmp_path / "log.txt",
    )
    assert done.returncode == 0, done.stderr
    record = read_checked_json(tmp_path / "base" / "quantization.json")
    assert (record["quantized_linears"], record["kept"]) == (3 * 7 - 3 - 4, 3 + 4)
    assert record["settings"]["keep"] == ["down_proj", r"layers\.0\.self_attn"]
