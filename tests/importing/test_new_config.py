"""The script that writes a config: what it proposes for a file, and its messages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.preflight_examples import TINY
from tests.support.tiny import tiny_tokenizer
from tests.support.tokenizing import rows, save_rows
from workflow.importing.written_config import finish
from workflow.lib.settings.config import load_config
from workflow.lib.system.errors import UserError
from workflow.scripts.new_config import PLAIN_TEMPLATE, arguments, main

PAIRS = [
    {"prompt": f"Question {n}?", "chosen": f"Yes, {n}.", "rejected": f"No, not {n}."}
    for n in range(40)
]


def model_folder(folder, **tokenizer):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 300}))
    tiny_tokenizer(folder, **tokenizer)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("models") / "chat")


def new_config(tmp_path, model, *options, content=None):
    data = save_rows(tmp_path / "rows.jsonl", rows(60) if content is None else content)
    output = tmp_path / "mine.yaml"
    words = ["--model", str(model), "--data", str(data), "--output", str(output), *options]
    main(arguments().parse_args(words))
    return output


def run_of(output):
    document = yaml.safe_load(output.read_text(encoding="utf-8"))
    (run,) = load_config(document | {"runs": {"first": {}}})[1].values()
    return run


@pytest.fixture(scope="module")
def written(tmp_path_factory, model):
    """The config of a file of chats for two GPUs, and the terminal."""
    folder = tmp_path_factory.mktemp("written")
    words = ["--model", model, "--data", save_rows(folder / "rows.jsonl", rows(60))]
    words += ["--gpus", "2x4090", "--output", folder / "mine.yaml"]
    command = [sys.executable, "-m", "workflow.scripts.new_config", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "mine.yaml", done


def test_config_names_model_and_data_and_the_values_that_differ_from_the_defaults(written, model):
    output, _ = written
    assert yaml.safe_load(output.read_text(encoding="utf-8")) == {
        "model": {"source": str(model)},
        "data": {"train": str(output.parent / "rows.jsonl"), "seq_len": 256},
        "lora": {"r": 8},
        "train": {"epochs": 5, "learning_rate": 0.0005, "global_batch_size": 2},
    }


def test_comments_say_what_the_file_holds(written):
    comments = written[0].read_text(encoding="utf-8")
    assert "rows.jsonl: prompt_completion; 57 documents to train on, 3 held out, 0 rows" in comments


def test_terminal_shows_documents_then_the_fit_then_the_next_commands(written):
    output, done = written
    assert "\u27e6The answer is 0.<|end|>\u27e7" in done.stdout
    assert done.stderr.index("run mine fits: a process takes") < done.stderr.index("Next:")
    assert done.stderr.endswith(f"snakemake --cores all --configfile {output}\n")


def test_pairs_give_a_config_of_their_objective(tmp_path, model):
    run = run_of(new_config(tmp_path, model, "--method", "dpo", content=PAIRS))
    assert (run.train.objective, run.train.learning_rate, run.train.epochs) == ("dpo", 5e-6, 1)


def test_base_model_without_template_gets_the_plain_one_for_chats_alone(tmp_path):
    model = model_folder(tmp_path / "base", chat_template=False)
    assert run_of(new_config(tmp_path, model)).data.chat_template == PLAIN_TEMPLATE
    assert Path(PLAIN_TEMPLATE).is_file()
    (tmp_path / "mine.yaml").unlink()
    texts = [{"text": f"A text with the number {n}."} for n in range(60)]
    assert run_of(new_config(tmp_path, model, content=texts)).data.chat_template is None


def test_tokens_are_counted_by_the_demo_s_tokenizer_where_the_model_s_cannot_be_read(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    output = new_config(tmp_path, "meta-llama/Llama-3.1-8B")
    text = output.read_text(encoding="utf-8")
    assert "these are tokens of the demo's tokenizer, as the model's cannot be read" in text
    assert run_of(output).train.learning_rate == 2e-4  # by the shipped config.json


def test_objection_of_preflight_is_an_error(tmp_path):
    document = {"model": {"source": "no/such"}}
    with pytest.raises(UserError, match=r"mine.yaml is written, but preflight has an objection"):
        finish(document, tmp_path / "mine.yaml", gpus="1x4090", rows=None)


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        (["--data", "nowhere.jsonl"], None, r"^--data = 'nowhere.jsonl': .*Give a path"),
        (["--gpus", "2x4080"], None, r"^--gpus = '2x4080': no GPU of the name .*Did you mean 4090"),
        (["--gpus", "0x4090"], None, r"^--gpus = '0x4090': the number of GPUs must be 1 to"),
        (["--model", "my model"], None, r"^--model = 'my model': no such folder"),
        (["--model", "tests"], None, r"^--model = 'tests': the folder has no config.json"),
        (["--method", "dpo"], None, r"has the columns 'prompt', 'completion', but expected are"),
        ([], [{"a": "x", "b": "y"}], r"^data.format = 'auto': data.train has the columns 'a', 'b'"),
        ([], [], r"^data.train = .*the file holds no row"),
    ],
)  # fmt: skip
def test_mistakes_have_one_message_and_write_nothing(tmp_path, model, options, content, message):
    with pytest.raises(UserError, match=message):
        new_config(tmp_path, model, *options, content=content)
    assert not (tmp_path / "mine.yaml").exists()


def test_file_that_is_there_is_not_overwritten(tmp_path, model):
    (tmp_path / "mine.yaml").write_text("mine: 1\n")
    with pytest.raises(UserError, match=r"--output = .*it is there already"):
        new_config(tmp_path, model)
    assert (tmp_path / "mine.yaml").read_text() == "mine: 1\n"
