import hashlib
import json
import socket

import numpy as np
import pytest
import torch
from lm_eval import utils

from tests.support.models import random_llama
from tests.support.tiny import VOCAB_SIZE, tiny_tokenizer
from workflow.lib.data.encoding.row_formats import to_sample
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.evaluation.lm_eval_tasks import (
    load_tasks,
    run_tasks,
    sandbox_task_templates,
    task_facts,
)
from workflow.lib.evaluation.task_files import SINGLE_PROCESS
from workflow.lib.settings.config import DataColumns, EvaluateConfig
from workflow.lib.system import limits
from workflow.lib.system.errors import UserError

WORDS = ["fox", "dog", "lazy", "brown", "question", "answer", "prompt", "rows", "train", "forty"]
GENERATOR = np.random.default_rng(0)
QUESTIONS = [
    {
        "question": f"What follows {WORDS[i % 10]} and {WORDS[i % 7]}?",
        "choices": [" ".join(GENERATOR.permutation(WORDS)[: 1 + c]) for c in range(3)],
        "answer": int(GENERATOR.integers(3)),
    }
    for i in range(13)
]
CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: {how}}}]
metadata: {{version: 3.0}}
{more}
"""
WRITE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 5, do_sample: false}}
metric_list: [{{metric: exact_match}}]
filter_list: [{{name: first, filter: [{{function: take_first}}]}}]
"""


@pytest.fixture(scope="module")
def model():
    return random_llama(vocab_size=VOCAB_SIZE, eos_token_id=2, max_position_embeddings=512).eval()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """As in the stage: the harness' pool of forked processes can hang, here because they inherit
    handlers of signals."""
    for name, value in SINGLE_PROCESS.items():
        monkeypatch.setenv(name, value)


