"""Templates of task files and of models reach neither the interpreter nor the memory of this
machine."""

import json

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError, UndefinedError
from lm_eval import utils

from tests.support.tiny import tiny_tokenizer
from workflow.lib.data.encoding.row_formats import to_sample
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.evaluation.lm_eval_tasks import load_tasks
from workflow.lib.evaluation.task_templates import sandbox_task_templates
from workflow.lib.settings.config import DataColumns, EvaluateConfig
from workflow.lib.system import limits
from workflow.lib.system.errors import UserError

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
    with pytest.raises((SecurityError, UndefinedError)):
        utils.apply_template(escape.format(path=target), {"x": 1})
    assert not target.exists()


def test_task_template_cannot_fill_the_memory_with_a_range():
    with pytest.raises(OverflowError, match="Range too big"):
        utils.apply_template("{% for i in range(10 ** 12) %}{% endfor %}", {})


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# What would be written, and how: computed for each item, or once as a constant.
FLOODS = [
    "{{ 'x' * size }}",
    "{{ 'x' * 3000000000 }}",
    "{{ 'x'.ljust(size) }}",
    "{{ x | indent(size) }}",
]


@pytest.fixture
def little_time(monkeypatch):
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.05)


@pytest.mark.usefixtures("little_time")
@pytest.mark.parametrize("loops", [LOOPS, "{{ 10 ** (10 ** 9) }}"])
def test_task_template_cannot_compute_for_ever(loops):
    with pytest.raises(
        UserError, match=r"evaluate\.tasks: the template .* more than 0\.05 seconds"
    ):
        utils.apply_template(loops, {})


@pytest.mark.parametrize("flood", FLOODS)
def test_task_template_cannot_fill_the_memory_with_text(flood):
    with pytest.raises(UserError, match=r"evaluate\.tasks: .* takes more than 1,024 MiB of memory"):
        utils.apply_template(flood, {"size": 3 * 10**9, "x": "a\nb"})


def test_task_template_cannot_write_more_than_any_model_reads():
    with pytest.raises(UserError, match="writes 20000000 characters, more than 16777216"):
        utils.apply_template("{{ 'x' * size }}", {"size": 20_000_000})


def test_task_whose_template_is_stopped_is_refused_in_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.05)
    write_task(tmp_path, doc_to_text=LOOPS)
    settings = EvaluateConfig(tasks=("evil",), tasks_dir=str(tmp_path), apply_chat_template=False)
    with pytest.raises(UserError, match=r"^evaluate\.tasks: the template .* Change it in the task"):
        load_tasks(settings, tokenizer=tiny_tokenizer(tmp_path / "t"), trained_template_sha256=None)


def test_task_template_cannot_change_what_it_is_given():
    with pytest.raises(SecurityError):
        utils.apply_template("{{ choices.append(3) }}", {"choices": [1]})


def test_task_templates_still_have_the_filters_and_newlines_of_the_harness():
    template = "{{ question | regex_replace('[0-9]', '') }} {{ choices[answer] }}\n"
    found = utils.apply_template(template, {"question": "a1b", "choices": ["x", "y"], "answer": 1})
    assert found == "ab y\n"
    with pytest.raises(TemplateError):
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
    settings = EvaluateConfig(tasks=("evil",), tasks_dir=str(tmp_path), apply_chat_template=False)
    with pytest.raises(UserError, match=r"evaluate\.tasks = .*SecurityError"):
        load_tasks(settings, tokenizer=tiny_tokenizer(tmp_path / "t"), trained_template_sha256=None)
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
