"""Settings of the command line mean what the same YAML means in a file."""

import pytest
import yaml
from snakemake.cli import parse_config

from workflow.lib.settings.yaml_files import as_in_yaml, check_options, is_dry_run
from workflow.lib.system.errors import UserError


@pytest.mark.parametrize(
    "section",
    [
        "{heldout: null, packing: false, near_duplicate_threshold: 0.5, seq_len: 64}",
        "{train: [{path: a.jsonl, weight: 2, name: ~}, b.jsonl], loss_on: all}",
        "{chat_template: a b.jinja, name: 1.2.3, template_kwargs: {enable_thinking: no}}",
        "{train: []}",
    ],
)
def test_section_of_the_command_line_is_read_as_in_a_file(section):
    assert as_in_yaml(parse_config([f"data={section}"])) == yaml.safe_load(f"data: {section}")


def test_what_a_job_gets_from_its_snakemake_is_typed_too():
    sent = parse_config(["data={'heldout': 'null', 'train': ['a.jsonl']}"])
    assert as_in_yaml(sent) == {"data": {"heldout": None, "train": ["a.jsonl"]}}


def test_number_that_yaml_reads_as_another_is_refused():
    with pytest.raises(UserError, match=r"--config: YAML reads 010 as 8\. Write 8, or"):
        as_in_yaml(parse_config(["train={seed: 010}"]))


@pytest.mark.parametrize(
    "words",
    [
        ["--config", "train={seed: 1}", "-n", "-C", "lora={r: 2}"],
        ["--configfile", "a.yaml", "--configfiles=b.yaml"],
    ],
)
def test_option_whose_first_settings_snakemake_would_drop_is_refused(words):
    with pytest.raises(UserError, match=rf"{words[0]} stands 2 times .* Give all behind one"):
        check_options(["snakemake", *words, "all"])


def test_options_that_stand_once_are_taken():
    check_options(["snakemake", "-C", "train={seed: 1}", "lora={r: 2}", "--configfile", "a", "b"])


@pytest.mark.parametrize(
    ("words", "dry"),
    [
        (["--dry-run"], True),
        (["--cores", "2", "-np", "all"], True),
        (["--dryrun"], True),
        (["--cores", "2", "train"], False),
        (["--config", "a=-n", "--until", "finetune"], False),
    ],
)
def test_dry_run_is_read_in_all_its_spellings(words, dry):
    assert is_dry_run(words) is dry