def task_file(folder, name, *, template=CHOICE, how="mean", more="", data=True):
    """Write a task of 13 items to `folder`; return settings that run it."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.jsonl"
    if data:
        file.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (folder / f"{name}.yaml").write_text(template.format(name=name, file=file, how=how, more=more))
    return EvaluateConfig(tasks=(name,), tasks_dir=str(folder), batch_size=4)


def load(settings, tokenizer):
    return load_tasks(settings, tokenizer=tokenizer, trained_template_sha256=None)


def scores(model, tokenizer, settings):
    (tasks,) = load(settings, tokenizer).values()
    return run_tasks(model, tasks, tokenizer=tokenizer, settings=settings)


@torch.no_grad()
def log_likelihood(model, tokenizer, prompt, answer):
    context = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    whole = tokenizer(prompt + answer, add_special_tokens=False)["input_ids"]
    log_p = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(log_p[i - 1, whole[i]]) for i in range(len(context), len(whole)))


def right_answers(model, tokenizer):
    """1.0 where the right choice is the likeliest, computed without the harness."""
    right = []
    for row in QUESTIONS:
        message = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        likely = [log_likelihood(model, tokenizer, prompt, choice) for choice in row["choices"]]
        right.append(float(int(np.argmax(likely)) == row["answer"]))
    return right


def test_multiple_choice_equals_the_likeliest_answers_computed_directly(model, tokenizer, tmp_path):
    found = scores(model, tokenizer, task_file(tmp_path, "direct"))
    expected = right_answers(model, tokenizer)
    assert 0 < sum(expected) < len(expected)
    items = found.items["direct", "acc"]
    assert [items[key] for key in sorted(items)] == expected
    task, mean = found.scores["direct"], np.mean(expected)
    accuracy = task.metrics["acc"]
    error = np.sqrt(mean * (1 - mean) / 12)  # 13 items, less one
    assert (accuracy.value, accuracy.stderr) == pytest.approx((mean, error))
    assert (task.items, task.version) == (13, 3.0)


def test_items_of_a_metric_that_is_not_their_mean_are_not_kept(model, tokenizer, tmp_path):
    found = scores(model, tokenizer, task_file(tmp_path, "middle", how="median"))
    assert list(found.scores["middle"].metrics) == ["acc"]
    assert found.items == {}


def test_examples_are_put_before_the_items(model, tokenizer, tmp_path):
    without = task_file(tmp_path, "shots")
    given = without.model_copy(update={"num_fewshot": 2})
    prompts = [
        {key[2] for key in scores(model, tokenizer, settings).items["shots", "acc"]}
        for settings in (without, given)
    ]
    assert not prompts[0] & prompts[1]


def test_metric_after_a_filter_carries_its_name(model, tokenizer, tmp_path):
    found = scores(model, tokenizer, task_file(tmp_path, "writes", template=WRITE))
    assert list(found.scores["writes"].metrics) == ["exact_match,first"]


def test_group_has_the_score_of_its_tasks(model, tokenizer, tmp_path):
    task_file(tmp_path, "member_a")
    task_file(tmp_path, "member_b")
    (tmp_path / "group.yaml").write_text(
        "group: family\ntask: [member_a, member_b]\naggregate_metric_list: [{metric: acc}]\n"
    )
    settings = EvaluateConfig(tasks=("family",), tasks_dir=str(tmp_path))
    found = scores(model, tokenizer, settings)
    values = {name: score.metrics["acc"].value for name, score in found.scores.items()}
    assert values["family"] == pytest.approx((values["member_a"] + values["member_b"]) / 2)
    assert found.scores["family"].items == 26
    assert sorted(task for task, _ in found.items) == ["member_a", "member_b"]


def test_task_without_its_data_file_is_refused(tokenizer, tmp_path):
    settings = task_file(tmp_path, "bare", data=False)
    with pytest.raises(
        UserError,
        match=r"bare cannot be loaded \(FileNotFoundError.*bare\.jsonl.*Mend the task's file",
    ):
        load(settings, tokenizer)


def test_data_file_beside_a_task_is_found_from_any_folder(tokenizer, tmp_path, monkeypatch):
    settings = task_file(tmp_path / "tasks", "near")
    file = tmp_path / "tasks" / "near.yaml"
    file.write_text(file.read_text().replace(f"{tmp_path}/tasks/", ""))
    monkeypatch.chdir(tmp_path)
    (tasks,) = load(settings, tokenizer).values()
    assert len(list(tasks["tasks"]["near"].eval_docs)) == len(QUESTIONS)
    (tmp_path / "near.jsonl").write_text(json.dumps(QUESTIONS[0]) + "\n")
    (tasks,) = load(settings, tokenizer).values()
    assert len(list(tasks["tasks"]["near"].eval_docs)) == 1, "the folder one runs in goes first"


def test_examples_for_a_task_defined_without_are_refused(tokenizer, tmp_path):
    settings = task_file(tmp_path, "zero", more="num_fewshot: 0")
    load(settings, tokenizer)
    with pytest.raises(
        UserError, match=r"evaluate\.num_fewshot = 3: the task zero is defined without examples"
    ):
        load(settings.model_copy(update={"num_fewshot": 3}), tokenizer)


def test_chat_template_that_is_not_there_is_refused(tmp_path):
    plain = tiny_tokenizer(tmp_path / "tokenizer", chat_template=False)
    settings = task_file(tmp_path, "chat")
    with pytest.raises(
        UserError,
        match=r"evaluate\.apply_chat_template = true: .*no chat template.*Set it to false",
    ):
        load(settings, plain)


def test_chat_template_other_than_the_one_trained_on_is_refused(tokenizer, tmp_path):
    settings = task_file(tmp_path, "other")
    digest = hashlib.sha256(b"{{ messages }}").hexdigest()
    with pytest.raises(
        UserError, match=r"made with another chat template.*Give that template as --chat-template"
    ):
        load_tasks(settings, tokenizer=tokenizer, trained_template_sha256=digest)
    raw = settings.model_copy(update={"apply_chat_template": False})
    load_tasks(raw, tokenizer=tokenizer, trained_template_sha256=digest)


def facts(settings, tokenizer):
    (tasks,) = load(settings, tokenizer).values()
    return task_facts(tasks, settings=settings, tokenizer=tokenizer)


def test_facts_of_a_task_are_those_of_its_content(tokenizer, tmp_path):
    settings = task_file(tmp_path, "content")
    first = facts(settings, tokenizer)
    assert facts(settings, tokenizer) == first
    task_file(tmp_path, "neighbour")
    assert facts(settings, tokenizer) == first, "another task in the folder is no fact of this one"
    batched = settings.model_copy(
        update={"batch_size": 1, "samples": 3, "tasks_dir": f"{tmp_path}/."}
    )
    assert facts(batched, tokenizer) == first


@pytest.mark.parametrize(
    "change", [{"num_fewshot": 2}, {"task_limit": 3}, {"seed": 1}, {"apply_chat_template": False}]
)
def test_facts_of_a_task_change_with_its_settings(tokenizer, tmp_path, change):
    settings = task_file(tmp_path, "settings")
    assert facts(settings.model_copy(update=change), tokenizer) != facts(settings, tokenizer)


def test_facts_of_a_task_change_with_its_files(tokenizer, tmp_path):
    settings = task_file(tmp_path, "edited")
    found = [facts(settings, tokenizer)]
    file = tmp_path / "edited.jsonl"
    file.write_text(file.read_text().replace("What", "Which", 1))
    found.append(facts(settings, tokenizer))
    file.with_suffix(".yaml").write_text(
        file.with_suffix(".yaml").read_text() + "description: Answer.\n"
    )
    found.append(facts(settings, tokenizer))
    (tmp_path / "functions.py").write_text("LIMIT = 3\n")
    found.append(facts(settings, tokenizer))
    assert len({json.dumps(f, sort_keys=True) for f in found}) == 4


ESCAPES = {
    "classes": "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}",
    "globals": "{{{{ cycler.__init__.__globals__.os.system('touch {path}') }}}}",
    "filter": "{{{{ cycler|attr('__init__')|attr('__globals__') }}}}",
    "computed": "{{{{ ''['__cla' ~ 'ss__'] }}}}",
    "format": "{{{{ '{{0.__class__.__mro__}}'.format('') }}}}",
}
CHAT_ESCAPE = (
    "{{%- for m in messages -%}}{{{{ cycler.__init__.__globals__.os.system('touch {path}') }}}}"
    "{{{{ m['role'] }}}} {{{{ m['content'] }}}}{{%- endfor -%}}"
)


@pytest.fixture(autouse=True)
def _sandboxed():
    sandbox_task_templates()


@pytest.mark.parametrize("escape", ESCAPES.values(), ids=ESCAPES)
def test_task_template_cannot_leave_its_sandbox(tmp_path, escape):
    target = tmp_path / "here"
    with pytest.raises(UserError, match=r"of a task fails \((SecurityError|UndefinedError): "):
        utils.apply_template(escape.format(path=target), {"x": 1})
    assert not target.exists()


def test_task_template_cannot_fill_the_memory_with_a_range():
    with pytest.raises(UserError, match="Range too big"):
        utils.apply_template("{% for i in range(10 ** 12) %}{% endfor %}", {})


EVIL = EvaluateConfig(tasks=("evil",), apply_chat_template=False)
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# What would be written, and how: computed for each item, or once as a constant.
FLOODS = [
    "{{ 'x' * size }}",
    "{{ 'x' * 3000000000 }}",
    "{{ 'x'.ljust(size) }}",
    "{{ x | indent(size) }}",
]


MEMORY, TIME = "takes more than 1,024 MiB of memory", r"more than 0\.05 seconds"
STOPPED = [*((flood, MEMORY) for flood in FLOODS), (LOOPS, TIME), ("{{ 10 ** (10 ** 9) }}", TIME)]


@pytest.mark.parametrize(
    ("template", "said"),
    [*STOPPED, ("{{ 'x' * 20000000 }}", "writes 20000000 characters, more than 16777216")],
)
def test_task_template_is_stopped_at_bounds_of_time_memory_and_text(template, said, monkeypatch):
    if said == TIME:
        monkeypatch.setattr(limits, "MAX_SECONDS", 0.05)
    with pytest.raises(UserError, match=rf"evaluate\.tasks: .*{said}"):
        utils.apply_template(template, {"size": 3 * 10**9, "x": "a\nb"})


def test_task_whose_template_is_stopped_is_refused_in_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.05)
    write_task(tmp_path, doc_to_text=LOOPS)
    with pytest.raises(UserError, match=r"^evaluate\.tasks: the template .* Change it in the task"):
        load(EVIL.model_copy(update={"tasks_dir": str(tmp_path)}), tiny_tokenizer(tmp_path / "t"))


CATASTROPHE = "(.*?,?){1,40}!$"
FILTER = f"filter: [{{function: regex, regex_pattern: '{CATASTROPHE}'}}]"
EXPRESSIONS = {
    "filter_list": f"filter_list: [{{name: f, {FILTER}}}]",
    "metric_list": f"metric_list: [{{metric: exact_match, regexes_to_ignore: ['{CATASTROPHE}']}}]",
}


@pytest.mark.parametrize("part", EXPRESSIONS)
def test_expression_of_a_task_that_matches_for_ever_is_stopped(
    tmp_path, tokenizer, part, monkeypatch
):
    kept = [line for line in WRITE.splitlines() if not line.startswith(part)]
    expression = EXPRESSIONS[part].replace("{", "{{").replace("}", "}}")
    settings = task_file(tmp_path, "answers", template="\n".join([*kept, expression]))
    (tasks,) = load(settings, tokenizer).values()
    (task,) = tasks["tasks"].values()
    task.build_all_requests(limit=1, rank=0, world_size=1)
    answer = "aaaa, " * 8
    for instance in task.instances:
        instance.resps = [answer]
    calls = {
        "filter_list": task.apply_filters,
        "metric_list": lambda: task.process_results(next(iter(task.eval_docs)), [answer]),
    }
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.05)
    with pytest.raises(UserError, match=rf"'answers': {part}.* takes more than 0\.05 seconds"):
        calls[part]()


def test_task_template_cannot_change_what_it_is_given():
    with pytest.raises(UserError, match="SecurityError"):
        utils.apply_template("{{ choices.append(3) }}", {"choices": [1]})


def test_task_templates_still_have_the_filters_and_newlines_of_the_harness():
    template = "{{ question | regex_replace('[0-9]', '') }} {{ choices[answer] }}\n"
    found = utils.apply_template(template, {"question": "a1b", "choices": ["x", "y"], "answer": 1})
    assert found == "ab y\n"
    with pytest.raises(UserError, match="'absent' is undefined"):
        utils.apply_template("{{ absent }}", {})


def write_task(folder, *, doc_to_text):
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"question": "a", "choices": ["b", "c"], "answer": 0}) + "\n")
    (folder / "evil.yaml").write_text(
        "task: evil\ndataset_path: json\noutput_type: multiple_choice\n"
        f"dataset_kwargs: {{data_files: {{test: {rows}}}}}\ntest_split: test\n"
        f'doc_to_text: "{doc_to_text}"\n'
        "doc_to_choice: '{{choices}}'\ndoc_to_target: '{{answer}}'\n"
    )


def test_task_that_tries_to_escape_is_refused_in_one_message(tmp_path):
    target = tmp_path / "here"
    write_task(tmp_path, doc_to_text=ESCAPES["globals"].format(path=target))
    with pytest.raises(UserError, match=r"evaluate\.tasks: .*SecurityError"):
        load(EVIL.model_copy(update={"tasks_dir": str(tmp_path)}), tiny_tokenizer(tmp_path / "t"))
    assert not target.exists()


def test_chat_template_cannot_leave_its_sandbox(tmp_path):
    target = tmp_path / "here"
    tokenizer = tiny_tokenizer(tmp_path / "t")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    sample = to_sample({"messages": talk}, format="messages", columns=DataColumns())
    template = CHAT_ESCAPE.format(path=target)
    with pytest.raises((UserError, RowError)):
        SampleEncoder(tokenizer, chat_template=template, loss_on="all").encode(sample)
    assert not target.exists()
