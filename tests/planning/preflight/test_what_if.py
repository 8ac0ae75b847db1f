"""Preflight by hand: what is imagined, what is found, and what is refused."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.support.families import tiny_family
from tests.support.forked_stage import ROOT, forked_stage, settings_file
from tests.support.preflight_examples import TINY, manifest, write_checkpoint
from tests.support.refusals import refusal
from workflow.lib.artifacts.preflight_record import Preflight
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.model.describe_model import describe_checkpoint
from workflow.lib.planning.preflight.what_if import find_shape, machine_by_hand, settings_of
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checked_json
from workflow.lib.system.gpu_models import BY_NAME
from workflow.scripts.preflight_run import described

SETTINGS = str(settings_file({}))


def ask(*words):
    return forked_stage("preflight_run", *words)


def refused(*words):
    """Ask, assert one message without traceback, and return it."""
    answer = ask(*words)
    assert answer.returncode == 1
    assert "Traceback" not in answer.stderr
    return answer.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with the config.json of a tiny Llama. Never change it."""
    return model_of(tmp_path_factory.mktemp("tiny"))


def model_of(folder, **sizes):
    """Write the config.json of a tiny Llama of other sizes into a folder; return its name."""
    (folder / "config.json").write_text(json.dumps(TINY | sizes))
    return str(folder)


def test_what_does_not_fit_names_changes_that_would(tmp_path):
    """Three layers of Llama-3.1-8B: 0.33 GiB of packed weights, half on each GPU."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    model = ("--model", model_of(tmp_path, **sizes, **heads), "--gpus", "2x4090", "--rank", "4")
    fixed = ("train.micro_batch_size=1", "train.activation_checkpointing=true")
    fixed += ("hardware.gpu_memory_gib=2.8", "hardware.reshard_after_forward=true")
    fixed += ("hardware.offload_layers=0", "hardware.offload_activations=false")
    fixed += ("hardware.context_parallel=1",)
    settings = (word for setting in fixed for word in ("--set", setting))
    message = refused(*model, "--seq-len", "128", *settings)
    assert "does not fit" in message
    assert "hardware.gpus = 4" in message


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ((), 0, "64.00 GiB (what machines with such GPUs usually have"),
        (("--host-gib", "128"), 0, "128.00 GiB (--host-gib)"),
        (("--set", "hardware.host_memory_gib=96"), 0, "96.00 GiB (hardware.host_memory_gib)"),
        (("--host-gib", "1"), 1, "1.00 GiB (--host-gib)"),
        (("--host-gib", "-1"), 1, "--host-gib = -1.0: it must be above 0"),
    ],
    ids=["usual", "asked for", "by a setting", "too little", "none"],
)
def test_host_memory_is_that_of_the_imagined_machine_and_told(tiny, words, status, said):
    """A process with a GPU takes 2.5 GiB of it."""
    answer = ask("--model", tiny, "--gpus", "4090", "--seq-len", "64", "--estimate", *words)
    assert answer.returncode == status, answer.stderr
    assert said in " ".join(re.sub("[│\\n]", " ", answer.stderr).split())


def test_attention_of_an_imagined_machine_is_told(tiny):
    answer = ask("--model", tiny, "--gpus", "4090", "--seq-len", "64", "--estimate")
    reason = "the fastest for this model"
    assert f"attention: varlen ({reason})" in answer.stderr


def test_recordings_are_kept_and_an_estimate_makes_few_of_them(tmp_path, monkeypatch):
    """Changing one byte of the kept one costs a recording, no more."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    words = ("--model", model_of(tmp_path), "--seq-len", "64", "--gpus", "2x4090", "--output")

    def asked(*levers):
        file = tmp_path / "preflight.json"
        answer = ask(*words, str(file), *levers)
        assert answer.returncode == 0, answer.stderr
        found = json.loads(file.read_text())
        return {key: found[key] for key in ("method", "plan", "terms", "reserved_bytes")}

    folder = tmp_path / "caches" / "fsdp-qlora-workflow" / "recordings"
    estimate = asked("--estimate")
    assert estimate["method"] == "lines"
    peaks = {path.name for path in folder.iterdir()}
    assert len(peaks) == 6
    assert all(name.endswith(".peaks.json.gz") for name in peaks)
    first = asked()
    assert (first["method"], first["plan"]) == ("replay", estimate["plan"])
    (kept,) = (path for path in folder.iterdir() if path.name not in peaks)
    made = kept.stat().st_ino
    assert asked() == first
    assert kept.stat().st_ino == made
    kept.write_bytes(kept.read_bytes()[:-9])
    assert asked() == first
    assert kept.stat().st_ino != made


