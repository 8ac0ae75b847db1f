"""The benchmark of sampled answers, on the demo's shape."""

from tests.support.forked_stage import forked_stage
from workflow.lib.system.checksums import read_artifact


def test_engine_and_generate_give_the_same_tokens_in_the_time_that_is_told(tmp_path):
    sizes = {"prompts": 3, "prompt_tokens": 5, "new_tokens": 20, "times": 1}
    output, base = tmp_path / "answers.json", tmp_path / "base"
    done = forked_stage("benchmark_answers", output=output, base=base, layers=1, **sizes)
    assert done.returncode == 0, done.stderr
    measured = read_artifact(output)
    assert measured["equal_tokens_share"] == 1.0  # one path on a CPU
    assert measured["prompts"] * measured["new_tokens"] == 60
    assert f"{measured['tokens_per_s']:.0f} tokens/s" in done.stderr
    assert base.is_dir()


def test_number_below_one_is_refused(tmp_path):
    done = forked_stage("benchmark_answers", output=tmp_path / "answers.json", new_tokens=0)
    assert done.returncode == 1
    assert done.stderr.startswith("--new-tokens = 0: must be at least 1")
