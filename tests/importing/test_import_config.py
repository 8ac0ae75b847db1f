"""The script that imports a config: what it writes, and how it asks preflight."""

import json

import pytest
import yaml

from tests.importing.test_rules import QLORA, imported, run_of
from workflow.importing.written_config import preflight_words
from workflow.lib.planning.preflight.what_if import settings_of
from workflow.lib.settings.config import load_config
from workflow.lib.system.errors import UserError
from workflow.scripts import preflight_run
from workflow.scripts.import_config import arguments, checked, main


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(json.dumps(QLORA | {"lora_r": 24, "lora_rnak": 3}), encoding="utf-8")
    return path


def test_config_is_written_with_the_account_of_the_keys_as_comments(file, tmp_path):
    output = tmp_path / "config.yaml"
    main(arguments().parse_args([str(file), "--output", str(output)]))
    text = output.read_text(encoding="utf-8")
    (run,) = load_config(yaml.safe_load(text))[1].values()
    assert run.lora.r == 24
    assert "#   lora_rnak -> nothing of it is in the config; did you mean lora_r?\n" in text


def test_a_file_that_is_there_is_not_overwritten(file):
    words = [str(file), "--output", str(file)]
    with pytest.raises(UserError, match=r"--output = .*it is there already"):
        main(arguments().parse_args(words))
    assert json.loads(file.read_text(encoding="utf-8"))["lora_r"] == 24


def test_preflight_is_asked_about_the_settings_that_were_written():
    draft = imported(QLORA | {"max_steps": 10, "rl": "dpo", "lora_target_modules": ["q_proj"]})
    words = preflight_words(checked(draft), gpus="2x4090")
    args = preflight_run.parser().parse_args(words)
    asked = settings_of(args.set, seq_len=8, rank=1, processes=2, batch=None)
    written = run_of(draft).model_dump() | {"model": asked.model_dump()["model"]}
    assert (args.model, args.gpus, asked.model_dump()) == ("owner/model", "2x4090", written)