def test_mixture_of_experts_is_judged_by_a_recording(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32}
    model = model_of(tmp_path, **sizes, **experts, model_type="qwen3_moe")
    words = ("--model", model, "--seq-len", "64", "--gpus", "4090", "--output")
    answer = ask(*words, str(tmp_path / "p.json"))
    assert answer.returncode == 0, answer.stderr
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["method"] == "replay"
    terms = {term["name"]: term["bytes"] for term in found["terms"]}
    packed = 3 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 4 * 3 * 64 * 32) // 2  # q, k and v, o, experts
    assert packed <= terms["nf4_weights"] <= 1.1 * packed


def test_text_of_a_model_with_a_vision_tower_is_judged_by_a_recording(tmp_path):
    tiny_family("gemma3", tmp_path)
    words = ("--model", str(tmp_path), "--seq-len", "64", "--gpus", "4090", "--output")
    answer = ask(*words, str(tmp_path / "p.json"))
    assert answer.returncode == 0, answer.stderr
    assert json.loads((tmp_path / "p.json").read_text())["method"] == "replay"


def test_any_setting_can_be_given(tiny):
    words = ("--set", "hardware.price_per_gpu_hour=0.5", "--set", "train.micro_batch_size=2")
    answer = ask("--model", tiny, "--gpus", "3090", "--seq-len", "64", *words)
    assert answer.returncode == 0
    assert "cost" in answer.stderr
    assert "micro-batch 2" in answer.stderr


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--model", "Qwen3-8B"), "--gpus = null"),
        (("--model", "$NOWHERE/model", "--gpus", "4090"), "$NAME are not expanded in settings"),
        (("--model", "Qwen3-88B", "--gpus", "4090"), "Did you mean Qwen/Qwen3-8B"),
        (("--model", "Qwen3-8B", "--gpus", "4090", "--rows", "0"), "--rows = 0"),
        (("--model", "Qwen3-8B", "--gpus", "4090", "--seq-len", "99999"), (
            "max_position_embeddings is 40960"
        )),
        (("--model", "Qwen3-8B", "--gpus", "4090", "--set", "lora.r"), "--set = 'lora.r'"),
        (("--model", "Qwen3-8B", "--gpus", "4090", "--set", "lora.target_modules=[qq]"), "'qq'"),
        (("--model", "Qwen3-8B", "--gpus", "4090", "--tokens", "x"), "no meaning without --config"),
        (("--model", "Qwen3-8B", "--gpus", "4090", "--set", "hardware.gpus=2"), (
            "--gpus says which GPUs there are"
        )),
        (("--model", "Qwen3-8B", "--gpus", "4090", "--set", "lora.r=010"), (
            "--set lora.r=010: YAML reads 010 as 8. Write 8"
        )),
        (("--model", "Qwen3-8B", "--gpus", "4090", "--set", "data.seed=2026-99-99"), (
            "--set = 'data.seed=2026-99-99': it cannot be read"
        )),
        (("--model", "Qwen3-8B", "--gpus", "4090", "--longest", "--largest"), (
            "--largest = []: --longest is given too"
        )),
        (("--model", "Qwen3-8B", "--gpus", "4090", "--longest", "--seq-len", "8"), (
            "--seq-len = '8': it has no meaning with --longest"
        )),
        (("--model", "Qwen3-8B", "--gpus", "4090", "--longest", "--set", "data.seq_len=8"), (
            "--longest finds it"
        )),
        (("--gpus", "4090", "--largest", "Qwen3-8B", "Qwen3-88B"), (
            "--largest: --model = 'Qwen3-88B': no such folder"
        )),
        (("--gpus", "4090", "--largest", ""), "--largest: '': --model = '': no such folder"),
        (("--gpus", "4090", "--model", ""), "--model = '': no such folder"),
        (("--gpus", "4090", "--model", "Qwen3-8B", "--host-gib", "inf"), "--host-gib = inf"),
        (("--gpus", "4090", "--model", "Qwen3-8B", "--largest"), "--model = 'Qwen3-8B'"),
        (("--gpus", "4090", "--longest"), "--model = null: it is needed with --longest"),
        (("--config", SETTINGS, "--model", "x"), "--tokens = null"),
        (("--config", SETTINGS, "--model", "x", "--tokens", "x", "--output", "x", "--run", "x",
          "--longest"), "--longest = 'True'"),
        (("--config", SETTINGS, "--model", "x", "--tokens", "x", "--output", "x", "--run", "x",
          "--estimate"), "--estimate = 'True'"),
    ],
)  # fmt: skip
def test_mistake_is_one_message(words, part):
    assert part in refused(*words)


def test_nodes_are_counted_into_processes_and_rows_of_a_step():
    changes = ["hardware.nodes=3"]
    run = settings_of(changes, seq_len=64, rank=4, processes=4, batch=None)
    on = machine_by_hand((4, BY_NAME["NVIDIA L40S"]), asked_gib=None, hardware=run.hardware)
    assert (on.processes, on.nodes, on.processes_per_node) == (12, 3, 4)
    assert run.train.global_batch_size == 24


