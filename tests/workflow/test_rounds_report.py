"""Two rounds of grpo on a tiny model: what the report tells, and a reward that is required."""

from tests.support.report_pages import Page
from tests.support.workflow_project import make_project
from workflow.lib.system.checksums import read_lines

REWARDS = {"functions": {"short": {"function": "length", "options": {"at_most": 3}}}}


def test_report_tells_of_rounds_of_grpo_and_the_last_one_must_reach_the_reward(tmp_path):
    project = make_project(
        tmp_path / "project",
        train={
            "max_steps": 2,
            "objective": "grpo",
            "checkpoint_every_steps": 2,
            "log_every_steps": 1,
        },
        hardware={"cpu_processes": 1},
        evaluate={"samples": 0, "require": {"reward": 1000.0}},
        answers={
            "per_prompt": 3,
            "prompts_per_round": 8,
            "heldout_prompts": 6,
            "max_new_tokens": 5,
        },
    )
    project.write_settings(project.settings | {"runs": {"r": {"rounds": 2, "rewards": REWARDS}}})
    done = project.snakemake("all")
    assert done.status == 1
    assert "Traceback" not in done.output
    assert "r-2: reward gained" in done.output, done.output
    assert "1000" in done.output
    page = Page((project.root / "results" / "report" / "report.html").read_text())
    assert {"sampled", "clipped", "reference_kl", "entropy"} <= {*page.attributes("data-figure")}
    assert "rounds" in page.attributes("id")
    first, *_ = read_lines(project.folder("finetune", "r-1") / "metrics.jsonl")
    assert (first["ratio"], first["clipped"], first["reference_kl"]) == (1, 0, 0)