SEARCHES = {
    "longest": (["--gpus", "4090", "--longest"], "the longest row: data.seq_len = 128, "),
    "largest": (["--gpus", "4090", "--seq-len", "64", "--largest"], "the largest of 1 models: "),
}


@pytest.mark.parametrize("search", SEARCHES)
def test_search_is_answered_with_a_command_that_gives_the_answer_alone(tiny, search):
    words, said = SEARCHES[search]
    model = [tiny] if search == "largest" else ["--model", tiny]
    answer = ask(*words, *model, "--estimate")
    assert answer.returncode == 0, answer.stderr
    assert said in answer.stderr
    command = shlex.split(answer.stderr.strip().splitlines()[-1])
    assert command[:3] == ["python", "-m", "workflow.scripts.preflight_run"]
    again = ask(*command[3:], "--estimate")
    assert again.returncode == 0, again.stderr
    assert "fits" in again.stderr


# Of 49,152 tokens of a tiny model, with nothing to choose but the processes to a row.
LONG_ROWS = {
    "train": {"micro_batch_size": 1, "activation_checkpointing": True},
    "hardware": {
        "gpu_memory_gib": 2.3, "reshard_after_forward": True, "offload_layers": 0,
        "offload_activations": False, "tile_tokens": 0, "context_parallel": "auto",
    },
}  # fmt: skip
EVEN = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
EVEN |= {"num_key_value_heads": 2, "max_position_embeddings": 49152}


def test_longest_row_names_the_processes_that_share_it(tmp_path):
    settings = [
        word
        for section, values in LONG_ROWS.items()
        for key, value in values.items()
        for word in ("--set", f"{section}.{key}={json.dumps(value)}")
    ]
    model = ("--model", model_of(tmp_path, **EVEN), "--gpus", "2x4090")
    answer = ask(*model, "--longest", "--estimate", *settings)
    assert answer.returncode == 0, answer.stderr
    assert "data.seq_len = 49152 by hardware.context_parallel = 2, " in answer.stderr


def test_rows_of_a_run_on_two_cards_are_divided_where_one_does_not_hold_them(tmp_path):
    """The driver of tests/fake_driver shows them, to a stage of the workflow."""
    counts = manifest(seq_len=49152)
    counts["splits"]["train"]["trained_tokens"] = 37 * 49152
    write_checked_json(tmp_path / "manifest.json", counts)
    driver = {"PYTHONPATH": f"{ROOT / 'tests' / 'fake_driver'}", "CUDA_VISIBLE_DEVICES": "1,3"}
    config = {"data": {"seq_len": 49152}, **LONG_ROWS}
    config["train"] = config["train"] | {"global_batch_size": 2}
    done = forked_stage(
        "preflight_run", environment=os.environ | driver, config=config, run="demo",
        model=model_of(tmp_path, **EVEN), tokens=tmp_path / "manifest.json",
        output=tmp_path / "preflight.json", log=tmp_path / "log",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "preflight.json", Preflight)
    assert (record.plan.processes, record.plan.context_parallel) == (2, 2)
    assert record.plan.accumulation_steps == 2
    tried = [candidate.choice["context_parallel"] for candidate in record.candidates]
    assert [*dict.fromkeys(tried)] == [1, 2]


def test_bare_config_gives_the_shape_of_its_checkpoint(tmp_path):
    folder = write_checkpoint(tmp_path / "whole")
    model_of(tmp_path, dtype="float16")
    whole = describe_checkpoint(Checkpoint.open(folder))
    assert find_shape(str(folder), revision=None, describe=described) == whole
    assert find_shape(str(tmp_path), revision=None, describe=described) == whole
    assert find_shape(str(tmp_path / "config.json"), revision=None, describe=described) == whole


def test_config_of_an_unsupported_family_is_refused(tmp_path):
    model_of(tmp_path, model_type="bloom")
    with pytest.raises(
        UserError, match=r"config\.json: model_type = .bloom.: its decoder does not run on token"
    ):
        find_shape(str(tmp_path), revision=None, describe=described)


def test_shipped_model_is_predicted_without_torch():
    """Which takes seconds to load: its recordings are shipped too."""
    words = "['--model', 'Qwen3-0.6B', '--gpus', '3090', '--estimate']"
    program = (
        "import sys, runpy\n"
        f"sys.argv = ['preflight_run', *{words}]\n"
        "try:\n    runpy.run_module('workflow.scripts.preflight_run', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ({"batch": 0}, "train.global_batch_size = 0: must be at least 1"),
        ({"seq_len": 0}, "data.seq_len = 0: must be at least 8"),
        ({"rank": 0}, "lora.r = 0: must be at least 1"),
        ({"rank": 100_000}, "lora.r = 100000: must be at most 1024"),
    ],
)
def test_absurd_size_is_named_without_a_file_that_is_not_there(sizes, part):
    said = refusal(
        settings_of, [], **{"seq_len": 64, "rank": 4, "processes": 3, "batch": None} | sizes
    )
    assert said.startswith(part)
    assert "config.yaml" not in said
